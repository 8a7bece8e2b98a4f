"""Gradients of a pipelined model against the unsplit one, in float64 and real processes, under every schedule."""

from collections.abc import Iterator

import pytest

from tests.support.distributed import run_all_well
from tests.support.pipeline import Case, build, largest_error, reference

BOUND = 1e-12
TALLY = {"tally": True}
"""With 2 or 4 microbatches: a mean's factor of a third would be rounded in the tally's float32."""

CASES = {
    1: [
        Case("Interleaved1F1B", 1, (3, 2), 2, 3),
        Case("GPipe", 1, (5,), 2, 3),
        Case("1F1B", 1, (5,), 3, 2),
        Case("LoopedBFS", 1, (2, 1, 2), 2, 3),
        Case("ZBVZeroBubble", 1, (2, 3), 2, 3),
        Case("Interleaved1F1B", 1, (3, 2), 2, 4, model=TALLY),
    ],
    2: [
        Case("GPipe", 2, (3, 2), 2, 3),
        Case("1F1B", 2, (3, 2), 2, 3),
        Case("1F1B", 2, (0, 5), 3, 5),
        Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 3),
        Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4),
        Case("Interleaved1F1B", 2, (2, 2, 2, 2), 2, 4),
        Case("Interleaved1F1B", 2, (2, 0, 2, 2), 2, 4),
        Case("Interleaved1F1B", 2, (1, 2, 0, 1, 3, 0), 3, 4),
        Case("Interleaved1F1B", 2, (2, 3, 1, 2), 1, 4),
        Case("Interleaved1F1B", 2, (2, 3, 1, 2), None, 4),
        Case("LoopedBFS", 2, (2, 3, 1, 2), 2, 3),
        Case("InterleavedZeroBubble", 2, (2, 3, 1, 2), 2, 4),
        Case("InterleavedZeroBubble", 2, (2, 3, 0, 2), 3, 3),
        Case("ZBVZeroBubble", 2, (2, 3, 1, 2), 2, 3),
        Case("ZBVZeroBubble", 2, (2, 0, 1, 2), 2, 4),
        Case("DualPipeV", 2, (2, 3, 1, 2), 2, 5),
        Case("DualPipeV", 2, (0, 3, 1, 3), 4, 4),
        Case("1F1B", 2, (3, 2), 3, 2, model=TALLY),
        Case("Interleaved1F1B", 2, (2, 0, 2, 2), 2, 4, model=TALLY),
        Case("Interleaved1F1B", 2, (2, 3, 1, 2), None, 4, model=TALLY),
        Case("InterleavedZeroBubble", 2, (2, 3, 1, 2), 2, 4, model=TALLY),
        Case("ZBVZeroBubble", 2, (2, 0, 1, 2), 2, 4, model=TALLY),
    ],
    4: [
        Case("Interleaved1F1B", 4, (2, 3, 1, 2, 2, 2, 1, 3), 2, 4),
        Case("Interleaved1F1B", 4, (1, 1, 0, 2, 1, 1, 0, 1), 3, 5),
        Case("InterleavedZeroBubble", 4, (2, 3, 1, 2, 2, 2, 1, 3), 2, 4),
        Case("ZBVZeroBubble", 4, (2, 3, 1, 2, 2, 2, 1, 3), 2, 3),
        Case("DualPipeV", 4, (2, 3, 1, 0, 2, 2, 1, 3), 2, 9),
    ],
}


def errors_of_rank(rank: int, cases: list[Case]) -> Iterator[tuple[str, float]]:
    """The largest relative error of the rank's gradients in each case, cached and uncached, in a second step."""
    for case in cases:
        for run in (case, case.but(cache=False)):
            yield str(run), _error(run, rank)


def _error(case: Case, rank: int) -> float:
    loss, expected = reference(case)
    pipeline = build(case, rank)
    for _ in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        losses = pipeline.step()
        assert len(pipeline.cache) == 0
    if losses:
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=BOUND)
    own = {name for stage in pipeline.stages for name, _ in stage.submod.named_parameters()}
    assert set(pipeline.gradients()) == own & set(expected)
    return largest_error(pipeline.gradients(), expected)


@pytest.mark.parametrize("world_size", CASES)
def test_gradients_equal_those_of_the_unsplit_model(world_size: int) -> None:
    for errors in run_all_well(world_size, errors_of_rank, CASES[world_size]):
        for case, error in errors:
            assert error <= BOUND, case
