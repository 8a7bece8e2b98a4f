"""PyTorch's pipeline schedules by name: what each asks for, checked beforehand, and built so that a step cleans up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from blockres.pipeline.engine import SCHEDULE_STATE
from blockres.pipeline.routing import BlockRouting, Placement
from blockres.pipeline.stage import BlockResStage
from blockres.pipeline.wire import lost_neighbour, post

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class ScheduleRules:
    """What a schedule asks for.

    Attributes:
        placement: of the stages on the ranks.
        virtual_stages: the number of stages per rank, or None where any will do.
        in_rounds: microbatches go through in M // P rounds (at least one) of equal size.
        one_microbatch_per_stage: at least as many microbatches as there are stages.
    """

    placement: Placement = "loop"
    virtual_stages: int | None = None
    in_rounds: bool = False
    one_microbatch_per_stage: bool = False


SCHEDULES = {
    "GPipe": ScheduleRules(virtual_stages=1),
    "1F1B": ScheduleRules(virtual_stages=1, one_microbatch_per_stage=True),
    "Interleaved1F1B": ScheduleRules(in_rounds=True),
    "LoopedBFS": ScheduleRules(),
    "InterleavedZeroBubble": ScheduleRules(in_rounds=True),
    "ZBVZeroBubble": ScheduleRules(placement="v", virtual_stages=2),
    "DualPipeV": ScheduleRules(placement="v", virtual_stages=2, one_microbatch_per_stage=True),
}


def schedule_placement(name: str) -> Placement:
    """Where a schedule wants the stages: "loop" or "v", for `BlockRouting`. ValueError for an unknown name."""
    return _rules(name).placement


def check_schedule(name: str, pp_size: int, virtual_stages: int, n_microbatches: int) -> None:
    """Raise ValueError where a schedule cannot run these numbers of ranks, stages per rank and microbatches."""
    rules = _rules(name)
    if n_microbatches < 1:
        raise ValueError(f"there must be at least 1 microbatch, got {n_microbatches}")
    if virtual_stages < 1 or rules.virtual_stages not in (None, virtual_stages):
        raise ValueError(
            f"{name} runs exactly {rules.virtual_stages or 'one or more'} stages on each rank, got {virtual_stages} "
            "virtual stages"
        )
    least = pp_size * virtual_stages if rules.one_microbatch_per_stage else 1
    if n_microbatches < least:
        raise ValueError(
            f"{name} needs at least as many microbatches as stages: {n_microbatches} microbatches, "
            f"{pp_size} ranks × {virtual_stages} = {least} stages"
        )
    if rules.in_rounds and not _fills_rounds(n_microbatches, pp_size):
        below, above = (_nearest(n_microbatches, pp_size, step) for step in (-1, 1))
        raise ValueError(
            f"{name} on {pp_size} ranks sends the microbatches through in {n_microbatches // pp_size} rounds of equal "
            f"size, but {n_microbatches} microbatches do not divide by that; {below} or {above} would, and so does any "
            f"multiple of {pp_size}"
        )


def build_schedule(
    name: str,
    stages: Sequence[BlockResStage],
    n_microbatches: int,
    loss_fn: LossFunction | None = None,
    **options: Any,
) -> Any:
    """One of `torch.distributed.pipelining`'s schedules over this rank's stages.

    Beyond PyTorch's own, a step that fails leaves neither the stages, the cache nor the schedule half-run behind, the
    loss of a neighbouring rank is said in words, and `eval` is `evaluate`: PyTorch's does not work where adjacent
    stages share a rank.

    Args:
        name: a key of `SCHEDULES`.
        stages: all of this rank's stages, in model order.
        n_microbatches: into which `step` and `eval` divide a batch.
        loss_fn: `(output, target) -> loss`, a mean over the microbatch; None for a pipeline that only evaluates.
        options: passed to the schedule, `scale_grads` for one.

    Raises:
        ValueError: as `check_schedule`, or where the stages are placed otherwise than the schedule asks for.
    """
    routing = stages[0].routing
    check_schedule(name, routing.pp_size, len(stages), n_microbatches)
    if routing.pp_size > 1 and routing.num_stages > routing.pp_size and routing.placement != schedule_placement(name):
        raise ValueError(
            f"{name} places stages {schedule_placement(name)!r}, the stages' routing {routing.placement!r}; build the "
            f"routing with placement={schedule_placement(name)!r}"
        )
    for stage in stages:
        stage.extra_settings |= {"schedule": name, "number of microbatches": n_microbatches}
    base = get_schedule_class(name)
    schedule_class = type(base.__name__, (_Careful, base), {"__doc__": base.__doc__})
    first = stages[0] if issubclass(base, PipelineScheduleSingle) else list(stages)
    schedule = schedule_class(first, n_microbatches, loss_fn, **options)
    schedule.block_stages, schedule.block_microbatches = list(stages), n_microbatches
    schedule.block_loss_fn = loss_fn
    return schedule


def evaluate(
    stages: Sequence[BlockResStage],
    n_microbatches: int,
    *args: Any,
    target: Tensor | None = None,
    loss_fn: LossFunction | None = None,
    losses: list[Tensor] | None = None,
    return_outputs: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Forward only, without autograd and without a schedule. Called on every rank.

    Works under every placement, also where adjacent stages share a rank.

    Args:
        args, kwargs: the first stage's input, a whole batch; ignored elsewhere.
        target, loss_fn, losses: where given, the rank with the last stage fills `losses`, one per microbatch.

    Returns:
        The whole batch's output on the rank with the last stage, elsewhere None.
    """
    inputs, options = _split(args, kwargs, n_microbatches)
    targets = None if target is None else target.tensor_split(n_microbatches)
    outputs, found = [], []
    with _cleaning_up(stages), torch.no_grad():
        for microbatch, output in _run_forward(stages, inputs, options):
            if return_outputs:
                outputs.append(output)
            if loss_fn is not None and targets is not None:
                found.append(loss_fn(output, targets[microbatch]))
    if losses is not None and found:
        losses[:] = found
    return torch.cat(outputs) if outputs else None


