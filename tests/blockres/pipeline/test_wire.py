"""What travels, seen at `isend`: how many tensors, in which dtype, for whom, and what the two ends check."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockres.pipeline.wire import Header, HopFormat, agree
from tests.support.distributed import Check, errors_of_all_ranks
from tests.support.pipeline import Case, Pipeline, Sent, build, largest_error, reference, sent_messages

LOOP = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4)
FOUR_RANKS = Case("Interleaved1F1B", 4, (2,) * 8, 2, 4)


def units_are_those_of_the_routing(rank: int) -> None:
    for base in (
        LOOP,
        LOOP.but(sublayers_per_stage=(2, 2, 2, 2)),
        LOOP.but(sublayers_per_stage=(2, 0, 2, 2)),
        LOOP.but(sublayers_per_block=None),
        LOOP.but(schedule="ZBVZeroBubble"),
    ):
        for case in (base, base.but(cache=False)):
            _check_units(case, rank)


def units_are_those_of_the_routing_on_four_ranks(rank: int) -> None:
    uneven = (2, 3, 1, 2, 2, 2, 1, 3)
    for case in (
        FOUR_RANKS,
        FOUR_RANKS.but(cache=False),
        FOUR_RANKS.but(sublayers_per_stage=uneven),
        FOUR_RANKS.but(sublayers_per_stage=(1,) * 16, sublayers_per_block=1),
        FOUR_RANKS.but(schedule="DualPipeV", sublayers_per_stage=uneven, n_microbatches=8),
    ):
        _check_units(case, rank)


def _check_units(case: Case, rank: int) -> None:
    pipeline = build(case, rank)
    with sent_messages() as sent:
        pipeline.step()
    forward, backward = _by_hop(sent)
    routing, hops = case.routing, case.routing.hop_units()
    expected = {
        (stage, microbatch): hops[stage]
        for stage in routing.stages_of(rank)
        for microbatch in range(case.n_microbatches)
        if stage + 1 < routing.num_stages and not routing.is_local(stage)
    }
    assert forward == expected, (str(case), forward, expected)
    upstream = sum(hops[stage - 1] for stage in routing.stages_of(rank) if stage > 0) * case.n_microbatches
    assert backward == upstream, (str(case), backward, upstream)
    traffic = pipeline.traffic()
    assert (traffic.forward_units, traffic.backward_units) == (sum(forward.values()), backward)
    assert traffic.forward_bytes + traffic.backward_bytes == sum(s.content.nbytes for s in sent if s.is_payload)
    assert traffic.forward_bytes == sum(forward.values()) * torch.Size(case.shape).numel() * case.dtype.itemsize
    pipeline.stages[0].reset_traffic()
    assert pipeline.stages[0].traffic().bytes == 0


def _by_hop(sent: list[Sent]) -> tuple[dict[tuple[int, int], int], int]:
    """Tensors by the (stage, microbatch) of the header before them, and the number of those without a header."""
    forward: dict[tuple[int, int], int] = {}
    backward, due, key = 0, 0, (0, 0)
    for message in sent:
        if message.is_header:
            header = Header.decode(message.content)
            key, due = (header.sending_stage, header.microbatch), header.sources_in_hop + header.has_partial
            assert key not in forward, "each microbatch has its own header on each hop"
            forward[key] = 0
        elif message.is_payload and due:
            forward[key], due = forward[key] + 1, due - 1
        elif message.is_payload:
            backward += 1
    return forward, backward


def everything_on_the_wire_has_the_pipeline_dtype(rank: int) -> None:
    for dtype, wire in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),  # deposits are summed in float32, yet travel as bfloat16
    ):
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
            pipeline = build(LOOP.but(schedule=schedule, dtype=dtype, pipeline_dtype=wire), rank)
            with sent_messages() as sent:
                pipeline.step()
            payload = [message.content for message in sent if message.is_payload]
            assert {message.dtype for message in payload} == {wire}
            assert all(gradient.dtype == dtype for gradient in pipeline.gradients().values())
            traffic = pipeline.traffic()
            hops = traffic.forward_hops + traffic.backward_hops
            units = traffic.forward_units + traffic.backward_units
            assert len(payload) == (units if dtype == wire else hops), "one message a hop where a cast is needed"


def a_float32_stream_with_narrow_sublayers_travels_in_either_dtype(rank: int) -> None:
    for wire in (None, torch.bfloat16):
        case = LOOP.but(dtype=torch.float32, pipeline_dtype=wire, model={"autocast": torch.bfloat16})
        pipeline = build(case, rank)
        with sent_messages() as sent:
            pipeline.step()
        assert {message.content.dtype for message in sent if message.is_payload} == {wire or torch.float32}
        _, expected = reference(case)
        assert all(gradient.dtype == torch.float32 for gradient in pipeline.gradients().values())
        assert largest_error(pipeline.gradients(), expected) < (0.05 if wire else 0.02)


def gradients_come_in_the_dtype_of_what_they_belong_to(rank: int) -> None:
    for dtype, wire in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        pipeline = build(LOOP.but(dtype=dtype, pipeline_dtype=wire), rank)
        seen: list[torch.dtype] = []
        for stage in pipeline.stages:
            stage.submod.register_forward_hook(partial(_watch_gradients, seen))
        pipeline.step()
        assert seen
        assert set(seen) == {dtype}


def _watch_gradients(seen: list[torch.dtype], module: nn.Module, args: object, output: object) -> None:
    for tensor in _tensors(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda gradient: seen.append(gradient.dtype))


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    assert isinstance(output, tuple)
    sources, running = output
    return [*sources] if running is None else [*sources, running]


def a_narrow_wire_learns_as_well(rank: int) -> None:
    last = {
        wire: _train(LOOP.but(dtype=torch.float32, pipeline_dtype=wire, shape=(4, 6, 16), n_microbatches=2), rank)
        for wire in (None, torch.bfloat16)
    }
    if rank == 1:
        assert last[torch.bfloat16] == pytest.approx(last[None], rel=0.02)


def _train(case: Case, rank: int) -> float:
    pipeline = build(case, rank)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=2e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(sum(pipeline.step()))
        optimizer.step()
    assert rank == 0 or losses[-1] < 0.8 * losses[0], "12 steps on one batch must show"
    return losses[-1]


def what_needs_no_cast_is_not_copied(rank: int) -> None:
    pipeline = build(LOOP, rank)
    addresses: set[int] = set()
    for stage in pipeline.stages:
        stage.submod.register_forward_hook(
            lambda _, __, output: addresses.update(t.data_ptr() for t in _tensors(output))
        )
    with sent_messages() as sent:
        pipeline.evaluate()
    assert all(message.address in addresses for message in sent if message.is_payload)


def strided_outputs_and_views_travel(rank: int) -> None:
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for model in ({"strided": True}, {"views": True}, {"strided": True, "views": True}):
            case = LOOP.but(schedule=schedule, model=model)
            with sent_messages() as sent:
                _check_gradients(build(case, rank))
            assert all(message.content.is_contiguous() for message in sent)


def a_loss_that_is_a_view_does_not_stop_a_split_backward(rank: int) -> None:
    pipeline = build(LOOP.but(schedule="InterleavedZeroBubble"), rank)
    inner = pipeline.schedule._loss_fn
    pipeline.schedule._loss_fn = lambda output, target: inner(output, target).expand(1)[0]
    _check_gradients(pipeline)


def no_gradient_travels_to_what_is_frozen(rank: int) -> None:
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for frozen_below in (1, 2, 4, 7, 9):
            for cache in (True, False):
                case = LOOP.but(
                    schedule=schedule,
                    n_microbatches=4 if schedule == "DualPipeV" else 2,
                    model={"frozen_below": frozen_below},
                    cache=cache,
                )
                pipeline = build(case, rank)
                _check_gradients(pipeline)
                _check_only_trained_units_travel_back(pipeline, frozen_below)


def _check_only_trained_units_travel_back(pipeline: Pipeline, frozen_below: int) -> None:
    """With parameters below `frozen_below` frozen, a source or sum made of frozen sublayers only wants no gradient."""
    routing, block = pipeline.case.routing, pipeline.case.sublayers_per_block
    assert block is not None
    expected = 0
    for stage in routing.stages_of(pipeline.stages[0].group_rank):
        if stage == 0 or routing.is_local(stage - 1):
            continue
        begins = routing.sublayers(stage).start
        last_sublayers = [source * block for source in routing.received(stage)]  # of source k; 0 for the embedding
        last_sublayers += [begins] * routing.has_partial(stage)
        expected += sum(count >= frozen_below for count in last_sublayers)
    assert pipeline.traffic().backward_units == expected * pipeline.case.n_microbatches


def _check_gradients(pipeline: Pipeline) -> None:
    _, expected = reference(pipeline.case)
    pipeline.step()
    assert len(pipeline.cache) == 0
    own = {name for stage in pipeline.stages for name, _ in stage.submod.named_parameters()}
    assert set(pipeline.gradients()) == own & set(expected)
    assert largest_error(pipeline.gradients(), expected) <= 1e-12, str(pipeline.case)


def every_send_is_waited_for(rank: int) -> None:
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        stages = (4, 4) if schedule in ("GPipe", "1F1B") else LOOP.sublayers_per_stage
        pipeline = build(LOOP.but(schedule=schedule, sublayers_per_stage=stages), rank)
        with sent_messages() as sent:
            pipeline.step()
            assert sent
            assert all(message.work.waited for message in sent), schedule
            pipeline.evaluate()
            assert all(message.work.waited for message in sent), schedule


def an_empty_hop_is_a_header_alone(rank: int) -> None:
    case = LOOP.but(sublayers_per_stage=(2, 0, 2, 2))
    assert case.routing.hop_units()[1] == 0
    pipeline = build(case, rank)
    with sent_messages() as sent:
        _check_gradients(pipeline)
    if rank == 1:
        forward, _ = _by_hop(sent)
        assert [forward[1, microbatch] for microbatch in range(4)] == [0] * 4
    assert pipeline.cache.peak.deposits > 0


def pipelines_keep_to_their_group(rank: int) -> None:
    """Two pipelines of two ranks each, {0, 2} and {1, 3}, at the same time."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    group, own_rank = groups[rank % 2], rank // 2
    pipeline = build(LOOP.but(model={"views": bool(rank % 2)}), own_rank, group)
    with sent_messages() as sent:
        _check_gradients(pipeline)
        pipeline.evaluate()
    assert sent
    assert all(message.group is group for message in sent)


