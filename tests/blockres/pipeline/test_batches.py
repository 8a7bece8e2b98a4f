"""A batch divided and cut on one rank, before anything travels."""

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.attention.flex_attention import create_block_mask

from blockres.pipeline.batches import (
    Batch,
    Division,
    StepShapes,
    cut,
    leading_shape,
    level,
    longest_rows,
    sequence_length,
)


def test_all_tensors_are_divided_and_everything_else_is_repeated() -> None:
    tokens, positions = torch.arange(24).view(6, 4), torch.arange(6)
    parts = Division(3).inputs((tokens, "text"), {"positions": positions, "scale": 2.0})
    assert len(parts) == 3
    for index, (args, kwargs) in enumerate(parts):
        assert torch.equal(args[0], tokens[2 * index : 2 * index + 2])
        assert torch.equal(kwargs["positions"], positions[2 * index : 2 * index + 2])
        assert (args[1], kwargs["scale"]) == ("text", 2.0)


def test_inputs_are_divided_along_the_dimensions_that_a_spec_names() -> None:
    tokens = torch.arange(24).view(4, 6)
    division = Division(3, args_chunk_spec=(TensorChunkSpec(1),))
    parts = division.inputs((tokens,), {})
    assert [args[0].shape for args, _ in parts] == [(4, 2)] * 3
    assert torch.equal(torch.cat([args[0] for args, _ in parts], 1), tokens)


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 7, 10])
def test_rows_that_do_not_divide_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"inputs of shape \[{rows}, 2\] do not divide into 4 microbatches"):
        Division(4).inputs((torch.zeros(rows, 2),), {})
    with pytest.raises(ValueError, match=rf"targets of shape \[{rows}\] do not divide .* must be a multiple of 4"):
        Division(4).targets(torch.zeros(rows))


def test_a_rank_without_inputs_has_empty_ones() -> None:
    division = Division(2, args_chunk_spec=(TensorChunkSpec(0),), kwargs_chunk_spec={"x": TensorChunkSpec(0)})
    assert division.inputs((), {}) == [((), {})] * 2


def test_targets_may_be_trees() -> None:
    labels, weights = torch.arange(4), torch.ones(4, 3)
    targets = Division(2).targets((labels, {"weights": weights}))
    assert [target[0].tolist() for target in targets] == [[0, 1], [2, 3]]
    assert [target[1]["weights"].shape for target in targets] == [(2, 3)] * 2


def test_microbatches_are_cut_to_their_longest_row() -> None:
    tokens, features = torch.randn(6, 9), torch.randn(6, 9, 3)
    other, flat = torch.randn(6, 8), torch.randn(6)
    lengths = torch.tensor([3, 5, 0, 0, 9, 1])
    parts = Division(3).inputs((tokens, other), {"x": features, "y": flat})
    longest = longest_rows(parts, lengths)
    assert longest == [5, 1, 9]
    for index, length in enumerate(longest):
        args, kwargs = cut(parts[index], 9, length)
        rows = slice(2 * index, 2 * index + 2)
        assert torch.equal(args[0], tokens[rows, :length])
        assert torch.equal(kwargs["x"], features[rows, :length])
        assert args[0].is_contiguous()
        assert kwargs["x"].is_contiguous()
        assert torch.equal(args[1], other[rows]), "only what has the padded length is cut"
        assert torch.equal(kwargs["y"], flat[rows])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1, 2, 3]), r"one integer for each row of the batch, shape \[4\]; got shape \[3\]"),
        (torch.ones(4), r"got shape \[4\], torch.float32"),
        (torch.ones(4, 1, dtype=torch.int64), r"got shape \[4, 1\]"),
        (torch.tensor([1, 2, 6, 1]), "says 6 for row 2; the inputs are padded to 5"),
        (torch.tensor([1, -1, 5, 1]), "says -1 for row 1"),
    ],
)
def test_impossible_row_lengths_are_refused(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longest_rows(Division(2).inputs((torch.zeros(4, 5),), {}), lengths)


def test_inputs_without_a_sequence_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="the first input has no sequence dimension"):
        longest_rows(Division(2).inputs((torch.zeros(4),), {}), torch.ones(4, dtype=torch.int64))


