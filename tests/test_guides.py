"""Every snippet of the guides is executed: a page's Python top to bottom in one scope, scripts and commands by
torchrun."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parent.parent / "docs" / "guides").glob("*.md"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def is_script(snippet: str) -> bool:
    return "init_process_group" in snippet


def test_all_guides_are_found():
    pages = {page.stem for page in GUIDES}
    assert pages == {"README", "hugging-face", "own-training-loop", "inference", "kimi-k3", "pipeline", "kernels-only"}
    for page in GUIDES:
        assert page.stem == "README" or len(snippets(page, "python")) >= 3, page
        linked = re.findall(r"\]\(([\w-]+\.md)\)", page.read_text())
        assert all((page.parent / name).exists() for name in linked)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("page", [page for page in GUIDES if page.stem != "README"], ids=lambda page: page.stem)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": page.stem}
    for number, snippet in enumerate(snippets(page, "python"), 1):
        if not is_script(snippet):
            exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), scope)


def test_scripts(tmp_path):
    scripts = [snippet for page in GUIDES for snippet in snippets(page, "python") if is_script(snippet)]
    assert len(scripts) == 1
    script = tmp_path / "my_pipeline.py"
    script.write_text(scripts[0])
    printed = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script)], tmp_path)
    assert re.search(r"step 1: loss \d", printed), printed
    assert re.search(r"rank 0: \d+ bytes sent", printed), printed


def test_commands(tmp_path):
    commands = [line for page in GUIDES for block in snippets(page, "bash") for line in block.splitlines()]
    assert len(commands) == 1
    program, *arguments = shlex.split(commands[0])
    assert program == "torchrun"
    short = ["--steps", "2", "--eval-interval", "2", "--eval-batches", "1", "--sequence-length", "32"]
    small = ["--dim", "32", "--num-layers", "4", "--out", str(tmp_path / "run")]
    assert "validation loss" in run([*TORCHRUN, *arguments, *short, *small], tmp_path)


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
