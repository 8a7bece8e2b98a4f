"""Runs that are stopped and go on: in the same layout to the last bit, in any other to the last digits.

Real ranks. The run that is not interrupted is on two ranks with two stages each.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from blockres.models.gpt import MLP
from blockres.training import checkpoint
from blockres.training.trainer import Trainer
from tests.support.command import (
    BOUND,
    EXACT,
    TINY,
    after,
    exit_code,
    losses,
    metrics,
    ranks,
    run_alone,
    run_ranks,
    wait_for,
)

FLAGS = [*EXACT, "--steps", "6", "--checkpoint-interval", "2"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(folder, 2, *FLAGS)
    return folder / "out"


def losses_after(step: int, out: Path) -> list[float]:
    return losses(after(step, metrics(out)))


def check_that_evaluations_leave_the_state() -> None:
    real = Trainer.evaluate

    def shapes(trainer: Trainer) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in trainer.state_to_save().items()}

    def evaluate(trainer: Trainer, *args) -> float:
        before, loss = shapes(trainer), real(trainer, *args)
        assert shapes(trainer) == before
        return loss

    Trainer.evaluate = evaluate


def test_other_layouts_go_on_from_a_checkpoint_and_from_each_others(uninterrupted, tmp_path):
    """From P2 V2 to P4 V1, and over two replicas of P2 V1, whose parameters are in shards, to P1 V1."""
    flags = [*FLAGS, "--virtual-stages", "1", "--resume"]
    four, replicas, one = tmp_path / "four" / "out", tmp_path / "replicas" / "out", tmp_path / "one"
    run_ranks(four.parent, 4, *flags, str(uninterrupted / "step-000004"))
    assert losses_after(4, four) == pytest.approx(losses_after(4, uninterrupted), rel=1e-10)
    source = str(uninterrupted / "step-000002")
    run_ranks(replicas.parent, 4, *flags, source, "--dp-size", "2", fault=check_that_evaluations_leave_the_state)
    assert losses_after(2, replicas) == pytest.approx(losses_after(2, uninterrupted), rel=1e-10)
    run_alone(one, *flags, str(replicas / "step-000004"))
    assert losses_after(4, one) == pytest.approx(losses_after(4, uninterrupted), rel=1e-10)


def send_itself(number: signal.Signals) -> None:
    """In the middle of the fourth step."""
    real = Trainer.train_step

    def train_step(trainer, step, *args):
        if step == 3:
            os.kill(os.getpid(), number)
        return real(trainer, step, *args)

    Trainer.train_step = train_step


def test_a_signal_to_one_rank_saves_on_all_and_nothing_is_lost(uninterrupted, tmp_path):
    out = tmp_path / "out"
    flags = ["--out", str(out), *FLAGS, "--checkpoint-interval", "1000"]
    with ranks(tmp_path, flags, flags, faults={1: partial(send_itself, signal.SIGTERM)}) as started:
        assert [rank.code() for rank in started] == [143, 143]
        saved = out / "step-000004"
        for index, rank in enumerate(started):
            assert f"rank {index}: SIGTERM: the run is saved in {saved}, --resume goes on from there" in rank.said
    run_ranks(tmp_path, 2, *FLAGS, "--resume")
    assert losses(metrics(out)) == losses(metrics(uninterrupted))


@pytest.mark.parametrize(("steps", "what_is_left"), [(5, "--resume goes on from there"), (4, "all steps are done")])
def test_ctrl_c_has_its_own_exit_code(steps, what_is_left, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", Trainer.train_step)
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background
    send_itself(signal.SIGINT)
    assert exit_code(tmp_path, "--steps", str(steps)) == 130
    assert f"SIGINT: the run is saved in {tmp_path / 'step-000004'}, {what_is_left}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before


def catches(process: BaseProcess, number: signal.Signals) -> bool:
    """Whether it has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << number - 1)


def hang_in_a_step() -> None:
    MLP.forward = lambda *_: time.sleep(1000)


def test_a_second_signal_ends_a_rank_that_waits_for_a_peer(tmp_path):
    flags = ["--out", str(tmp_path / "out")]
    with ranks(tmp_path, flags, flags, faults={0: hang_in_a_step}) as (_, waiting):
        wait_for(lambda: catches(waiting.process, signal.SIGTERM))
        os.kill(waiting.process.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(waiting.process.pid, signal.SIGTERM)  # as a launcher does: too soon to mean anything
        assert waiting.code(timeout=1) is None
        os.kill(waiting.process.pid, signal.SIGTERM)
        assert waiting.code(timeout=5) == 143
        assert "SIGTERM again, ending at once" in waiting.said


def test_torchrun_is_told_to_end_and_its_ranks_save(tmp_path):
    out, output = tmp_path / "out", tmp_path / "output.txt"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "blockres.train"]
    flags = ["--out", str(out), "--steps", "1000000", "--eval-interval", "1000000"]
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", *launcher, *TINY, *flags], stdout=file, stderr=file)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 2)
        process.terminate()
        assert process.wait(BOUND) != 0
    finally:
        process.kill()
        process.wait()
    (saved,) = checkpoint.in_order(out)
    said = re.findall(r"rank (\d): SIGTERM: the run is saved in (\S+),", output.read_text())
    assert set(said) == {("0", str(saved)), ("1", str(saved))}
    assert metrics(out)[-1]["step"] == checkpoint.steps_of(saved)