def ranks_with_different_settings_all_fail_alike(rank: int) -> None:
    other = LOOP.but(sublayers_per_stage=(2, 2, 2, 2))
    for field, case in {
        "sublayers_per_stage": other,
        "number of sublayers": other.but(sublayers_per_stage=(2, 2, 2, 1)),
        "sublayers_per_block": LOOP.but(sublayers_per_block=3),
        "virtual stages": LOOP.but(sublayers_per_stage=(2, 2, 1, 1, 1, 1)),
        "placement": LOOP.but(schedule="ZBVZeroBubble"),
        "cache": LOOP.but(cache=False),
        "microbatch_shape": LOOP.but(shape=(2, 4, 5)),
        "dtype": LOOP.but(dtype=torch.float32, pipeline_dtype=torch.float64),
        "pipeline_dtype": LOOP.but(pipeline_dtype=torch.float32),
        "schedule": LOOP.but(schedule="LoopedBFS"),
        "number of microbatches": LOOP.but(n_microbatches=6),
    }.items():
        pipeline = build(LOOP if rank == 0 else case, rank)
        messages = errors_of_all_ranks(pipeline.step, ValueError)
        assert messages[0] == messages[1]
        assert f"different settings: {field} is" in messages[0], messages[0]
        assert "on rank 0 and" in messages[0]