def test_a_block_mask_is_not_cut() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 8, 8, device="cpu")
    assert cut({"mask": mask}, 1, 0)["mask"] is mask
    assert sequence_length((mask, torch.zeros(2, 7))) == 7


def test_outputs_are_levelled_with_zeros() -> None:
    outputs = [torch.randn(2, length, 3) for length in (4, 2, 5)]
    levelled = level(outputs)
    for output, padded in zip(outputs, levelled, strict=True):
        assert padded.shape == (2, 5, 3)
        assert torch.equal(padded[:, : output.shape[1]], output)
        assert not padded[:, output.shape[1] :].any()
    assert levelled[2] is outputs[2]
    assert level([]) == []


def test_outputs_of_several_tensors_are_levelled_one_by_one() -> None:
    outputs = [(torch.randn(2, length, 3), {"beside": torch.randn(1)}, None) for length in (4, 5)]
    levelled = level(outputs)
    assert [logits.shape for logits, *_ in levelled] == [(2, 5, 3)] * 2
    for output, padded in zip(outputs, levelled, strict=True):
        assert torch.equal(padded[0][:, : output[0].shape[1]], output[0])
        assert padded[1]["beside"] is output[1]["beside"]
        assert padded[2] is None


def test_a_source_has_the_leading_dimensions_of_the_first_tensor() -> None:
    shape_of = leading_shape(3, 64)
    assert shape_of(torch.zeros(2, 7)) == (2, 7, 64)
    assert shape_of("mode", x=torch.zeros(2, 7, 9, 9)) == (2, 7, 64)
    with pytest.raises(ValueError, match=r"shape \[2\] does not begin with the 2 leading dimensions .* shape_of"):
        shape_of(torch.zeros(2))
    with pytest.raises(ValueError, match="was given no tensor as its input"):
        shape_of("mode")


def test_padding_is_what_was_cut() -> None:
    shapes = StepShapes(((2, 3, 4, 5), (2, 7, 4, 5)), padded_length=7)
    assert [shapes.padding(microbatch) for microbatch in (0, 1)] == [2 * 4 * 4 * 5, 0]
    assert StepShapes(((2, 3, 5),)).padding(0) == 0


def test_microbatches_may_be_divided_already() -> None:
    division = Division(2)
    tokens, extra = [torch.zeros(1, 2), torch.zeros(3, 4)], [{"x": 1}, {"x": 2}]
    batch = Batch(arg_mbs=[(t,) for t in tokens], kwarg_mbs=extra, target_mbs=["a", "b"])
    assert batch.inputs(division, with_args=True) == [((tokens[0],), {"x": 1}), ((tokens[1],), {"x": 2})]
    assert batch.inputs(division, with_args=False) == [((), {"x": 1}), ((), {"x": 2})]
    assert batch.targets(division) == ["a", "b"]
    assert Batch(target_mbs=["a", "b"]).inputs(division, with_args=True) == [((), {})] * 2
    assert Batch().targets(division) is None


def test_what_is_divided_already_must_fit() -> None:
    pair, lengths = [(torch.zeros(1),)] * 2, torch.ones(2, dtype=torch.int64)
    for batch, message in (
        (Batch(arg_mbs=pair * 2), "arg_mbs has 4 microbatches, the schedule was built for 2"),
        (Batch(arg_mbs=pair, kwarg_mbs=[{}]), "kwarg_mbs has 1 microbatches"),
        (Batch(arg_mbs=pair, target_mbs=[0, 0, 0]), "target_mbs has 3 microbatches"),
        (Batch(arg_mbs=pair, args=pair[0]), "must not be a whole batch"),
        (Batch(arg_mbs=pair, target=torch.zeros(2)), "must not be a whole batch"),
        (Batch(target_mbs=[0, 0], kwargs={"x": 1}), "must not be a whole batch"),
        (Batch(arg_mbs=pair, row_lengths=lengths), "must not be a whole batch or variable_seq_lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.inputs(Division(2), with_args=True)
