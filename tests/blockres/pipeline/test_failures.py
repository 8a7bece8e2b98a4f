"""When things go wrong: on one rank in the middle of a step, in a user's module, or in what the ranks were given.

What went wrong in other pipelines, and the test that it does not here:

 1. counts cached with shapes are stale from the second microbatch on: test_wire, units_are_those_of_the_routing
    (each hop of each microbatch has its own header)
 2. one scheduler knows the counts, another does not: test_gradients (all seven)
 3. a cached tensor is freed by the engine: test_memory, a_source_goes_when_its_last_user_is_done, and test_gradients
 4. a cached tensor stays attached to its producer's graph: test_cache, test_a_source_is_kept_by_reference…
 5. a reader's backward never ran: a_missing_deposit_is_an_error below
 6. an evaluation between training steps: test_evaluation, evaluation_and_training_take_turns
 7. sender and receiver take different dtypes: test_wire, ranks_with_different_settings_all_fail_alike, and
    a_module_that_breaks_the_rules_is_told_so below
 8. a gradient is made in float32 and received in bfloat16: test_wire, everything_on_the_wire_has_the_pipeline_dtype
 9. shapes are fixed by the first batch: test_shapes, sizes_change_from_step_to_step
10. the peer waits for a gradient that is not wanted: test_wire, no_gradient_travels_to_what_is_frozen
11. two ranks with two stages each, so one peer for all traffic: test_gradients, test_wire
12. a send is never waited for: test_wire, every_send_is_waited_for
13. a send goes to the world instead of the group: test_wire, pipelines_keep_to_their_group
14. an output is a view: test_wire, strided_outputs_and_views_travel
15. a strided tensor on the wire: the same
16. an empty hop: test_wire, an_empty_hop_is_a_header_alone
17. one rank, one stage a rank, no sublayers, an incomplete block, an odd number of microbatches, unequal stages:
    test_gradients
"""

import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

from blockres.pipeline import SCHEDULES, BlockCache, BlockResStage, BlockRouting, build_schedule
from blockres.pipeline.engine import METHODS, SCHEDULE_METHODS, check_engine
from blockres.pipeline.wire import Header
from tests.support.distributed import Check, Outcome, run_ranks
from tests.support.pipeline import Case, Pipeline, build, largest_error, loss_fn, reference, sent_messages

LOOP = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4)
ONE_RANK = Case("Interleaved1F1B", 1, (2, 3), 2, 3)
BOUND = 45  # seconds, of which most start the processes


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the sublayer's own trouble, backward")


def fail_in_forward() -> None:
    raise ArithmeticError("the sublayer's own trouble, forward")


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> None:
        die()


def strike(pipeline: Pipeline, how: str, microbatch: int = 1) -> Callable[[], None]:
    """Make the rank's last stage fail at its second microbatch; returns what undoes it."""
    layer = next(iter(pipeline.stages[-1].submod.sublayers.values()))
    calls = iter(range(1000))

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        if next(calls) != microbatch:
            return None
        if how in ("backward", "death in backward"):
            return (FailingBackward if how == "backward" else DyingBackward).apply(output)
        {"forward": fail_in_forward, "interrupt": interrupt, "death in forward": die}[how]()
        return None

    return layer.register_forward_hook(hook).remove


