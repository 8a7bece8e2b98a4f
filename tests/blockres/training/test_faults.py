"""When a rank of the command is killed, fails, or cannot write: all end soon, and say why.

Real ranks with nobody to end them. Where each fault is tested:

a rank killed in a forward, of four with two replicas    test_a_killed_rank_ends_all…[forward]
a rank killed in a backward                              test_a_killed_rank_ends_all…[backward]
a rank killed between steps                              test_a_killed_rank_ends_all…[between steps]
a rank killed while it writes its part of a checkpoint   test_a_killed_rank_ends_all…[part of a checkpoint]
rank 0 killed right before a checkpoint is complete      test_a_killed_rank_ends_all…[end of a checkpoint]
a sublayer that raises on one rank                       test_a_sublayer_that_raises_on_one_rank_ends_all
a gradient that is not finite on one rank                test_a_gradient_that_is_not_finite…, and in test_train
a full disk                                              test_a_rank_without_room…, and in test_checkpoint
different flags, the seed of the data among them         test_train, test_real_processes_with_different_flags…
an unwritable --out                                      test_train, test_what_cannot_work…[--out /dev/null/x]
SIGTERM, Ctrl-C                                          test_resume
a batch that does not divide                             test_train, test_what_cannot_work…[--batch-size 10]
a validation set smaller than one batch                  test_train, test_what_cannot_work…[--sequence-length 9999]
wrong headers, counts and shapes from a peer             pipeline/test_failures
"""

import os
import re
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockres.models.gpt import MLP
from blockres.training import checkpoint
from blockres.training.trainer import Trainer
from tests.support.command import Rank, losses, metrics, ranks, run_alone, seconds_to_end

FLAGS = ["--steps", "8", "--checkpoint-interval", "2", "--eval-interval", "100", "--num-microbatches", "2"]
SOON = 20  # seconds, on a busy machine

LOST = r"(pipeline rank \d lost .*|another rank has ended); the cause is in what that rank printed last"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> None:
        die()


def in_step(step: int, what, *args) -> None:
    """At the beginning of a step, counted from 0, call something."""
    real = Trainer.train_step

    def train_step(trainer: Trainer, number: int, *more):
        if number == step:
            what(*args)
        return real(trainer, number, *more)

    Trainer.train_step = train_step


def replace_mlp(forward) -> None:
    MLP.forward = forward


def die_in_forward() -> None:
    in_step(3, replace_mlp, lambda *_: die())


def die_in_backward() -> None:
    in_step(3, replace_mlp, lambda mlp, x, _: DieInBackward.apply(mlp.out.weight.sum() + x))


def die_between_steps() -> None:
    in_step(3, die)


def die_in_fsync() -> None:
    os.fsync = lambda _: die()


def die_writing_a_part() -> None:
    in_step(3, die_in_fsync)


def die_before_the_end() -> None:
    def replace_rename() -> None:
        Path.rename = lambda *_: die()

    in_step(3, replace_rename)


def check_ends(started: list[Rank], struck: int) -> None:
    seconds = seconds_to_end(started, started[struck])
    print(f"the others ended {seconds:.1f} s later")
    assert seconds < SOON
    assert started[struck].process.exitcode == -signal.SIGKILL
    for number, rank in enumerate(started):
        if number != struck:
            assert rank.process.exitcode == 1, rank.said
            assert re.search(rf"rank {number} stopped at step [34]: {LOST}", rank.last_words), rank.last_words


@pytest.mark.parametrize(
    ("fault", "struck", "count", "flags"),
    [
        (die_in_forward, 1, 4, ["--dp-size", "2"]),
        (die_in_backward, 1, 2, []),
        (die_between_steps, 0, 2, []),
        (die_writing_a_part, 1, 2, []),
        (die_before_the_end, 0, 2, []),
    ],
    ids=["forward", "backward", "between steps", "part of a checkpoint", "end of a checkpoint"],
)
def test_a_killed_rank_ends_all_and_the_run_can_go_on(tmp_path, fault, struck, count, flags):
    out = tmp_path / "out"
    with ranks(tmp_path, *[["--out", str(out), *FLAGS, *flags]] * count, faults={struck: fault}) as started:
        check_ends(started, struck)
    assert checkpoint.newest(out) == out / "step-000002"
    assert (out / ".unfinished-step-000004").exists() == (fault in (die_writing_a_part, die_before_the_end))
    records = run_alone(out, *FLAGS, "--resume")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 9))
    assert not list(out.glob(".unfinished*"))


def fail_in_forward() -> None:
    def forward(*_) -> None:
        raise ArithmeticError("the sublayer's own trouble")

    in_step(3, replace_mlp, forward)


def test_a_sublayer_that_raises_on_one_rank_ends_all(tmp_path):
    flags = ["--out", str(tmp_path / "out"), *FLAGS]
    with ranks(tmp_path, flags, flags, faults={1: fail_in_forward}) as started:
        assert seconds_to_end(started, started[1]) < SOON
        other, failed = started
        assert (other.process.exitcode, failed.process.exitcode) == (1, 1)
        assert "rank 1 stopped at step 3: the sublayer's own trouble" in failed.said
        assert re.search(rf"rank 0 stopped at step 3: {LOST}", other.last_words), other.last_words


def spoil_a_gradient() -> None:
    real = Trainer._sum_tied_gradients

    def spoil(trainer: Trainer) -> None:
        real(trainer)
        next(trainer.parts[0].parameters()).grad.flatten()[0] = torch.nan

    in_step(3, setattr, Trainer, "_sum_tied_gradients", spoil)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_is_named_with_step_and_rank(tmp_path, policy):
    flags = ["--out", str(tmp_path / "out"), *FLAGS, "--nan-policy", policy, "--steps", "5"]
    words = r"step 4: loss \d\.\d+, gradient norm nan, broken on ranks: 1"
    with ranks(tmp_path, flags, flags, faults={1: spoil_a_gradient}) as started:
        assert [rank.code() for rank in started] == [int(policy == "stop")] * 2
        for number, rank in enumerate(started):
            if policy == "stop":
                assert re.search(rf"rank {number}: {words}\. --nan-policy skip would leave out such steps", rank.said)
        if policy == "skip":
            assert re.search(rf"{words}; the step is left out", started[1].said)
            assert all(loss < 10 for loss in losses(metrics(tmp_path / "out")) if loss is not None)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_rank_without_room_for_its_part_stops_all(tmp_path):
    out = tmp_path / "out"
    flags = ["--out", str(out), *FLAGS]
    with ranks(tmp_path, flags, flags, faults={1: partial(in_step, 3, limit_files, 1 << 16)}) as started:
        assert [rank.code() for rank in started] == [1, 1]
        for number, rank in enumerate(started):
            said = re.search(rf"rank {number}: {out}/step-000004 cannot be written\. (.*)", rank.said)
            assert re.match(r"\[Errno 27\] File too large: .*shard-00002.* \(on rank 1\)$", said[1])
    assert [path.name for path in checkpoint.in_order(out)] == ["step-000002"]
    assert not list(out.glob(".unfinished*"))
