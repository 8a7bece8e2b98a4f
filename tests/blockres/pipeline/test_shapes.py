"""Batches of other sizes from step to step and padded ones cut by microbatch, in real processes; what is refused."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockres.pipeline import Traffic, build_schedule
from tests.support.distributed import Check, errors_of_all_ranks, run_ranks
from tests.support.pipeline import VOCABULARY, Case, Pipeline, batch_of, build, largest_error, reference, whole_model

LOOP = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4)
CASES = [
    LOOP,
    LOOP.but(cache=False),
    LOOP.but(schedule="1F1B", sublayers_per_stage=(3, 5)),
    LOOP.but(schedule="InterleavedZeroBubble", n_microbatches=2),
    LOOP.but(schedule="ZBVZeroBubble", n_microbatches=3),
]


def sizes_change_from_step_to_step(rank: int) -> None:
    for case in [*CASES, LOOP.but(dtype=torch.float32, pipeline_dtype=torch.float64)]:
        pipeline = build(case, rank)
        for shape in ((2, 3, 5), (1, 7, 5), (3, 1, 5), (2, 3, 5)):
            _check_step(pipeline, case.but(shape=shape))
            if shape[1] > 1:
                _check_evaluation(pipeline, case.but(shape=(shape[0] + 1, 4, 5)))


def _check_step(pipeline: Pipeline, case: Case) -> None:
    bound = 1e-12 if case.dtype == torch.float64 else 1e-5
    loss, expected = reference(case)
    pipeline.zero_gradients()
    pipeline.case = case
    losses = pipeline.step()
    if losses:
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=bound)
    own = {name for stage in pipeline.stages for name, _ in stage.submod.named_parameters()}
    assert set(pipeline.gradients()) == own & set(expected)
    assert largest_error(pipeline.gradients(), expected) <= bound, f"{case}, {case.shape}"
    assert len(pipeline.cache) == 0
    assert all(stage.step_shapes is None for stage in pipeline.stages), "the next step may have others"


def _check_evaluation(pipeline: Pipeline, case: Case) -> None:
    pipeline.case = case
    losses = pipeline.evaluate()
    if losses:
        assert sum(losses) / len(losses) == pytest.approx(reference(case)[0], rel=1e-5)
    assert len(pipeline.cache) == 0


Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]
Expected = tuple[float, dict[str, Tensor], Tensor]
"""A loss, the gradients of all parameters, and the output."""


@dataclass(frozen=True)
class Padded:
    """A batch padded on the right with arbitrary tokens; targets there are -100."""

    inputs: Tensor
    target: Tensor
    lengths: Tensor

    @property
    def tokens(self) -> int:
        return int((self.target != -100).sum())

    def on(self, pipeline: Pipeline) -> Arguments:
        """The arguments of a step that a rank needs: inputs on the first stage's, targets on the last's."""
        stages = pipeline.stages
        options: dict[str, Any] = {"loss_kwargs": {"tokens": self.tokens}}
        if stages[-1].is_last:
            options["target"] = self.target
        return (self.inputs,) if stages[0].is_first else (), options

    def cut_on(self, pipeline: Pipeline) -> Arguments:
        args, options = self.on(pipeline)
        return args, options | ({"variable_seq_lengths": self.lengths} if args else {})


def masked_loss(output: Tensor, target: Tensor, tokens: int) -> Tensor:
    logits, target = output.flatten(0, 1), target.flatten()
    return nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum") / tokens


PADDED_TO = 9
ROW_LENGTHS = {
    "mixed": (3, 1, 9, 2, 0, 0, 5, 8),  # two rows a microbatch; one microbatch has nothing real
    "short": (2, 1, 3, 4, 1, 1, 2, 2),
    "full": (9,) * 8,
}


@cache
def padded_batch(kind: str) -> Padded:
    generator = torch.Generator().manual_seed(5)
    inputs, target = torch.randint(VOCABULARY, (2, 8, PADDED_TO), generator=generator)
    lengths = torch.tensor(ROW_LENGTHS[kind])
    target[torch.arange(PADDED_TO) >= lengths[:, None]] = -100
    return Padded(inputs, target, lengths)


def masked_reference(case: Case, kind: str, shifted: bool = False) -> Expected:
    """The unsplit model on the padded batch as a whole: the loss over real tokens, its gradients, and the output."""
    return _masked_reference(case.unsplit, kind, shifted)


@cache
def _masked_reference(case: Case, kind: str, shifted: bool) -> Expected:
    model, batch = whole_model(case), padded_batch(kind)
    output = model(batch.inputs, shift=shift_of_batch() if shifted else None)
    loss = masked_loss(output, batch.target, batch.tokens)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, output.detach()


def cut_microbatches_give_the_gradients_of_the_padded_batch(rank: int) -> None:
    for base in CASES:
        case = base.but(shape=(2, PADDED_TO, 5), n_microbatches=4, model={"causal": True})
        pipeline = build(case, rank)
        pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, masked_loss, scale_grads=False)
        for kind in ROW_LENGTHS:
            batch = padded_batch(kind)
            expected = masked_reference(case, kind)
            padded = _traffic_of_step(pipeline, batch.on(pipeline), expected)
            assert padded.saved_bytes == 0
            _check_saved(pipeline, batch, _traffic_of_step(pipeline, batch.cut_on(pipeline), expected), padded)
            _check_cut_evaluation(pipeline, batch, expected)


def _traffic_of_step(pipeline: Pipeline, arguments: Arguments, expected: Expected) -> Traffic:
    """What one training step sends, once its losses and gradients are found to be the expected ones."""
    (args, options), losses = arguments, []
    loss, gradients, output = expected
    pipeline.zero_gradients()
    for stage in pipeline.stages:
        stage.reset_traffic()
    merged = pipeline.schedule.step(*args, losses=losses, **options)
    assert largest_error(pipeline.gradients(), gradients) <= 1e-12, str(pipeline.case)
    assert pipeline.gradients().keys() == {n for s in pipeline.stages for n, _ in s.submod.named_parameters()}
    if merged is not None:
        assert sum(losses).item() == pytest.approx(loss, rel=1e-12)
        _check_output(merged, output, options["target"])
    return pipeline.traffic()


def _check_output(merged: Tensor, output: Tensor, target: Tensor) -> None:
    real = (target != -100)[:, : merged.shape[1]]
    torch.testing.assert_close(merged[real], output[:, : merged.shape[1]][real], rtol=1e-12, atol=1e-12)


def _check_saved(pipeline: Pipeline, batch: Padded, cut: Traffic, padded: Traffic) -> None:
    assert (cut.forward_units, cut.backward_units) == (padded.forward_units, padded.backward_units)
    payload, padded_payload = (t.forward_bytes + t.backward_bytes for t in (cut, padded))
    assert payload + cut.saved_bytes == padded_payload
    longest = [max(1, *rows.tolist()) for rows in batch.lengths.chunk(4)]
    assert payload * PADDED_TO * len(longest) == padded_payload * sum(longest)


def _check_cut_evaluation(pipeline: Pipeline, batch: Padded, expected: Expected) -> None:
    args, options = batch.cut_on(pipeline)
    losses: list[Tensor] = []
    merged = pipeline.schedule.eval(*args, losses=losses, **options)
    if merged is not None:
        assert sum(losses).item() == pytest.approx(expected[0], rel=1e-12)
        assert merged.shape[1] == int(batch.lengths.max())
        _check_output(merged, expected[2], batch.target)


def what_is_cut_is_packed_as_well(rank: int) -> None:
    case = LOOP.but(shape=(2, PADDED_TO, 5), model={"causal": True}, dtype=torch.float32, pipeline_dtype=torch.bfloat16)
    pipeline, batch = build(case, rank), padded_batch("mixed")
    pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, masked_loss, scale_grads=False)
    runs = []
    for args, options in (batch.on(pipeline), batch.cut_on(pipeline)):
        for stage in pipeline.stages:
            stage.reset_traffic()
        pipeline.zero_gradients()
        pipeline.schedule.step(*args, **options)
        runs.append((pipeline.traffic(), pipeline.gradients()))
    (padded, expected), (cut, gradients) = runs
    _check_saved(pipeline, batch, cut, padded)
    assert largest_error(gradients, expected) <= 1e-2


def a_refused_batch_is_an_error_on_all_ranks(rank: int) -> None:
    """Whoever notices, all raise the same before the step; the next one is right."""
    pipeline = build(LOOP, rank)
    good, target = torch.zeros(8, 3, dtype=torch.int64), torch.zeros(8, 3, dtype=torch.int64)
    wrong_lengths = {"variable_seq_lengths": torch.tensor([1, 2, 3, 3, 3, 3, 3, 4])}
    right_lengths = {"variable_seq_lengths": torch.tensor([1, 2, 3, 3, 3, 3, 3, 3])}
    refused: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        (r"rank 0 refused .* inputs of shape \[7, 3\] do not divide into 4 microbatches", (good[:7],), {}),
        (r"rank 0 refused .* inputs of shape \[3, 3\] do not divide", (good[:3],), {}),
        (r"rank 1 refused .* targets of shape \[6, 3\] do not divide", (good,), {"target": target[:6]}),
        ("rank 0 refused .* was given no tensor as its input", (), {}),
        (r"rank 0 refused .* the shape \[2, 0, 5\] .* all of them positive", (good[:, :0],), {}),
        ("rank 0 refused .* does not begin with the 2 leading dimensions", (good[:, 0],), {}),
        ("rank 0 refused .* says 4 for row 7; the inputs are padded to 3", (good,), wrong_lengths),
        ("the inputs are padded to 3, the targets to 2", (good,), right_lengths | {"target": target[:, :2]}),
    ]
    for run in (pipeline.schedule.step, pipeline.schedule.eval):
        for pattern, args, options in refused:
            _check_refusal(run, pattern, *args, **{"target": target} | options)
    _check_refusal(pipeline.schedule.step, "rank 1 refused .* was given no target for the loss", good)
    _check_step(pipeline, LOOP)
    _check_evaluation(pipeline, LOOP)


def _check_refusal(run: Callable[..., Any], pattern: str, *args: Tensor, **options: Any) -> None:
    messages = errors_of_all_ranks(lambda: run(*args, **options), ValueError, pattern)
    assert len(set(messages)) == 1


def a_users_shape_of_may_fail_on_its_rank(rank: int) -> None:
    pipeline = build(LOOP, rank)
    for shape_of, pattern in (
        (lambda tokens: 1 / 0, "rank 0 refused .* ZeroDivisionError: division by zero"),
        (lambda tokens: (2, 3, 6), r"shape \[2, 3, 6\] .* with 5 in the last"),
        (lambda tokens: (2, 3), r"shape \[2, 3\] .* set up for 3 dimensions"),
    ):
        schedule = build_schedule(LOOP.schedule, pipeline.stages, 4, masked_loss, shape_of=shape_of)
        inputs, target = batch_of(LOOP)
        _check_refusal(schedule.step, pattern, inputs, target=target)
    _check_step(pipeline, LOOP)


def some_train_while_others_evaluate(rank: int) -> None:
    pipeline = build(LOOP, rank)
    pipeline.step()
    messages = errors_of_all_ranks(
        pipeline.evaluate if rank else pipeline.step, ValueError, "1 of the pipeline's 2 ranks began a training step"
    )
    assert messages[0] == messages[1]
    _check_step(pipeline, LOOP)


COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list", "barrier")


@contextmanager
def counted_collectives() -> Iterator[Counter[tuple[str, int]]]:
    """While it lasts, counts this process's collectives, with the elements of what each was given."""
    found: Counter[tuple[str, int]] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def run(first: Any = None, *args: Any, **options: Any) -> Any:
            found[name, first.numel() if isinstance(first, Tensor) else 0] += 1
            return originals[name](first, *args, **options)

        return run

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def one_small_message_begins_a_step(rank: int) -> None:
    pipeline = build(LOOP, rank)
    pipeline.step()
    numbers = 4 + LOOP.n_microbatches * 3
    for shape in (LOOP.shape, (3, 4, 5)):
        pipeline.case = LOOP.but(shape=shape)
        for run in (pipeline.step, pipeline.evaluate):
            with counted_collectives() as found:
                run()
            assert found == {("all_reduce", numbers): 1}