def fail_on_rank_one(rank: int, schedule: str, how: str) -> Iterator[int]:
    stages = (4, 4) if schedule in ("GPipe", "1F1B") else LOOP.sublayers_per_stage
    pipeline = build(LOOP.but(schedule=schedule, sublayers_per_stage=stages), rank)
    pipeline.step()
    if rank == 1 and how == "death between steps":
        die()
    if rank == 1:
        strike(pipeline, how)
    try:
        pipeline.step()
    finally:
        yield len(pipeline.cache)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("Interleaved1F1B", "forward"),
        ("Interleaved1F1B", "backward"),
        ("ZBVZeroBubble", "backward"),
        ("1F1B", "forward"),
        ("Interleaved1F1B", "death in forward"),
        ("Interleaved1F1B", "death in backward"),
        ("GPipe", "death between steps"),
    ],
)
def test_one_rank_fails_and_all_end(schedule: str, how: str) -> None:
    survivor, failed = run_ranks(2, fail_on_rank_one, schedule, how, timeout=BOUND)
    assert survivor.exit_code == 1
    if how == "death between steps":
        assert "pipeline rank 0 lost another rank at the start of a step" in str(survivor.error)
    else:
        assert "pipeline rank 0 lost a neighbour (rank 1) in the middle of a step" in str(survivor.error)
    assert survivor.values == [0], "the survivor's cache is empty"
    if how.startswith("death"):
        assert failed.exit_code == -signal.SIGKILL
    else:
        assert failed.exit_code == 1
        assert f"ArithmeticError: the sublayer's own trouble, {how}" in str(failed.error)
        assert failed.values == [0], "the failed rank's cache is empty"
    _check_time(survivor, failed)


def _check_time(*outcomes: Outcome) -> None:
    for outcome in outcomes:
        print(f"ended after {outcome.seconds:.1f} s")
        assert outcome.seconds < BOUND


def tamper(rank: int, field: str) -> Iterator[None]:
    """Rank 0 sends headers that are right in all but one field."""
    pipeline = build(LOOP, rank)

    def change(message: Tensor) -> Tensor:
        if message.dtype != torch.int64 or rank != 0:
            return message
        header = Header.decode(message)
        return header._replace(**{field: getattr(header, field) + 1}).encode(message.device)

    with sent_messages(change):
        pipeline.step()
    yield None


@pytest.mark.parametrize("field", ["microbatch", "sources_in_hop", "elements"])
def test_a_wrong_header_stops_both_ends(field: str) -> None:
    """Another microbatch, another number of tensors, tensors of another shape."""
    sender, receiver = run_ranks(2, tamper, field, timeout=BOUND)
    assert (sender.exit_code, receiver.exit_code) == (1, 1)
    assert f"stage 1, microbatch 0: the hop that came in says {field.replace('_', ' ')} =" in str(receiver.error)
    assert "lost a neighbour (rank 1)" in str(sender.error)
    _check_time(sender, receiver)


def unfreeze_unannounced(rank: int) -> Iterator[None]:
    pipeline = build(LOOP.but(model={"frozen_below": 2}), rank)
    for stage in pipeline.stages:
        stage.check_headers = False  # as on a GPU: looked at in the first step only
    for _ in range(3):
        for parameter in pipeline.parameters():
            parameter.grad = None
        pipeline.step()
        assert largest_error(pipeline.gradients(), reference(pipeline.case)[1]) <= 1e-12
        pipeline.evaluate()
    for parameter in pipeline.parameters():
        parameter.requires_grad_(True)
    for stage in pipeline.stages:
        stage.check_headers = rank == 1
    pipeline.step()
    yield None


def test_headers_that_nobody_reads_must_not_change() -> None:
    sender, receiver = run_ranks(2, unfreeze_unannounced, timeout=BOUND)
    assert (sender.exit_code, receiver.exit_code) == (1, 1)
    assert "which outputs want a gradient has changed from (False, True) to (True, True)" in str(sender.error)
    assert "lost a neighbour (rank 0)" in str(receiver.error)


def a_failed_step_leaves_nothing_and_the_next_is_right(rank: int) -> None:
    for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"):
        for how, error in (
            ("forward", ArithmeticError),
            ("backward", ArithmeticError),
            ("interrupt", KeyboardInterrupt),
        ):
            for plain in (False, True):
                pipeline = build(ONE_RANK.but(schedule=schedule), rank, plain=plain)
                undo = strike(pipeline, how)
                with pytest.raises((error, RuntimeError)):
                    pipeline.step()
                _check_clean(pipeline, siblings=not plain)
                undo()
                if not plain:
                    _check_next_step(pipeline)