class _Careful:
    """Mixed into a schedule class: a step cleans up after a failure, and an evaluation works under every placement."""

    block_stages: list[BlockResStage]
    block_microbatches: int
    block_loss_fn: LossFunction | None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        leftovers = [getattr(self, name) for name in SCHEDULE_STATE if hasattr(self, name)]
        with _cleaning_up(self.block_stages, *leftovers):
            return super().step(*args, **kwargs)  # type: ignore[misc]

    def eval(
        self,
        *args: Any,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Tensor | None:
        """`evaluate` with the schedule's microbatches and loss; only the last stage's rank needs `target`."""
        return evaluate(
            self.block_stages,
            self.block_microbatches,
            *args,
            target=target,
            loss_fn=self.block_loss_fn,
            losses=losses,
            return_outputs=return_outputs,
            **kwargs,
        )


@contextmanager
def _cleaning_up(stages: Sequence[BlockResStage], *leftovers: Any) -> Iterator[None]:
    """After a failure, forget the step; where a neighbouring rank is lost, say so."""
    try:
        yield
    except BaseException as error:
        for stage in stages:
            stage.start_over()
        for container in leftovers:
            container.clear()
        if lost_neighbour(error):
            raise RuntimeError(
                f"pipeline rank {stages[0].group_rank} lost a neighbour (rank {_neighbours(stages)}) in the middle of "
                "a step; the cause is in what that rank printed last"
            ) from error
        raise


def _run_forward(
    stages: Sequence[BlockResStage], inputs: Sequence[tuple[Any, ...]], options: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, Tensor]]:
    """The model's outputs by microbatch, on the rank that has them."""
    by_index = {stage.stage_index: stage for stage in stages}
    arriving: dict[tuple[int, int], list[Work]] = {}
    leaving: list[Work] = []
    for stage in stages:
        stage.begin_evaluation(len(inputs))
    for action in forward_order(stages[0].routing, len(inputs))[stages[0].group_rank]:
        stage, microbatch = by_index[action.stage], action.microbatch
        if action.kind == "receive":
            arriving[action.stage, microbatch] = post(stage.get_fwd_recv_ops(microbatch))
            continue
        for work in arriving.pop((action.stage, microbatch), []):
            work.wait()
        output = stage.forward_one_chunk(microbatch, inputs[microbatch], options[microbatch], save_forward_output=False)
        if stage.is_last:
            yield microbatch, output
        elif action.stage + 1 in by_index:
            by_index[action.stage + 1].set_local_fwd_input(output, microbatch)
        else:
            leaving += post(stage.get_fwd_send_ops(microbatch))
    for stage in stages:
        stage.finish_sends()
    for work in leaving:
        work.wait()


@dataclass(frozen=True)
class ForwardAction:
    """Run a stage's forward and send what it gives, or post the receive for a stage's input."""

    kind: Literal["forward", "receive"]
    stage: int
    microbatch: int


def forward_order(routing: BlockRouting, n_microbatches: int) -> list[list[ForwardAction]]:
    """For each rank, the order of a forward-only pass, found by playing it through tick by tick.

    A rank with a choice runs its latest stage, so that microbatches leave as soon as they can. A receive is posted
    where the send happens, so two ranks put the messages between them in the same order.
    """
    orders: list[list[ForwardAction]] = [[] for _ in range(routing.pp_size)]
    last = routing.num_stages - 1
    done = [0] * routing.num_stages
    while done[last] < n_microbatches:
        before = [n_microbatches, *done]
        for rank, order in enumerate(orders):
            ready = [stage for stage in routing.stages_of(rank) if done[stage] < before[stage]]
            if not ready:
                continue
            stage = ready[-1]
            order.append(ForwardAction("forward", stage, done[stage]))
            if stage < last and not routing.is_local(stage):
                orders[routing.rank_of(stage + 1)].append(ForwardAction("receive", stage + 1, done[stage]))
            done[stage] += 1
    return orders


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any], n_microbatches: int
) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
    if not args and not kwargs:
        return [()] * n_microbatches, [{}] * n_microbatches
    return split_args_kwargs_into_chunks(args, kwargs, n_microbatches)


def _neighbours(stages: Sequence[BlockResStage]) -> str:
    routing = stages[0].routing
    adjacent = {index for stage in stages for index in (stage.stage_index - 1, stage.stage_index + 1)}
    ranks = {routing.rank_of(index) for index in adjacent if 0 <= index < routing.num_stages}
    return " or ".join(str(rank) for rank in sorted(ranks - {stages[0].group_rank}))


def _rules(name: str) -> ScheduleRules:
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _fills_rounds(n_microbatches: int, pp_size: int) -> bool:
    return n_microbatches % max(1, n_microbatches // pp_size) == 0


def _nearest(n_microbatches: int, pp_size: int, step: int) -> int:
    while not _fills_rounds(n_microbatches, pp_size):
        n_microbatches += step
    return n_microbatches