def inputs_that_are_not_tokens(rank: int) -> None:
    """Tokens come as [B, 1, T]: the leading dimensions are not those of a source."""
    pipeline = build(LOOP, rank)
    inputs, target = _tokens_as_channels(pipeline)
    pipeline.schedule = build_schedule(
        LOOP.schedule,
        pipeline.stages,
        4,
        pipeline.loss_fn,
        shape_of=lambda tokens: (tokens.shape[0], tokens.shape[2], 5),
    )
    pipeline.schedule.step(inputs, target=target)
    assert largest_error(pipeline.gradients(), reference(LOOP)[1]) <= 1e-12


def what_shape_of_is_for_is_said_where_it_lacks(rank: int) -> None:
    pipeline = build(LOOP.but(pp_size=1), rank)
    inputs, target = _tokens_as_channels(pipeline)
    with pytest.raises(ValueError, match=r"set up for \(2, 1, 5\); where inputs are not .* say with shape_of"):
        pipeline.schedule.step(inputs, target=target)


def _tokens_as_channels(pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    if pipeline.stages[0].is_first:
        pipeline.stages[0].submod.register_forward_pre_hook(lambda _, args: (args[0][:, 0],))
    inputs, target = batch_of(pipeline.case)
    return inputs[:, None], target


def torchs_own_schedules_have_one_shape_until_it_is_set(rank: int) -> None:
    for case in CASES[:4]:
        pipeline = build(case, rank, plain=True)
        for shape in ((2, 3, 5), (1, 7, 5)):
            for stage in pipeline.stages:
                stage.set_microbatch_shape(shape)
            _check_step(pipeline, case.but(shape=shape))
            _check_evaluation(pipeline, case.but(shape=shape))


def go_on_after_a_refused_batch(rank: int) -> Iterator[None]:
    """Rank 0 has an error and goes on with the next batch, of which rank 1 would take the inputs for the last one's."""
    pipeline = build(LOOP, rank, plain=True)
    pipeline.step()
    if rank == 0:
        pipeline.case = LOOP.but(shape=(2, 4, 5))
        with pytest.raises(ValueError, match=r"source 0 with shape \(2, 4, 5\), it was set up for \(2, 3, 5\)"):
            pipeline.step()
        pipeline.case = LOOP
    pipeline.step()
    yield None


def test_ranks_out_of_step_stop() -> None:
    ahead, behind = run_ranks(2, go_on_after_a_refused_batch, timeout=45)
    assert (ahead.exit_code, behind.exit_code) == (1, 1)
    assert "the hop that came in says step = 3, expected 2" in str(behind.error)
    assert "by peer" in str(ahead.error), "closed or reset"


def divided_microbatches_may_have_any_size(rank: int) -> None:
    """Each of its own batch size and length, divided by the caller: gradients of the sum of all token losses."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 3), (1, 7), (3, 1), (2, 5))
    inputs, targets = [[torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes] for _ in range(2)]
    tokens = {"tokens": sum(target.numel() for target in targets)}
    for base in (LOOP, LOOP.but(schedule="ZBVZeroBubble")):
        case = base.but(model={"causal": True})
        model, pipeline = whole_model(case), build(case, rank)
        loss = sum(masked_loss(model(i), t, **tokens) for i, t in zip(inputs, targets, strict=True))
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, masked_loss, scale_grads=False)
        options: dict[str, Any] = {"loss_kwargs": tokens}
        if pipeline.stages[0].is_first:
            options["arg_mbs"] = [(i,) for i in inputs]
        if pipeline.stages[-1].is_last:
            options["target_mbs"] = targets
        for run in (pipeline.schedule.step, pipeline.schedule.eval):
            losses: list[Tensor] = []
            merged = run(losses=losses, **options)
            if merged is not None:
                assert sum(losses).item() == pytest.approx(loss.item(), rel=1e-12)
                assert merged.shape[:2] == (8, 7)
        assert largest_error(pipeline.gradients(), expected) <= 1e-12


def shift_of_batch() -> Tensor:
    return torch.randn(8, PADDED_TO, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def keyword_inputs_reach_all_ranks_and_are_cut(rank: int) -> None:
    for base in (LOOP, LOOP.but(schedule="ZBVZeroBubble")):
        case = base.but(shape=(2, PADDED_TO, 5), model={"causal": True})
        pipeline, batch = build(case, rank), padded_batch("mixed")
        pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, masked_loss, scale_grads=False)
        expected = masked_reference(case, "mixed", shifted=True)
        for args, options in (batch.on(pipeline), batch.cut_on(pipeline)):
            _traffic_of_step(pipeline, (args, options | {"shift": shift_of_batch()}), expected)


def one_rank_takes_any_size(rank: int) -> None:
    case = Case("ZBVZeroBubble", 1, (3, 2), 2, 4, shape=(2, PADDED_TO, 5), model={"causal": True})
    pipeline, batch = build(case, rank), padded_batch("mixed")
    expected = masked_reference(case, "mixed")
    pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, masked_loss, scale_grads=False)
    _traffic_of_step(pipeline, batch.cut_on(pipeline), expected)
    for shape in ((1, 2, 5), (4, 3, 5)):
        pipeline.schedule = build_schedule(case.schedule, pipeline.stages, 4, pipeline.loss_fn)
        _check_step(pipeline, case.but(shape=shape))


CHECKS: dict[int, list[Check]] = {
    1: [one_rank_takes_any_size, what_shape_of_is_for_is_said_where_it_lacks],
    2: [
        sizes_change_from_step_to_step,
        cut_microbatches_give_the_gradients_of_the_padded_batch,
        what_is_cut_is_packed_as_well,
        divided_microbatches_may_have_any_size,
        keyword_inputs_reach_all_ranks_and_are_cut,
        a_refused_batch_is_an_error_on_all_ranks,
        a_users_shape_of_may_fail_on_its_rank,
        some_train_while_others_evaluate,
        one_small_message_begins_a_step,
        torchs_own_schedules_have_one_shape_until_it_is_set,
        inputs_that_are_not_tokens,
    ],
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])
