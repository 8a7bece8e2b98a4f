"""From saved JSON to a markdown report with tables and plots.

    pytest bench --benchmark-only --benchmark-json=runs/times.json
    python -m bench.stack --implementation all --json runs/stack.json
    python -m bench.report runs/*.json --out runs/report

Takes what pytest-benchmark saves and what the scripts in this folder write with --json; several files of a kind go into
one table. Each table and plot names its hardware, its versions, its baseline and its spread.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import cpu, environment, learned, plots, times
from bench.tables import markdown, number

Row = dict[str, Any]


class Results:
    """Rows by the kind of file that they come from, each with the environment it was measured in."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self.environments: dict[str, dict[str, Any]] = {}
        self.not_timed: dict[str, str] = {}

    def load(self, path: Path) -> None:
        """Add a file.

        Raises:
            ValueError: where it is neither pytest-benchmark's JSON nor one that a script of this folder wrote.
        """
        data = json.loads(path.read_text())
        if "benchmarks" in data:
            self.rows["times"] += [times.row_of(benchmark) for benchmark in data["benchmarks"]]
            self.environments["times"] = data["machine_info"]["blockres_bench"]
            self.not_timed |= data.get("not_timed", {})
        elif {"kind", "environment", "rows"} <= data.keys():
            self.rows[data["kind"]] += data["rows"]
            self.environments[data["kind"]] = data["environment"]
        else:
            raise ValueError(f"{path} is neither from pytest-benchmark nor from a script of bench: {sorted(data)}")

    def foot(self, kind: str) -> str:
        return environment.summary(self.environments[kind]) if kind in self.environments else ""


def _plain_table(rows: Sequence[Row]) -> str:
    """All columns that hold plain values, as they are; those that a row does not have stay empty there."""
    plain = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, str | int | float))
    columns = [key for key in plain if key not in ("part", "said")]
    return markdown(columns, [[_cell(key, row.get(key, "")) for key in columns] for row in rows])


def _cell(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0%}" if key == "spread" else number(value)


def _table_of_a_case(rows: Sequence[Row]) -> str:
    """What all rows have in common once, above them."""
    return f"{rows[0]['case']}\n\n" + _plain_table([{k: v for k, v in row.items() if k != "case"} for row in rows])


def _tables_by_part(rows: Sequence[Row]) -> str:
    parts = dict.fromkeys(row["part"] for row in rows)
    return "\n\n".join(f"### {part}\n\n" + _plain_table([r for r in rows if r["part"] == part]) for part in parts)


@dataclass(frozen=True)
class Section:
    """What becomes of the rows of one kind; `note` tells the baseline and the spread."""

    title: str
    table: Callable[[Sequence[Row]], str]
    drawings: tuple[str, ...] = ()
    note: str = ""


SECTIONS = {
    "times": Section(
        "Times",
        times.table,
        ("over_sizes", "fractions", "stacks"),
        "`copies`: how many times as long as a copy, taken in turn with it, of as many bytes as have to be moved (1 is "
        "the floor). `of eager`: the time over that of the textbook formula in eager PyTorch. `error`: the worst "
        "relative error against float64.",
    ),
    "device": Section(
        "On a GPU",
        _tables_by_part,
        note="`fraction_of_copy`: of the bandwidth of a copy of 1 GiB in the same minutes, by what has to be moved.",
    ),
    "stack": Section(
        "A training stack, counted",
        _plain_table,
        ("counted",),
        "Row sets `[T, D]` per sublayer; the standard residual is the baseline. Counted, so without spread.",
    ),
    "traffic": Section(
        "Single calls, counted",
        _plain_table,
        note="Row sets `[T, D]` per call, beside the floor. Counted, so without spread.",
    ),
    "resources": Section(
        "Kernels compiled for a GPU that is not here",
        _plain_table,
        note="Registers of a thread; bytes that a thread spills; accesses of vectors that are less than 16 bytes wide. "
        "Of a package's own configurations the first that does not spill, or the one that spills least.",
    ),
    "cpu": Section(
        "CPU",
        cpu.table,
        ("cpu",),
        "Implementations and a copy of the sources in turns. `copies`: forward and backward over that copy. `peak`: "
        "the most resident memory over inputs, outputs, gradients and saved statistics.",
    ),
    "huggingface": Section(
        "A Hugging Face model", _table_of_a_case, ("huggingface",), "In turns; the standard residual is the baseline."
    ),
    "pipeline": Section(
        "Pipeline",
        _tables_by_part,
        ("pipeline_measured", "pipeline_check", "pipeline"),
        "Measured: real training over gloo on this machine. Check: real ranks whose stages sleep, against the "
        "simulation. Simulated: from compute times and a link that are stated. The standard residual is the baseline.",
    ),
    "learning": Section(
        "Learning",
        learned.table,
        ("learning",),
        "Mean and range of the seeds; `over standard` is the mean of the differences seed by seed. Tokens per second "
        "were taken in turns.",
    ),
}
SPREAD = "Spread: the distance of the quartiles over the median."


def write(results: Results, out: Path) -> Path:
    """Write `report.md` and the plots into `out`, and return the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    parts = ["# Benchmarks of blockres", SPREAD]
    for kind, section in SECTIONS.items():
        rows, foot = results.rows.get(kind), results.foot(kind)
        if not rows:
            continue
        parts += [f"## {section.title}", foot, section.note]
        for name in section.drawings:
            figure = getattr(plots, name)(rows, foot)
            if figure is not None:
                figure.savefig(out / f"{name}.png")
                parts.append(f"![{name}]({name}.png)")
        parts.append(section.table(rows))
    parts += [f"- not timed: {name}: {reason}" for name, reason in results.not_timed.items()]
    plots.hop_units(_hops(), "exact, from the routing; blocks are as long as stages").savefig(out / "hop_units.png")
    parts += ["## Units between pipeline ranks", "![hop_units](hop_units.png)"]
    path = out / "report.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _hops() -> list[tuple[int, int, int, int, int, int]]:
    from blockres.pipeline.routing import BlockRouting

    rows = []
    for p, v in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)):
        routing = BlockRouting([1] * (p * v), 1, p)
        without, cached = (routing.hop_units(cache=cache) for cache in (False, True))
        rows.append((p, v, sum(without), sum(cached), max(without), max(cached)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/report"))
    options = parser.parse_args(arguments)
    results = Results()
    for path in options.files:
        results.load(path)
    print(write(results, options.out))


if __name__ == "__main__":
    main()
