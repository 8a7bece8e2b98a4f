"""The command: what it trains, writes and says, however many processes it has, and how it refuses and fails.

Runs of one process are made in this one; others start real processes. Ranks that cannot begin are played by threads
that share a store, which shows the same code every rank's flags.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partialmethod
from unittest import mock

import pytest
import torch
from torch import nn

from blockres import train
from blockres.models.gpt import MLP, Attention, GPTConfig
from blockres.training.config import RANGES, TrainConfig, parse
from blockres.training.launch import Launch
from tests.support.command import BOUND, EXACT, exit_code, losses, metrics, ranks, refusals, run_alone, run_ranks


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# One process.


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_one_process_trains_and_says_what_it_did(tmp_path, capsys, residual):
    records = run_alone(tmp_path, "--residual", residual, plots=True)
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    assert all(math.isfinite(value) for value in losses(records))
    said = capsys.readouterr().out
    for text in (
        "bytes, 4", f"8 sublayers, {residual} residual", "training loss", "nats per byte", "unigram entropy 3.",
        "tokens/s", "1 process on cpu, 2 stages each", "cache peak  ", f"{tmp_path}: metrics.jsonl, step-000004",
    ):  # fmt: skip
        assert text in said
    assert "sent per microbatch" not in said
    assert ("no depth_weights.json" in said) == (residual == "standard")
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "depth_weights.png").exists() == (residual != "standard")


def test_it_learns(tmp_path):
    flags = "--steps 60 --learning-rate 1e-2 --num-microbatches 1 --eval-batches 9 --eval-interval 60"
    records = run_alone(tmp_path, *flags.split())
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert validation[0] > 5.4
    assert validation[-1] < 3.2


def test_depth_weights_are_means_of_softmax_weights(tmp_path):
    run_alone(tmp_path, "--sublayers-per-block", "3", "--schedule", "LoopedBFS", "--virtual-stages", "3")
    rows = torch.tensor(json.loads((tmp_path / "depth_weights.json").read_text()))
    assert rows.shape == (9, 4)
    torch.testing.assert_close(rows.sum(1), torch.ones(9))
    readable = torch.tensor([1, 2, 2, 2, 3, 3, 3, 4, 4])
    assert torch.equal((rows > 0).sum(1), readable)


def test_a_bin_file_in_bfloat16_with_tied_weights(tmp_path, capsys):
    tokens = torch.randint(300, (4000,)).to(torch.uint16)
    path = tmp_path / "train.bin"
    path.write_bytes(tokens.numpy().tobytes())
    flags = ["--data", str(path), "--vocab-size", "300", "--dtype", "bfloat16", "--tie-weights"]
    run_alone(tmp_path / "out", *flags)
    assert "nats per token" in capsys.readouterr().out


def test_a_second_run_in_the_same_place_sets_the_first_aside(tmp_path, capsys):
    first = run_alone(tmp_path, "--steps", "1", plots=True)
    (tmp_path / "notes.txt").touch()
    run_alone(tmp_path, "--steps", "2", "--residual", "standard", plots=True)
    assert metrics(tmp_path / "earlier" / "1") == first
    assert {path.name for path in tmp_path.iterdir()} == {
        "earlier", "loss.png", "metrics.jsonl", "notes.txt", "step-000002",
    }  # fmt: skip
    assert f"is in {tmp_path / 'earlier'}" in capsys.readouterr().out
    run_alone(tmp_path, "--steps", "1")
    assert len(metrics(tmp_path / "earlier" / "2")) == 4


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, capsys, policy):
    flags = ["--learning-rate", "1e38", "--warmup-steps", "0", "--clip-norm", "1e38", "--nan-policy", policy]
    assert exit_code(tmp_path, *flags) == (policy == "stop")
    said = capsys.readouterr()
    text = said.err if policy == "stop" else said.out
    assert re.search(r"step 2: loss (nan|inf), gradient norm (nan|inf), broken on ranks: 0", text)


def test_without_matplotlib_it_says_so_and_draws_nothing(tmp_path, capsys):
    run_alone(tmp_path, "--steps", "1")
    assert "no plots: matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


# More processes. Everything is compared with one process that runs the whole model as one stage, in float64.


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory) -> list[float]:
    return losses(run_alone(tmp_path_factory.mktemp("unsplit"), *EXACT, "--virtual-stages", "1"))


@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
def test_two_stages_in_one_process_follow_the_unsplit_run(tmp_path, unsplit, schedule, cache):
    run = run_alone(tmp_path, *EXACT, "--virtual-stages", "2", "--schedule", schedule, cache)
    assert losses(run) == pytest.approx(unsplit, rel=1e-10)


@pytest.mark.parametrize("flags", [["--compile"], ["--activation-checkpointing", "--schedule", "ZBVZeroBubble"]])
def test_compiled_and_checkpointed_sublayers_follow_the_unsplit_run(tmp_path, unsplit, flags):
    compile_quickly = partialmethod(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(Attention, "compile", compile_quickly), mock.patch.object(MLP, "compile", compile_quickly):
        run = run_alone(tmp_path, *EXACT, *flags)
    assert losses(run) == pytest.approx(unsplit, rel=1e-10)


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, []),
        (4, ["--dp-size", "2", "--num-microbatches", "2"]),
        (4, ["--schedule", "ZBVZeroBubble"]),
    ],
    ids=["P2-V2", "dp2-P2-V2", "P4-V2-zbv"],
)
def test_a_pipeline_follows_the_unsplit_run(tmp_path, unsplit, count, flags):
    run = run_ranks(tmp_path, count, *EXACT, *flags)
    assert losses(run) == pytest.approx(unsplit, rel=1e-10)
    rows = torch.tensor(json.loads((tmp_path / "out" / "depth_weights.json").read_text()))
    torch.testing.assert_close(rows.sum(1), torch.ones(9))
    said = "".join(path.read_text() for path in tmp_path.glob("rank-*.txt"))
    assert said.count("validation loss      ") == 1
    if count == 2:
        assert "sent per microbatch  5 units, 40.0 KiB forward with the cache, and as much" in said
        assert "everything at every hop is 8 units, 64.0 KiB" in said


def test_a_bfloat16_wire_trains_almost_as_a_float32_one(tmp_path):
    flags = ["--steps", "20", "--num-layers", "2", "--sublayers-per-block", "1", "--num-microbatches", "2"]
    exact = run_alone(tmp_path / "float32", *flags)
    rounded = run_ranks(tmp_path / "bfloat16", 2, *flags, "--pipeline-dtype", "bfloat16")
    assert losses(rounded) != losses(exact)
    assert rounded[-1]["validation_loss"] == pytest.approx(exact[-1]["validation_loss"], rel=0.02)


# What cannot begin.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-microbatches", "7"], "7 microbatches do not divide"),
        (["--virtual-stages", "5"], "10 pipeline stages .* the model has 8: .*--num-layers 5 or more"),
        (["--batch-size", "10"], "multiple of --dp-size × --num-microbatches = 4, got 10; 12 would do"),
        (["--dp-size", "3"], "--dp-size must divide the number of processes, got 3 and 2; 1 or 2 would do"),
        (["--schedule", "1F1B"], "1F1B runs exactly 1 stage on each rank, got 2 .*--virtual-stages 1"),
        (["--data", "/no/such/text"], "--data /no/such/text does not exist"),
        (["--data", os.devnull], f"--data {os.devnull} does not exist"),
        (["--sequence-length", "9999"], "use more data, a lower --batch-size or --sequence-length"),
        (["--vocab-size", "100"], "the model knows 0 … 99: pass --vocab-size"),
        (["--dtype", "float8"], "the flags could not be read"),
        (["--dim", "33"], "the flags could not be read"),
        (["--residual", "dense"], "the flags could not be read"),
        (["--device", "cuda"], "PyTorch sees no GPU"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be written"),
        (["--compile", "--schedule", "InterleavedZeroBubble"], "--compile does not go with --schedule InterleavedZero"),
        (["--resume", "a", "b"], "the flags could not be read"),
        (["--learning-rate", "1e-4"], "--min-learning-rate must be at most --learning-rate, got 0.0003 and 0.0001"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_in_the_same_words_by_every_rank(tmp_path, capsys, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused = refusals(capsys, *[["--out", str(tmp_path), *flags]] * 2)
    assert re.search(message, refused, re.S), refused


@pytest.mark.parametrize(
    ("flag", "refused", "allowed"),
    [
        ("--steps", ["0"], "at least 1"),
        ("--checkpoint-interval", ["0"], "at least 1"),
        ("--warmup-steps", ["-5"], "at least 0"),
        ("--seed", ["-1", str(2**63)], "at least 0 and less than 2**63"),
        ("--weight-decay", ["-1.0", "inf", "nan"], "at least 0 and finite"),
        ("--beta1", ["-0.1", "1.0", "2.0", "nan"], "at least 0 and less than 1"),
        ("--validation-fraction", ["0.0", "1.0", "nan"], "greater than 0 and less than 1"),
        ("--learning-rate", ["0.0", "inf", "nan"], "greater than 0 and finite"),
        ("--norm-eps", ["0.0", "nan"], "greater than 0 and finite"),
        ("--clip-norm", ["0.0", "nan"], "greater than 0"),
        ("--timeout", ["0.0", "inf", "1e+10"], "greater than 0 and at most 1e9"),
    ],
)
def test_numbers_out_of_range_are_refused_with_what_is_allowed(flag, refused, allowed):
    for value in refused:
        config = parse([flag, value])
        got = value if "1e" not in value else "10000000000.0"
        with pytest.raises(ValueError, match=re.escape(f"{flag} must be {allowed}, got {got}") + "$"):
            config.check(world_size=1)


def test_every_number_among_the_flags_has_a_range():
    checked = {name for _, _, names in RANGES for name in names}
    numbers = {name for name, value in TrainConfig().flags().items() if type(value) in (int, float)}
    sizes = {field.name for field in fields(GPTConfig) if field.type is int}
    assert numbers - sizes <= checked


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['tyro'] = None; import blockres.train"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND, check=False)
    assert run.returncode == 1
    assert run.stderr.endswith("blockres.training needs tyro: pip install 'blockres[train]'\n")


def test_the_reason_why_a_shape_is_impossible_is_said(capsys):
    assert train._parse(["--dim", "33"])[0] is None
    assert "must be an even number" in capsys.readouterr().err


def test_flags_that_differ_are_named_with_their_values_and_ranks(tmp_path, capsys):
    same = ["--out", str(tmp_path)]
    refused = refusals(capsys, same, [*same, "--num-layers", "6", "--no-cache"], same)
    assert "--num-layers: 4 on ranks 0, 2, 6 on rank 1" in refused
    assert "--cache: true on ranks 0, 2, false on rank 1" in refused


def test_what_one_rank_alone_cannot_do_is_said_by_all(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.touch()
    same = ["--out", str(tmp_path)]
    assert refusals(capsys, same, [*same, "--data", str(empty)]) == f"--data {empty} is empty (on rank 1)\n"


def test_help_needs_no_other_rank(capsys):
    with mock.patch.object(Launch, "find", side_effect=AssertionError), pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for flag in shlex.split(
        "--dp-size --virtual-stages --schedule --num-microbatches --dtype --pipeline-dtype --sublayers-per-block "
        "--model --residual --steps --data --out --seed --device --cache --no-cache --dim --num-layers --batch-size "
        "--sequence-length --learning-rate --warmup-steps --eval-interval"
    ):
        assert flag in said


def test_real_processes_with_different_flags_all_say_so_and_end(tmp_path):
    same = ["--out", str(tmp_path)]
    with ranks(tmp_path, same, [*same, "--seed", "1"]) as started:
        for number, rank in enumerate(started):
            assert rank.code() == 2
            assert (
                f"rank {number}: the ranks were started differently:\n  --seed: 0 on rank 0, 1 on rank 1" in rank.said
            )
