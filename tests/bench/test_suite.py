"""`pytest bench --benchmark-only`: what is right is timed, what is wrong or missing is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = """
import dataclasses
from bench import implementations as known

def wrong():
    right = known.eager()
    return dataclasses.replace(right, name="wrong", aggregate=lambda *inputs: 1.1 * right.aggregate(*inputs))

def absent():
    import no_such_package

known.REGISTRY |= {"wrong": wrong, "absent": absent}
"""
TIMED = {("blockres", "forward"), ("blockres", "backward"), ("eager", "forward"), ("eager", "backward")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run with two implementations more: what it said, and what it saved."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "others.py").write_text(OTHERS)
    only = [f"--implementation={name}" for name in ("blockres", "eager", "wrong", "absent")]
    cut = ["--shape=2x8x16", "--stack=2x2x8x16", "--operation=attn_res", "--dtype=float32", "--seconds=0"]
    command = [sys.executable, "-m", "pytest", "bench", "-p", "others", "--device=cpu", "--benchmark-only"]
    command += ["--benchmark-json", str(folder / "times.json"), *only, *cut]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    variables["PYTHONPATH"] = str(folder)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "times.json").read_text())


def test_what_is_right_is_timed_beside_a_copy(run):
    said, saved = run
    for group in ("operations", "stacks"):
        infos = [info for b in saved["benchmarks"] if (info := b["extra_info"])["suite"] == group]
        assert {(info["implementation"], info["direction"]) for info in infos} == TIMED
        for info in infos:
            assert info["fraction_of_copy"] == pytest.approx(info["gb_per_s"] / info["copy_gb_per_s"])
            assert info["gb_per_s"] == pytest.approx(info["bytes"] / info["median"] / 1e9)
    assert "| attn_res forward float32 2x8x16 " in said
    assert saved["machine_info"]["blockres_bench"]["implementations"]["absent"].startswith("missing")


def test_what_is_wrong_is_said_and_not_timed(run):
    said, saved = run
    assert saved["not_timed"]["test_operation[attn_res-forward-2x8x16x4-float32-wrong]"].startswith("wrong: output 0")
    assert "not timed: test_stack[stack-backward-2x2x8x16-float32-wrong]: wrong: " in said
    assert not [b for b in saved["benchmarks"] if b["extra_info"]["implementation"] == "wrong"]


def test_what_is_missing_is_said(run):
    said, saved = run
    assert saved["not_timed"]["absent"] == "missing: No module named 'no_such_package'"
    assert "not timed: absent: missing" in said
