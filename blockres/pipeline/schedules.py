"""PyTorch's pipeline schedules by name: what each asks for, checked beforehand, and built so that a step cleans up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from blockres.pipeline.batches import Batch, Division, ShapeOf, level
from blockres.pipeline.engine import SCHEDULE_STATE, quiet_schedule_tables
from blockres.pipeline.routing import BlockRouting, Placement
from blockres.pipeline.stage import BlockResStage
from blockres.pipeline.start import Microbatches, StepStart
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
        wanted = {None: "one or more stages", 1: "exactly 1 stage"}.get(
            rules.virtual_stages, f"exactly {rules.virtual_stages} stages"
        )
        raise ValueError(
            f"{name} runs {wanted} on each rank, got {virtual_stages} virtual stages; with blockres.train pass "
            f"--virtual-stages {rules.virtual_stages or 1}"
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
    *,
    shape_of: ShapeOf | None = None,
    **options: Any,
) -> Any:
    """One of `torch.distributed.pipelining`'s schedules over this rank's stages.

    Beyond PyTorch's own:

    - Batch and sequence length may differ from step to step, in training and in evaluation. The shapes travel once, at
      the start of a step, in one small all-reduce.
    - A batch that does not divide into the microbatches, or that some rank cannot use for another reason, is an error
      on all ranks before the step begins; the next step is not affected.
    - `step(…, variable_seq_lengths=row_lengths)` cuts a padded batch to the longest row of each microbatch (`step`).
    - A step that fails leaves neither the stages, the cache nor the schedule half-run behind, the loss of another rank
      is said in words, and the engine's table of all actions is logged only for those who debug it.
    - `eval` is `evaluate`: PyTorch's does not work where adjacent stages share a rank.

    Args:
        name: a key of `SCHEDULES`.
        stages: all of this rank's stages, in model order.
        n_microbatches: into which `step` and `eval` divide a batch.
        loss_fn: `(output, target) -> loss`, a mean over the microbatch; None for a pipeline that only evaluates.
        shape_of: for inputs that are not `[B, T, …]`: called on the first stage's rank with a microbatch's inputs, as
            that stage's module is, it gives the shape `(B, T, D)` that a source will have.
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
    division = Division(n_microbatches, options.get("args_chunk_spec"), options.get("kwargs_chunk_spec"))
    schedule.block_start = StepStart(list(stages), division, shape_of, needs_target=loss_fn is not None)
    schedule.block_loss_fn = loss_fn
    return schedule


def evaluate(
    stages: Sequence[BlockResStage],
    n_microbatches: int,
    *args: Any,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    loss_kwargs: dict[str, Any] | None = None,
    losses: list[Tensor] | None = None,
    return_outputs: bool = True,
    variable_seq_lengths: Tensor | None = None,
    arg_mbs: Sequence[tuple[Any, ...]] | None = None,
    kwarg_mbs: Sequence[dict[str, Any]] | None = None,
    target_mbs: Sequence[Any] | None = None,
    shape_of: ShapeOf | None = None,
    **kwargs: Any,
) -> Any:
    """Forward only, without autograd and without a schedule. Called on every rank.

    Works under every placement, also where adjacent stages share a rank, and for batches of any size that divides.

    Args:
        args: the input of the first stage's module, a whole batch; ignored on other ranks.
        kwargs: for the modules of all of this rank's stages.
        target, loss_fn, loss_kwargs, losses: where given, the rank with the last stage fills `losses`, one per
            microbatch, with `loss_fn(output, target, **loss_kwargs)`.
        variable_seq_lengths, arg_mbs, kwarg_mbs, target_mbs: as in a schedule's `step`.
        shape_of: as in `build_schedule`.

    Returns:
        The whole batch's output on the rank with the last stage, elsewhere None. Where microbatches had been cut to
        different lengths, padded with zeros to the longest.

    Raises:
        ValueError: on all ranks alike, where they were given different settings or one cannot use its batch.
    """
    start = StepStart(stages, Division(n_microbatches), shape_of)
    batch = Batch(args, kwargs, target, variable_seq_lengths, arg_mbs, kwarg_mbs, target_mbs)
    return _evaluate(start, batch, partial(loss_fn, **loss_kwargs or {}) if loss_fn else None, losses, return_outputs)


