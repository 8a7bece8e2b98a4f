"""The rules checked before anything runs, against what PyTorch's schedules accept, and the evaluation order."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from blockres.pipeline import SCHEDULES, BlockRouting, check_schedule, schedule_placement
from blockres.pipeline.schedules import forward_order


def accepted_by_torch(name: str, pp_size: int, virtual: int, microbatches: int) -> bool:
    """Whether PyTorch builds the schedule; `virtual` stages on rank 0."""
    stages = [
        SimpleNamespace(
            num_stages=pp_size * virtual,
            group_size=pp_size,
            group_rank=0,
            stage_index=index,
            submod=torch.nn.Identity(),
        )
        for index in range(virtual)
    ]
    schedule_class = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle):
        if virtual > 1:
            return False
        stages = stages[0]
    try:
        schedule_class(stages, microbatches, loss_fn=lambda output, target: output)
    except (ValueError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_what_is_checked_beforehand_is_what_torch_accepts(name: str, pp_size: int, virtual: int) -> None:
    for microbatches in range(1, 11):
        try:
            check_schedule(name, pp_size, virtual, microbatches)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == accepted_by_torch(name, pp_size, virtual, microbatches), microbatches


def test_refusals_are_in_a_users_words() -> None:
    with pytest.raises(ValueError, match=r"3 rounds of equal size, but 7 microbatches .* 6 or 8 would"):
        check_schedule("Interleaved1F1B", 2, 2, 7)
    with pytest.raises(ValueError, match=r"as many microbatches as stages: 3 microbatches, 2 ranks × 2 = 4 stages"):
        check_schedule("DualPipeV", 2, 2, 3)
    with pytest.raises(ValueError, match=r"exactly 1 stage on each rank, got 2 .* --virtual-stages 1$"):
        check_schedule("GPipe", 2, 2, 4)
    with pytest.raises(ValueError, match=r"exactly 2 stages on each rank, got 1 .* --virtual-stages 2$"):
        check_schedule("DualPipeV", 2, 1, 4)
    with pytest.raises(ValueError, match="at least 1 microbatch"):
        check_schedule("GPipe", 2, 1, 0)
    with pytest.raises(ValueError, match="unknown pipeline schedule 'OneF'; there are GPipe, 1F1B"):
        check_schedule("OneF", 2, 1, 4)
    assert schedule_placement("ZBVZeroBubble") == "v"
    assert schedule_placement("LoopedBFS") == "loop"


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.sampled_from(["loop", "v"]))
def test_the_evaluation_order_never_blocks(pp_size: int, virtual: int, microbatches: int, placement: str) -> None:
    """Played with sends that wait until the stage's previous one is received.

    Two ranks must also see all messages between them, both ways, in one order: GPUs have one queue per pair.
    """
    routing = BlockRouting([1] * (pp_size * virtual), 1, pp_size, placement)
    orders = [list(order) for order in forward_order(routing, microbatches)]
    ran: set[tuple[int, int]] = set()
    posted: set[tuple[int, int]] = set()
    between: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            if not order:
                continue
            stage, microbatch = order[0].stage, order[0].microbatch
            arrives = stage > 0 and not routing.is_local(stage - 1)
            leaves = stage + 1 < routing.num_stages and not routing.is_local(stage)
            if order[0].kind == "receive":
                posted.add((stage, microbatch))
                between[rank, routing.rank_of(stage - 1)].append((stage, microbatch))
            else:
                input_is_here = stage == 0 or (stage - 1, microbatch) in ran
                receive_is_posted = not arrives or (stage, microbatch) in posted
                previous_is_received = not leaves or microbatch == 0 or (stage + 1, microbatch - 1) in posted
                if not (input_is_here and receive_is_posted and previous_is_received):
                    continue
                ran.add((stage, microbatch))
                if leaves:
                    between[rank, routing.rank_of(stage + 1)].append((stage + 1, microbatch))
            order.pop(0)
            progress = True
    assert len(ran) == routing.num_stages * microbatches
    for (rank, peer), messages in between.items():
        assert messages == between[peer, rank]
