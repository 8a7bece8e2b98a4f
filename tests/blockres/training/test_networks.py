"""The command with models of transformers: over two ranks with two stages each, as one process with the whole model."""

import json
import re
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import nn

from blockres.models import FAMILIES
from blockres.models.gpt import GPTConfig, next_token_loss
from blockres.pipeline import SCHEDULES
from blockres.training import checkpoint, export
from blockres.training.config import UNUSED, Model, Schedule, TrainConfig
from blockres.training.data import Split, load_corpus
from blockres.training.networks import ROUTER_LOSS, random_model
from tests.support.command import losses, refusals, run_alone, run_ranks

EXACT = ["--dtype", "float64", "--sublayers-per-block", "3", "--clip-norm", "0.5"]
SHAPE = GPTConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1)  # as the tests' flags have it
GPT2 = ["--num-kv-heads", "2"]  # as many as heads
NARROW = ["--dtype", "bfloat16", "--steps", "2", "--sublayers-per-block", "3"]


def test_flags_offer_what_there_is():
    assert get_args(Schedule) == tuple(SCHEDULES)
    assert set(get_args(Model)) - {"gpt"} <= FAMILIES.keys()


def test_a_pipeline_follows_the_unsplit_run_goes_on_and_is_exported(tmp_path):
    """Through checkpoints written by one layout and read by another, with the loss that balances Mixtral's experts."""
    flags = ["--model", "mixtral", *EXACT]
    unsplit = run_alone(tmp_path / "unsplit", *flags, "--virtual-stages", "1")
    pipeline = run_ranks(tmp_path, 2, *flags, "--checkpoint-interval", "2")
    assert losses(pipeline) == pytest.approx(losses(unsplit), rel=1e-10)
    said = (tmp_path / "rank-1.txt").read_text()
    assert "mixtral with random weights, 8 sublayers, block residual (3 sublayers per block)" in said
    assert "sent per microbatch  5 units, 40.1 KiB forward with the cache, and as much" in said
    assert "everything at every hop is 8 units, 64.1 KiB" in said
    weights, whole_weights = (_depth_weights(tmp_path / run) for run in ("out", "unsplit"))
    torch.testing.assert_close(weights.sum(1), torch.ones(9))
    torch.testing.assert_close(weights, whole_weights)
    halfway = checkpoint.checkpoint_path(tmp_path / "out", 2)
    resumed = run_alone(tmp_path / "resumed", *flags, "--resume", str(halfway))
    assert losses(resumed)[-2:] == pytest.approx(losses(unsplit)[-2:], rel=1e-10)
    whole = _exported(tmp_path)
    assert type(whole).__name__ == "MixtralForCausalLM"
    ends = checkpoint.Checkpoint.open(checkpoint.checkpoint_path(tmp_path / "unsplit", 4))
    state = {f"model.{name}": torch.empty_like(p) for name, p in whole.named_parameters()}
    ends.load(state)
    assert all(torch.allclose(p, state[f"model.{name}"], rtol=1e-8) for name, p in whole.named_parameters())


def _depth_weights(folder: Path) -> torch.Tensor:
    return torch.tensor(json.loads((folder / "depth_weights.json").read_text()))


def _exported(folder: Path) -> nn.Module:
    file = folder / "model.safetensors"
    export.export_model(folder / "out", file)
    return export.load_model(file)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral"])
def test_the_training_dtype_is_that_on_the_wire(tmp_path, family):
    """5 units of 2 × 16 × 32 bfloat16 numbers, and in 3 hops Mixtral's 2 × 4 float32 sums."""
    flags = ["--model", family, *NARROW, *(GPT2 if family == "gpt2" else [])]
    trained = losses(run_ranks(tmp_path, 2, *flags))
    assert len(trained) == 6
    assert 5.0 < trained[-1] < trained[0] < 6.0
    sent = "10.1" if family == "mixtral" else "10.0"
    assert f"sent per microbatch  5 units, {sent} KiB forward" in (tmp_path / "rank-1.txt").read_text()


def test_replicas_of_a_pipeline_follow_the_unsplit_run(tmp_path):
    flags = ["--model", "mixtral", *EXACT]
    unsplit = run_alone(tmp_path / "unsplit", *flags, "--virtual-stages", "1")
    replicas = run_ranks(tmp_path, 2, *flags, "--dp-size", "2", "--num-microbatches", "2")
    assert losses(replicas) == pytest.approx(losses(unsplit), rel=1e-10)


def test_losses_are_cross_entropies_and_gradients_are_not(tmp_path):
    flags = ["--model", "mixtral", "--dtype", "float64", "--steps", "1", "--eval-interval", "1"]
    validation, step, _ = run_alone(tmp_path, *flags, "--num-microbatches", "1")
    model = random_model("mixtral", SHAPE, sequence_length=16, dtype=torch.float64)
    split = Split.of(load_corpus(None, SHAPE.vocab_size), 0.1, sequence_length=16, batch_size=8)
    inputs, targets = split.validation_batch(0)
    with torch.no_grad():
        held_out = next_token_loss(model(inputs).logits, targets).item()
    inputs, targets = split.training_batch(0, 0)
    out = model(inputs)
    cross_entropy = next_token_loss(out.logits, targets)
    (cross_entropy + ROUTER_LOSS * out.aux_loss).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert validation["validation_loss"] == pytest.approx(held_out, rel=1e-10)
    assert step["loss"] == pytest.approx(cross_entropy.item(), rel=1e-10)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)


def test_initial_values_are_the_seeds_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (
        random_model("llama", SHAPE, sequence_length=8, dtype=torch.bfloat16, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert one.lm_head.weight.dtype == torch.float32
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--model", "llama", "--tie-weights"], "--tie-weights means nothing with --model llama: leave it out"),
        (["--model", "mixtral", "--compile"], "--compile means nothing with --model mixtral: leave it out"),
        (["--model", "gpt2", "--num-heads", "4"], "--num-kv-heads means nothing .*, or give as many as --num-heads"),
        (["--model", "gpt2", *GPT2, "--rope-theta", "5"], "--rope-theta means nothing with --model gpt2"),
        (["--residual", "full", "--sublayers-per-block", "2"], "--sublayers-per-block means nothing with --residual"),
    ],
)
def test_flags_that_mean_nothing_are_refused(tmp_path, capsys, flags, refused):
    given = ["--out", str(tmp_path), *flags]
    assert re.search(refused, refusals(capsys, given, given))


def test_every_model_says_which_flags_mean_nothing_to_it():
    assert set(get_args(Model)) == UNUSED.keys()
    assert {name for names in UNUSED.values() for name in names} <= TrainConfig().flags().keys()


def test_it_says_how_much_an_evaluation_reads(tmp_path, capsys):
    run_alone(tmp_path, "--steps", "1")
    assert re.search(r"an evaluation every 2 steps, on 1 of \d{3} batches", capsys.readouterr().out)


def test_missing_transformers_are_named(tmp_path, capsys):
    given = ["--out", str(tmp_path), "--model", "gpt2"]
    with mock.patch("blockres.training.config.find_spec", return_value=None):
        refused = refusals(capsys, given, given)
    assert re.search(r"--model gpt2 is built by transformers, .* pip install 'blockres\[hf\]'", refused)
