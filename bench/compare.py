"""What has become slower or faster since a stored run: times as ratios to the copy of the same run.

    python -m bench.compare runs/baseline.json                         # run the suite now; exit 1 if slower
    python -m bench.compare runs/baseline.json --new runs/times.json   # compare two saved runs
    python -m bench.compare runs/baseline.json -- --implementation blockres --dtype bfloat16

Where there is no baseline yet, this run becomes it. A case has moved where its ratio has changed by more than the
spreads of both runs, times and copies, put together; cases that only one run has are listed. Bytes, launches and saved
memory need no such guard: the tests hold them exactly.

Compare runs of the same selection: on a CPU the state of the allocator, and with it a time, depends on what ran before.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import markdown

LEAST = 0.05
"""A change below this is not worth a line, however steady the machine was."""


@dataclass(frozen=True)
class Change:
    """Of one case: the time in copies, now over then, and by how much that can differ without meaning anything."""

    name: str
    ratio: float
    allowed: float

    @property
    def moved(self) -> bool:
        return abs(math.log(self.ratio)) > math.log1p(self.allowed)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Of all cases that both have, the ones that became slower first."""
    before, after = _by_name(then), _by_name(now)
    found = [_change(name, before[name], after[name]) for name in before if name in after]
    return sorted(found, key=lambda change: -change.ratio)


def _by_name(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {benchmark["name"]: benchmark["extra_info"] for benchmark in run["benchmarks"]}


def _change(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Change:
    spreads = [run[key] for run in (then, now) for key in ("spread", "copy_spread")]
    allowed = max(LEAST, math.hypot(*spreads))
    return Change(name, then["fraction_of_copy"] / now["fraction_of_copy"], allowed)


def report(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    found = changes(then, now)
    moved = [change for change in found if change.moved]
    rows = [(change.name, f"{change.ratio:.2f}", f"±{change.allowed:.0%}") for change in moved]
    lines = [f"{len(found)} cases compared, {len(moved)} moved by more than the spread"]
    if rows:
        lines.append(markdown(("case", "now / then, in copies", "spread"), rows))
    before, after = _by_name(then).keys(), _by_name(now).keys()
    lines += [f"only then: {name}" for name in sorted(before - after)]
    lines += [f"only now: {name}" for name in sorted(after - before)]
    return "\n\n".join(lines)


def _run_suite(out: Path, options: Sequence[str]) -> None:
    suite = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", str(suite), "--benchmark-only", f"--benchmark-json={out}", *options]
    subprocess.run(command, check=True, cwd=suite.parent)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--new", type=Path, help="a saved run; by default the suite runs now")
    parser.add_argument("suite", nargs="*", help="options for the suite, after --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        new = options.new or Path(folder, "times.json")
        if options.new is None:
            _run_suite(new, options.suite)
        if not options.baseline.exists():
            options.baseline.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new, options.baseline)
            print(f"no baseline so far: {options.baseline} is it from now on")
            return 0
        then, now = (json.loads(path.read_text()) for path in (options.baseline, new))
    print(report(then, now))
    return int(any(change.moved and change.ratio > 1 for change in changes(then, now)))


if __name__ == "__main__":
    sys.exit(main())
