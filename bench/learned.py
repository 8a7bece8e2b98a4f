"""The table of what `bench.learning` measures; apart from it, so that a report needs nothing to train with."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.tables import markdown, number


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Last losses by variant: mean and range over the seeds, and the gain over the standard residual, seed by seed."""
    header = ("", "seeds", "last loss", "lowest", "highest", "over standard", "tokens/s", "spread", "parameters")
    last = {(row["variant"], row["seed"]): row["validation"][-1] for row in rows if row["part"] == "losses"}
    speed = {row["variant"]: row for row in rows if row["part"] == "speed"}
    parameters = {row["variant"]: row["parameters"] for row in rows if row["part"] == "losses"}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        seeds = [seed for own, seed in last if own == variant]
        found = [last[variant, seed] for seed in seeds]
        gains = [last[variant, seed] - last["standard", seed] for seed in seeds if ("standard", seed) in last]
        summary = (f"{statistics.mean(found):.4f}", f"{min(found):.4f}", f"{max(found):.4f}") if found else ("-",) * 3
        timed = speed.get(variant)
        lines.append(
            (
                variant,
                len(seeds),
                *summary,
                f"{statistics.mean(gains):+.4f}" if gains else "-",
                *(("-", "-") if timed is None else (number(timed["tokens_per_s"]), f"{timed['spread']:.0%}")),
                f"{parameters[variant]:,}" if variant in parameters else "-",
            )
        )
    return markdown(header, lines)