def a_failed_loss_leaves_nothing(rank: int) -> None:
    pipeline = build(ONE_RANK, rank)
    calls = iter(range(1000))

    def failing(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 1:
            raise ArithmeticError("the loss")
        return loss_fn(output, target)

    pipeline.schedule = build_schedule("Interleaved1F1B", pipeline.stages, 3, failing)
    for run in (pipeline.step, pipeline.evaluate):
        with pytest.raises(ArithmeticError, match="the loss"):
            run()
        _check_clean(pipeline)
        _check_next_step(pipeline)
        calls = iter(range(1000))


def the_table_of_all_actions_is_not_logged_over_the_cause(rank: int) -> None:
    logger, records = logging.getLogger("torch.distributed.pipelining.schedules"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    for level, tables in ((logging.WARNING, 0), (logging.DEBUG, 1)):
        records.clear()
        logger.setLevel(level)
        pipeline = build(ONE_RANK, rank)
        strike(pipeline, "forward")
        with pytest.raises(ArithmeticError):
            pipeline.step()
        errors = [record.getMessage() for record in records if record.levelno == logging.ERROR]
        assert sum("\n" in error for error in errors) == tables
        assert "when running action 1F1" in errors[0]
        assert not logger.filters


def _check_clean(pipeline: Pipeline, siblings: bool = True) -> None:
    assert len(pipeline.cache) == 0
    for stage in pipeline.stages if siblings else pipeline.stages[-1:]:
        assert not any(vars(stage._state).values())
        assert not stage.fwd_cache
        assert not stage.bwd_cache
        assert not stage.backward_state


def _check_next_step(pipeline: Pipeline) -> None:
    loss, expected = reference(pipeline.case)
    for parameter in pipeline.parameters():
        parameter.grad = None
    losses = pipeline.step()
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12)
    assert largest_error(pipeline.gradients(), expected) <= 1e-12


def a_missing_deposit_is_an_error(rank: int) -> None:
    pipeline = build(ONE_RANK, rank)
    pipeline.cache.deposit = lambda *_: None
    with pytest.raises(RuntimeError, match="source 0 of microbatch 0 has 0 gradient deposits, expected 1"):
        pipeline.step()
    assert len(pipeline.cache) == 0


def a_module_that_breaks_the_rules_is_told_so(rank: int) -> None:
    for change, message in (
        (lambda sources, partial: sources[0], "returned Tensor; every stage but the last returns"),
        (lambda sources, partial: (sources, partial, None), "returned tuple; every stage but the last returns"),
        (lambda sources, partial: (sources[:-1], partial), r"returned 1 sources; after its 3 sublayers 2 exist"),
        (lambda sources, partial: (sources, None), "no partial sum; after its sublayers the block is open"),
        (lambda sources, partial: (sources, partial[:1]), r"the partial sum with shape \(1, 3, 5\), .* \(2, 3, 5\)"),
        (lambda sources, partial: ((sources[0], sources[1].float()), partial), "source 1 with dtype torch.float32"),
    ):
        pipeline = build(ONE_RANK.but(sublayers_per_stage=(3, 2)), rank)
        pipeline.stages[0].submod.register_forward_hook(lambda _, __, output, change=change: change(*output))
        with pytest.raises((ValueError, TypeError), match=message):
            pipeline.step()
        assert len(pipeline.cache) == 0
    pipeline = build(ONE_RANK.but(sublayers_per_stage=(2, 2, 1)), rank)
    pipeline.stages[1].submod.register_forward_hook(
        lambda _, __, output: ((output[0][0] * 2, *output[0][1:]), output[1])
    )
    with pytest.raises(ValueError, match="stage 1 returned another tensor for source 0, which came in"):
        pipeline.step()


def stages_that_do_not_fit_are_refused(rank: int) -> None:
    routing = BlockRouting((2, 3), 2, 1)
    settings = {"device": "cpu", "cache": BlockCache(), "microbatch_shape": (1, 1, 1), "dtype": torch.float32}
    for arguments, changes, message in (
        ((2, routing), {}, "stage 2 does not exist: the routing has 2 stages"),
        ((0, BlockRouting((2, 3), 2, 2)), {}, "the routing is for 2 pipeline ranks, the process group has 1"),
        ((0, routing), {"dtype": torch.int64}, "dtype is torch.int64"),
        ((0, routing), {"pipeline_dtype": torch.int8}, "pipeline_dtype is torch.int8"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockResStage(nn.Identity(), *arguments, **(settings | changes))


def distributed_data_parallel_is_refused_where_it_would_not_reduce(rank: int) -> None:
    for schedule in ("InterleavedZeroBubble", "Interleaved1F1B"):
        pipeline = build(ONE_RANK.but(schedule=schedule, n_microbatches=2), rank)
        for stage in pipeline.stages:
            stage.submod = DistributedDataParallel(stage.submod)
        if schedule == "Interleaved1F1B":
            pipeline.step()
            expected = {f"module.{name}": gradient for name, gradient in reference(pipeline.case)[1].items()}
            assert largest_error(pipeline.gradients(), expected) <= 1e-12
        else:
            with pytest.raises(TypeError, match="would not be reduced; wrap the stage's module with fully_shard"):
                pipeline.step()


def a_schedule_with_another_placement_is_refused(rank: int) -> None:
    for schedule, other in (("Interleaved1F1B", "ZBVZeroBubble"), ("ZBVZeroBubble", "LoopedBFS")):
        pipeline = build(LOOP.but(schedule=schedule), rank)
        with pytest.raises(ValueError, match=f"{other} places stages .* build the routing with placement="):
            build_schedule(other, pipeline.stages, 4, loss_fn)
    pipeline = build(LOOP, rank)
    pipeline.schedule = ScheduleZBVZeroBubble(pipeline.stages, 4, loss_fn)
    with pytest.raises(ValueError, match=r"the schedule puts the stages on ranks \[0, 1, 1, 0\], the routing on"):
        pipeline.step()


CHECKS: dict[int, list[Check]] = {
    1: [
        a_failed_step_leaves_nothing_and_the_next_is_right,
        a_failed_loss_leaves_nothing,
        the_table_of_all_actions_is_not_logged_over_the_cause,
        a_missing_deposit_is_an_error,
        a_module_that_breaks_the_rules_is_told_so,
        stages_that_do_not_fit_are_refused,
        distributed_data_parallel_is_refused_where_it_would_not_reduce,
    ],
    2: [a_schedule_with_another_placement_is_refused],
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])


def test_the_engine_has_what_is_overridden() -> None:
    check_engine()
    own = {name for name, member in vars(BlockResStage).items() if inspect.isfunction(member)}
    overridden = {name for name in own if hasattr(PipelineStage, name)} - {"__init__"}
    assert overridden <= set(METHODS), "every overridden member is checked on import"
    for name in SCHEDULES:
        for method, parameters in SCHEDULE_METHODS.items():
            found = inspect.signature(getattr(get_schedule_class(name), method)).parameters
            assert tuple(found)[1:] == parameters, name


def test_another_engine_is_refused_with_what_is_missing() -> None:
    class Changed(PipelineStage):
        get_fwd_recv_ops = None  # type: ignore[assignment]

        def backward_one_chunk(self, chunk: int) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ImportError, match=r"tested with torch 2.13.x .* Changed.get_fwd_recv_ops is missing") as caught:
        check_engine(Changed)
    assert "Changed.backward_one_chunk takes ('chunk',), expected ('bwd_chunk_id', 'loss'" in str(caught.value)
    with pytest.raises(ImportError, match=r"object\._step_microbatches is missing.* object has no _internal_losses"):
        check_engine(schedule_class=object)


def test_what_a_constructor_merely_reads_is_missing() -> None:
    class Reads:
        def __init__(self) -> None:
            print(self.output_chunks)  # type: ignore[attr-defined]

    with pytest.raises(ImportError, match="Reads has no output_chunks"):
        check_engine(Reads)
