"""Rows of timed operations and stacks, as the suite measures them and pytest-benchmark's JSON keeps them."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.tables import markdown, number

Row = Mapping[str, Any]


def row_of(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """From one entry of pytest-benchmark's JSON; `q1` and `q3` are the quartiles of the seconds."""
    return benchmark["extra_info"] | {quartile: benchmark["stats"][quartile] for quartile in ("q1", "q3")}


def table(rows: Sequence[Row]) -> str:
    """One line for each case and implementation.

    `copies` is the time over that of a copy of as many bytes as have to be moved.
    """
    header = ("operation", "implementation", "ms", "GB/s", "copies", "of eager", "spread", "error")
    eager = {_case(row): row["median"] for row in rows if row["implementation"] == "eager"}
    lines = []
    for row in rows:
        base = eager.get(_case(row))
        lines.append(
            (
                " ".join(_case(row)),
                row["implementation"],
                number(row["median"] * 1e3),
                number(row["gb_per_s"]),
                number(1 / row["fraction_of_copy"]),
                "-" if base is None else f"{row['median'] / base:.2f}",
                f"{row['spread']:.0%}",
                f"{row['error']:.0e}",
            )
        )
    return markdown(header, lines)


def _case(row: Row) -> tuple[str, ...]:
    operations, stacks = ("sources", "tokens", "dim"), ("sublayers", "per_block", "tokens", "dim")
    sizes = operations if row["suite"] == "operations" else stacks
    return row["operation"], row["direction"], row["dtype"], "x".join(str(row[size]) for size in sizes)