class _Careful:
    """Mixed into a schedule class: a step begins on all ranks alike, cleans up after a failure, and takes any shape."""

    block_start: StepStart
    block_loss_fn: LossFunction | None
    block_microbatches: Microbatches
    _has_backward: bool

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        variable_seq_lengths: Tensor | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One training step on a whole batch. Called on every rank.

        Args:
            args: the input of the first stage's module, needed on its rank only; each batch may have another shape.
            kwargs: for the modules of all of this rank's stages.
            target: needed on the last stage's rank only, divided like the input.
            losses: a list to fill with each microbatch's loss, on the last stage's rank.
            loss_kwargs: for the loss function, beyond output and target.
            variable_seq_lengths: `[rows]`, integers, best on the CPU: how much of each row of a batch `[rows, T, …]`
                that is padded on the right is real, given where the input is. Then every microbatch is cut to its
                longest row: each tensor `[rows, T, …]` among the inputs and, on the ranks that learn of it, among their
                `kwargs` and targets. What is not sent is counted in `stage.traffic().saved_bytes`.

                Microbatches now have different numbers of real tokens, so a mean over each would weigh tokens
                unequally. Let the loss be a sum over real tokens, divided by their number in the whole batch:

                    def loss_fn(output, target, tokens):
                        logits, target = output.flatten(0, 1), target.flatten()
                        return cross_entropy(logits, target, ignore_index=-100, reduction="sum") / tokens

                    schedule = build_schedule(…, loss_fn, scale_grads=False)
                    tokens = (target != -100).sum()
                    schedule.step(…, target=target, variable_seq_lengths=lengths, loss_kwargs={"tokens": tokens})

                The sum of `losses` is the batch's loss, and gradients are those of the padded batch with its padding
                masked, wherever a token's output does not depend on the padding after it.
            arg_mbs, kwarg_mbs, target_mbs: instead of `args`, `kwargs` and `target`, microbatches that are divided
                already, one tuple, dict or target each, of any batch sizes and lengths (as in `step` of PyTorch 2.14).
                What is said above about losses holds where they differ.

        Returns:
            On the last stage's rank, unless `return_outputs` is False, the whole batch's output; where microbatches had
            been cut to different lengths, padded with zeros to the longest.

        Raises:
            ValueError: on all ranks alike, where they were given different settings or one cannot use its batch.
        """
        leftovers = [getattr(self, name) for name in SCHEDULE_STATE if hasattr(self, name)]
        batch = Batch(args, kwargs, target, variable_seq_lengths, arg_mbs, kwarg_mbs, target_mbs)
        with (
            _cleaning_up(self.block_start.stages, *leftovers),
            quiet_schedule_tables(),
            self.block_start.step(batch, training=self._has_backward) as self.block_microbatches,
        ):
            try:
                return super().step(  # type: ignore[misc]  # the schedule's
                    losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs
                )
            finally:
                del self.block_microbatches

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        variable_seq_lengths: Tensor | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`evaluate` with the schedule's microbatches and loss; only the last stage's rank needs `target`."""
        batch = Batch(args, kwargs, target, variable_seq_lengths, arg_mbs, kwarg_mbs, target_mbs)
        loss_fn = partial(self.block_loss_fn, **loss_kwargs or {}) if self.block_loss_fn else None
        return _evaluate(self.block_start, batch, loss_fn, losses, return_outputs)

    def _step_microbatches(self, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, *args: Any, **kwargs: Any) -> None:
        """The engine's loop, over microbatches that were divided when the step began."""
        mine = self.block_microbatches
        super()._step_microbatches(mine.args, mine.kwargs, mine.targets, *args, **kwargs)  # type: ignore[misc]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return super()._merge_outputs(level(output_chunks))  # type: ignore[misc]


def _evaluate(
    start: StepStart, batch: Batch, loss_fn: LossFunction | None, losses: list[Tensor] | None, return_outputs: bool
) -> Any:
    outputs, found = [], []
    # Not in inference mode, where a block would be a slot of a stream's bank: one in the cache would keep the whole.
    with (
        _cleaning_up(start.stages),
        torch.inference_mode(False),
        torch.no_grad(),
        start.step(batch, training=False) as microbatches,
    ):
        for microbatch, output in _run_forward(start.stages, microbatches):
            if return_outputs:
                outputs.append(output)
            if loss_fn is not None and microbatches.targets is not None:
                found.append(loss_fn(output, microbatches.targets[microbatch]))
    if losses is not None and found:
        losses[:] = found
    return merge_chunks(level(outputs), None) if outputs else None


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


def _run_forward(stages: Sequence[BlockResStage], microbatches: Microbatches) -> Iterator[tuple[int, Tensor]]:
    """The model's outputs by microbatch, on the rank that has them."""
    inputs = microbatches.inputs
    by_index = {stage.stage_index: stage for stage in stages}
    arriving: dict[tuple[int, int], list[Work]] = {}
    leaving: list[Work] = []
    for stage in stages:
        stage.begin_evaluation()
    for action in forward_order(stages[0].routing, len(inputs))[stages[0].group_rank]:
        stage, microbatch = by_index[action.stage], action.microbatch
        if action.kind == "receive":
            arriving[action.stage, microbatch] = post(stage.get_fwd_recv_ops(microbatch))
            continue
        for work in arriving.pop((action.stage, microbatch), []):
            work.wait()
        output = stage.forward_one_chunk(microbatch, *inputs[microbatch], save_forward_output=False)
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
