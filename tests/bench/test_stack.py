"""What a whole training stack moves and keeps, exactly; and that the GPU script would run."""

import pytest
import torch

from bench import device
from bench.counting import TOKENS
from bench.interpreter import install
from bench.stack import IDEAL, RECOMPUTE, STANDARD, count
from bench.streams import StackShape

PHASES = ("forward", "backward")
SHAPE = StackShape(sublayers=8, per_block=4, tokens=TOKENS, dim=64)

install()

# Row sets. Phase 1 reads k = 1, then 2 sources and writes 4 outputs. Of a block's three merges the first has no update
# to add and moves 3 forward, the others 5; backward all move 6. An add closes a block. The last read has 3 sources.
PHASE_1 = (1 + 4) + (2 + 4)
MERGES = 2 * (3 + 5 + 5)
CLOSING = 2 * 3
LAST = 3 + 1
FORWARD = PHASE_1 + MERGES + CLOSING + LAST
PHASE_1_BACKWARD = (4 + 3 * 1) + (4 + 3 * 2)
BACKWARD = PHASE_1_BACKWARD + 2 * 3 * 6 + (2 * 3 + 1)


def in_row_sets(counted, phase):
    return counted.ledger.units("rows", torch.bfloat16, phase)


def test_a_stack_moves_what_its_phases_move_and_nothing_more():
    counted = count("blockres", SHAPE)
    assert in_row_sets(counted, "forward") == FORWARD
    assert in_row_sets(counted, "backward") == BACKWARD
    assert counted.per_sublayer() <= 15
    assert counted.kept == 2
    assert counted.error < 1e-2


def test_a_merge_is_one_launch_forward_and_two_backward_and_no_operation_of_pytorch():
    """Two backward: the gradients of rows, and those of parameters. Operations of PyTorch come with a block."""
    stacks = [StackShape(8, 4, TOKENS, 64), StackShape(16, 8, TOKENS, 64)]
    few, many = ([count("blockres", shape).ledger.launches(phase) for phase in PHASES] for shape in stacks)
    once_per_block, merges, last = 2, 6, 1
    assert [kernels for kernels, _ in few] == [once_per_block + merges + last, 2 * (once_per_block + merges + last)]
    assert [kernels for kernels, _ in many] == [few[0][0] + 8, few[1][0] + 2 * 8]
    assert [operations for _, operations in many] == [operations for _, operations in few]


def test_recomputing_phase_1_keeps_what_a_standard_residual_keeps():
    counted = count(RECOMPUTE, SHAPE)
    a_copy_of_each_first_output = 2 * 2
    assert in_row_sets(counted, "forward") == FORWARD + a_copy_of_each_first_output
    assert in_row_sets(counted, "backward") == BACKWARD + PHASE_1
    assert counted.kept == 1
    assert counted.error < 1e-2


@pytest.mark.parametrize(("name", "units"), [(IDEAL, 8), (STANDARD, 11)])
def test_the_standard_residuals_cost_what_they_must(name, units):
    counted = count(name, SHAPE)
    assert counted.per_sublayer() == pytest.approx(units, abs=0.5)
    assert counted.kept == pytest.approx(1, abs=0.15)
    assert counted.error < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, where the script itself can be run")
def test_the_gpu_script_runs_through_in_the_interpreter(capsys):
    assert device.main(["--dry-run", "--implementation", "blockres", "--implementation", "eager"]) == 0
    said = capsys.readouterr().out
    assert "checks against float64: 8, wrong: 0" in said
    assert said.count("ran") >= 2 * (8 + 2)
