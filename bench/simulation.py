"""When each action of a pipeline schedule ends, from compute times, bytes per hop and the bandwidth of a link.

The order of actions on each rank is PyTorch's own. The model: a rank runs one action at a time, in that order, and
starts it as soon as the rank is free and its input has arrived. A transfer begins when the action that makes its
payload ends and the link is free; links connect ordered pairs of ranks, work in both directions at once, and do not
slow computing down.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from unittest import mock

from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from blockres.pipeline.routing import BlockRouting

Cost = Callable[[int], float]
Action = tuple[str, int, int]


@dataclass(frozen=True)
class Link:
    """Bytes per second in each direction, and seconds before the first byte arrives."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Seconds of one step, and the share of them that ranks spent computing, on average."""

    seconds: float
    busy: float

    @property
    def bubble(self) -> float:
        return 1 - self.busy


_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B"}


@cache
def schedule_order(pp_size: int, virtual: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """For each rank its actions as PyTorch's Interleaved1F1B orders them: `("F" or "B", stage, microbatch)`."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, pp_size, pp_size * virtual, None
    schedule = ScheduleInterleaved1F1B([stage] * virtual, microbatches)
    return tuple(
        tuple(
            (_LETTERS[action.computation_type.name], action.stage_index, action.microbatch_index or 0)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in _LETTERS
        )
        for rank in range(pp_size)
    )


def simulate(
    routing: BlockRouting, microbatches: int, forward: Cost, backward: Cost, unit_bytes: float, link: Link
) -> Outcome:
    """One training step under Interleaved1F1B, which with one stage per rank is 1F1B.

    Args:
        forward, backward: seconds of a stage, by its index, for one microbatch.
        unit_bytes: of one `[B, T, D]` on the wire.
    """
    virtual = routing.num_stages // routing.pp_size
    order = schedule_order(routing.pp_size, virtual, microbatches)
    return _Simulation(routing, order, forward, backward, unit_bytes, link).run()


class _Simulation:
    def __init__(
        self,
        routing: BlockRouting,
        order: Sequence[Sequence[Action]],
        forward: Cost,
        backward: Cost,
        unit_bytes: float,
        link: Link,
    ) -> None:
        self._routing, self._order, self._link = routing, order, link
        self._cost = {"F": forward, "B": backward}
        self._hop_bytes = [units * unit_bytes for units in routing.hop_units()]
        self._arrived: dict[Action, float] = {}
        self._ended: dict[Action, float] = {}
        self._link_free: dict[tuple[int, int], float] = defaultdict(float)
        self._rank_free = [0.0] * len(order)
        self._busy = [0.0] * len(order)

    def run(self) -> Outcome:
        waiting = [iter(actions) for actions in self._order]
        upcoming = [next(actions, None) for actions in waiting]
        while any(action is not None for action in upcoming):
            moved = False
            for rank, actions in enumerate(waiting):
                while (action := upcoming[rank]) is not None and self._can_start(action):
                    self._do(rank, action)
                    upcoming[rank] = next(actions, None)
                    moved = True
            assert moved, f"the schedule waits for itself: {upcoming}"
        seconds = max(self._rank_free)
        return Outcome(seconds, sum(self._busy) / len(self._busy) / seconds)

    def _can_start(self, action: Action) -> bool:
        return all(input in self._arrived or input in self._ended for input in self._inputs(action))

    def _inputs(self, action: Action) -> Sequence[Action]:
        kind, stage, microbatch = action
        if kind == "F":
            return () if stage == 0 else (("F", stage, microbatch),)
        return (("B", stage, microbatch),) if stage < self._routing.num_stages - 1 else (("done F", stage, microbatch),)

    def _do(self, rank: int, action: Action) -> None:
        kind, stage, microbatch = action
        ready = max((self._arrived.get(x, self._ended.get(x, 0.0)) for x in self._inputs(action)), default=0.0)
        cost = self._cost[kind](stage)
        end = max(self._rank_free[rank], ready) + cost
        self._rank_free[rank] = end
        self._busy[rank] += cost
        self._ended["done " + kind, stage, microbatch] = end
        target = stage + 1 if kind == "F" else stage - 1
        if 0 <= target < self._routing.num_stages:
            self._arrived[kind, target, microbatch] = self._transfer(rank, min(stage, target), target, end)

    def _transfer(self, rank: int, hop: int, target: int, ready: float) -> float:
        """When the payload of a hop is there, if it is ready at this time."""
        receiver = self._routing.rank_of(target)
        if receiver == rank:
            return ready
        begins = max(ready, self._link_free[rank, receiver])
        self._link_free[rank, receiver] = begins + self._hop_bytes[hop] / self._link.bandwidth
        return self._link_free[rank, receiver] + self._link.latency
