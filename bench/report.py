"""From saved JSON to a markdown report with tables and plots.

    pytest bench --benchmark-only --benchmark-json=runs/times.json
    python -m bench.stack --implementation all --json runs/stack.json
    python -m bench.report runs/*.json --out runs/report

Takes what pytest-benchmark saves and what the scripts in this folder write with --json. Each table names its hardware,
its versions and its baseline; the spread is the distance of the quartiles over the median.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import environment, plots
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
            self.rows["times"] += [_timed_row(benchmark) for benchmark in data["benchmarks"]]
            self.environments["times"] = data["machine_info"]["blockres_bench"]
            self.not_timed |= data.get("not_timed", {})
        elif {"kind", "environment", "rows"} <= data.keys():
            self.rows[data["kind"]] += data["rows"]
            self.environments[data["kind"]] = data["environment"]
        else:
            raise ValueError(f"{path} is neither from pytest-benchmark nor from a script of bench: {sorted(data)}")

    def foot(self, kind: str) -> str:
        return environment.summary(self.environments[kind]) if kind in self.environments else ""


def _timed_row(benchmark: Mapping[str, Any]) -> Row:
    stats = benchmark["stats"]
    return benchmark["extra_info"] | {"seconds": stats["median"], "q1": stats["q1"], "q3": stats["q3"]}


def times_table(rows: Sequence[Row]) -> str:
    header = ("operation", "implementation", "ms", "GB/s", "copies", "of eager", "spread", "error")
    eager = {_case(row): row["seconds"] for row in rows if row["implementation"] == "eager"}
    lines = []
    for row in rows:
        base = eager.get(_case(row))
        lines.append(
            (
                " ".join(str(part) for part in _case(row)),
                row["implementation"],
                number(row["seconds"] * 1e3),
                number(row["gb_per_s"]),
                number(1 / row["fraction_of_copy"]),
                "-" if base is None else f"{row['seconds'] / base:.2f}",
                f"{row['spread']:.0%}",
                f"{row['error']:.0e}",
            )
        )
    return markdown(header, lines)


def _case(row: Row) -> tuple[str, ...]:
    sizes = (
        ("sources", "tokens", "dim") if row["suite"] == "operations" else ("sublayers", "per_block", "tokens", "dim")
    )
    return row["operation"], row["direction"], row["dtype"], "x".join(str(row[size]) for size in sizes)


def _plain_table(rows: Sequence[Row]) -> str:
    """All columns that hold plain values, as they are."""
    columns = [key for key, value in rows[0].items() if isinstance(value, str | int | float)]
    cells = [
        [number(row[key]) if isinstance(row.get(key), float) else str(row.get(key, "")) for key in columns]
        for row in rows
    ]
    return markdown(columns, cells)


def _tables_by_part(rows: Sequence[Row]) -> str:
    parts = dict.fromkeys(row["part"] for row in rows)
    return "\n\n".join(f"### {part}\n\n" + _plain_table([r for r in rows if r["part"] == part]) for part in parts)


SECTIONS: tuple[tuple[str, str, Callable[[Sequence[Row]], str], tuple[str, ...]], ...] = (
    ("times", "Times", times_table, ("over_sizes", "fractions", "stacks")),
    ("device", "On a GPU", _plain_table, ()),
    ("stack", "A training stack, counted", _plain_table, ("counted",)),
    ("traffic", "Single calls, counted", _plain_table, ()),
    ("cpu", "CPU", _plain_table, ("cpu",)),
    ("pipeline", "Pipeline", _tables_by_part, ("pipeline_measured", "pipeline")),
    ("learning", "Learning", _plain_table, ("learning",)),
)
NOTES = {
    "times": (
        "`copies`: how many times as long as a copy of as many bytes as the operation must move (1 is the floor). "
        "`of eager`: the time over that of the textbook formula in eager PyTorch."
    ),
    "stack": "Row sets `[T, D]` per sublayer; the standard residual is the baseline. Counted, so without spread.",
    "traffic": "Row sets `[T, D]` per call. Counted, so without spread.",
}


def write(results: Results, out: Path) -> Path:
    """Write `report.md` and the plots into `out`, and return the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    parts = ["# Benchmarks of blockres"]
    for kind, title, table, drawings in SECTIONS:
        rows = results.rows.get(kind)
        if not rows:
            continue
        parts += [f"## {title}", results.foot(kind), NOTES.get(kind, "")]
        for name in drawings:
            figure = getattr(plots, name)(rows, results.foot(kind))
            if figure is not None:
                figure.savefig(out / f"{name}.png")
                parts.append(f"![{name}]({name}.png)")
        parts.append(table(rows))
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