def other_settings_can_be_agreed_on_too(rank: int) -> None:
    pipeline = build(LOOP, rank)
    for stage in pipeline.stages:
        stage.extra_settings["seed of the data"] = rank
    messages = errors_of_all_ranks(pipeline.step, ValueError)
    assert messages[0] == messages[1]
    assert "seed of the data is 0 on rank 0 and 1 on rank 1" in messages[0]


def training_against_evaluation_is_a_mismatch(rank: int) -> None:
    pipeline = build(LOOP, rank)
    messages = errors_of_all_ranks(pipeline.step if rank else pipeline.evaluate, ValueError)
    assert messages[0] == messages[1]
    assert "training step is False on rank 0 and True on rank 1" in messages[0]


def agree_returns_where_all_are_equal(rank: int) -> None:
    agree({"name": "ü" * 300, "list": [1, None], "number": 1.5}, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="only here is not set on rank 0 and 1 on rank 1"):
        agree({"same": 1} | ({"only here": 1} if rank else {}), None, torch.device("cpu"))
    with pytest.raises(ValueError, match="nothing is None on rank 0 and not set on rank 1"):
        agree({"only here": 1} if rank else {"nothing": None}, None, torch.device("cpu"))


CHECKS: dict[int, list[Check]] = {
    2: [
        units_are_those_of_the_routing,
        everything_on_the_wire_has_the_pipeline_dtype,
        a_float32_stream_with_narrow_sublayers_travels_in_either_dtype,
        gradients_come_in_the_dtype_of_what_they_belong_to,
        a_narrow_wire_learns_as_well,
        what_needs_no_cast_is_not_copied,
        strided_outputs_and_views_travel,
        a_loss_that_is_a_view_does_not_stop_a_split_backward,
        no_gradient_travels_to_what_is_frozen,
        every_send_is_waited_for,
        an_empty_hop_is_a_header_alone,
        ranks_with_different_settings_all_fail_alike,
        other_settings_can_be_agreed_on_too,
        training_against_evaluation_is_a_mismatch,
        agree_returns_where_all_are_equal,
    ],
    4: [units_are_those_of_the_routing_on_four_ranks, pipelines_keep_to_their_group],
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_received_is_what_was_sent(dtype: torch.dtype, wire: torch.dtype) -> None:
    shapes = [(2, 3, 4), (0, 3, 4), (1, 1, 96)]
    tensors = [torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1).to(dtype) for shape in shapes]
    hop = HopFormat(dtype, wire)
    sent, incoming = hop.messages(tensors), hop.receive(shapes, torch.device("cpu"))
    for buffer, message in zip(incoming.messages, sent, strict=True):
        assert message.is_contiguous()
        assert (buffer.shape, buffer.dtype) == (message.shape, message.dtype)
        buffer.copy_(message)
    for got, tensor in zip(incoming.tensors(), tensors, strict=True):
        assert torch.equal(got, tensor.to(wire).to(dtype))


def test_a_hop_is_copied_only_where_it_must_be() -> None:
    tensors = [torch.randn(2, 3), torch.randn(3, 2).T]
    same = HopFormat(torch.float32, torch.float32).messages(tensors)
    assert same[0] is tensors[0]
    assert same[1].is_contiguous()
    cast = HopFormat(torch.float32, torch.bfloat16).messages(tensors)
    assert [(message.shape, message.dtype) for message in cast] == [((12,), torch.bfloat16)]
    assert HopFormat(torch.float32, torch.bfloat16).messages([]) == []


def test_a_header_survives_the_wire_and_names_what_differs() -> None:
    header = Header(8, 3, 1, 2, 5, 1, 90, (True, False, True))
    tensor = header.encode(torch.device("cpu"))
    assert tensor.shape == (Header.length(3),)
    assert Header.decode(tensor) == header
    header.check(header._replace(wants_gradient=()), 2)
    for field, number in {
        "step": 7,
        "microbatch": 4,
        "sources_in_hop": 1,
        "sources_that_exist": 4,
        "elements": 60,
    }.items():
        with pytest.raises(RuntimeError, match=f"stage 2, .* says {field.replace('_', ' ')} = .*, expected {number}"):
            header.check(header._replace(**{field: number}), 2)
