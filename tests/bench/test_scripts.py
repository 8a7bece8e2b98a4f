"""The longer scripts, cut as far as their flags cut them: they run through, and save what they measured."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from bench import huggingface, learning, pipeline
from bench.simulation import Link


def saved(path):
    return json.loads(path.read_text())["rows"]


def test_learning_takes_the_variants_in_turns_and_keeps_every_loss(tmp_path, capsys):
    two = ["--variant", "standard", "--variant", "block, S 4"]
    learning.main(
        [*two, "--seed", "5", "--steps", "2", "--interval", "2", "--rounds", "2", "--json", str(tmp_path / "x")]
    )
    speeds, losses = ([row for row in saved(tmp_path / "x") if row["part"] == part] for part in learning.PARTS)
    assert [row["variant"] for row in speeds] == [row["variant"] for row in losses] == ["standard", "block, S 4"]
    assert all(row["tokens_per_s"] > 0 for row in speeds)
    for row in losses:
        assert row["steps"] == [0, 2]
        assert row["validation"][1] < row["validation"][0] < 6.5
    assert losses[1]["parameters"] - losses[0]["parameters"] == 2 * 128 * 17
    assert "| block, S 4 " in capsys.readouterr().out


def test_a_hugging_face_model_is_measured_beside_its_standard_residual(tmp_path):
    sizes = {"layers": 1, "dim": 64, "batch": 1, "tokens": 8, "vocabulary": 16, "sublayers-per-block": 1, "rounds": 2}
    flags = [f"--{name}={size}" for name, size in sizes.items()]
    huggingface.main([*flags, "--model", "blockres", "--model", "eager formula", f"--json={tmp_path / 'x'}"])
    rows = {row["model"]: row for row in saved(tmp_path / "x")}
    assert list(rows) == ["standard", "blockres", "eager formula"]
    assert rows["blockres"]["loss"] == pytest.approx(rows["eager formula"]["loss"], rel=1e-5)
    assert all(row["peak MiB"] > 0 and row["tokens/s"] > 0 for row in rows.values())


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_pipelined_run_says_what_it_took(alone):
    case = pipeline.Case("block, cache", 1, 2, "float32", steps=2, num_layers=2, dim=64, sequence_length=8)
    row = pipeline.run_case(case)
    assert row["tokens/s"] == pytest.approx(case.batch_size * case.sequence_length / row["ms"] * 1e3)
    assert 0 < row["bubble"] < 1
    assert row["peak MiB"] > 0
    assert (row["variant"], row["part"]) == ("block, cache", "measured")


def test_simulated_rows_compare_with_one_rank_and_with_the_standard_residual():
    network = pipeline.Network("n", 8, 2, unit_bytes=1.0, seconds=1.0, link=Link(1e30), microbatches=4)
    slow = dataclasses.replace(network, link=Link(1.0))
    rows = list(pipeline.simulated_rows([network], [1, 2, 8], 2))
    assert {row["P"] for row in rows} == {1, 2}, "eight ranks of two stages have more stages than there are sublayers"
    for row in rows:
        assert row["of standard"] == 1
        assert row["efficiency"] == pytest.approx(1 - row["bubble"])
    waiting = [row for row in pipeline.simulated_rows([slow], [2], 2) if row["variant"] != "standard"]
    assert all(row["of standard"] > 1 for row in waiting)
