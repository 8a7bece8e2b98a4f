"""The README's snippets are run as they stand there; its two commands are run by `.ci/run`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
LOCAL = [snippet for snippet in SNIPPETS if "init_process_group" not in snippet]
DISTRIBUTED = [snippet for snippet in SNIPPETS if "init_process_group" in snippet]


def test_both_kinds_of_snippets_are_found():
    assert len(LOCAL) >= 2
    assert len(DISTRIBUTED) == 1


@pytest.mark.parametrize("snippet", LOCAL)
def test_snippet(snippet):
    exec(compile(snippet, str(README), "exec"), {"__name__": "__main__"})


def test_distributed_snippet(tmp_path):
    script = tmp_path / "my_pipeline.py"
    script.write_text(DISTRIBUTED[0])
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"rank 1: \d+ bytes sent, losses \[\d", run.stdout), run.stdout
