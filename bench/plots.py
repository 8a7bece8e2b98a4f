"""The pictures: times over one size, fractions of the copy, stacks, counted bytes, the pipeline, learning.

Each function takes rows (as the JSON files hold them) and returns a figure, or None where there is nothing to draw.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.tables import number

Row = Mapping[str, Any]

COLORS = {
    "blockres": "#d1495b",
    "blockres, recompute": "#e8a0a9",
    "eager": "#8d99ae",
    "eager formula": "#8d99ae",
    "compiled": "#2b2d42",
    "fla-core": "#00798c",
    "fla-core level 0": "#66b2b2",
    "liger-kernel": "#edae49",
    "flash-attn-res": "#6a994e",
    "fast-attnres": "#7b5ea7",
    "standard": "#b0b0b0",
    "standard, ideally fused": "#d0d0d0",
    "standard, eager add": "#b0b0b0",
}
STYLE = {
    "figure.dpi": 130,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
WHISKERS = {"elinewidth": 0.7, "ecolor": "#444444"}
PIPELINE_COLORS = {"standard": "#8d99ae", "block": "#edae49", "block, cache": "#d1495b"}
SIZES = {"sources": "sources N", "tokens": "tokens T", "dim": "hidden size D"}


def color(name: str) -> str:
    return COLORS.get(name, "#555555")


def figure(rows: int, columns: int, size: tuple[float, float], title: str, foot: Sequence[str], **options: Any):
    """Axes in a grid, a title above, and below a line each: baseline and spread, hardware and versions."""
    plt.rcParams.update(STYLE)
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    lines = [textwrap.fill(text, int(20 * size[0])) for text in foot]
    fig.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color="#666666")
    return fig, axes


def over_sizes(rows: Sequence[Row], foot: str) -> Figure | None:
    """Times of `attn_res`, one column of panels for each size that was swept, one row for each direction."""
    rows = [row for row in rows if row["suite"] == "operations" and row["operation"] == "attn_res"]
    sweeps = {size: _sweep(rows, size) for size in SIZES}
    sweeps = {size: found for size, found in sweeps.items() if len({row[size] for row in found}) > 2}
    if not sweeps:
        return None
    dtype = max(dict.fromkeys(row["dtype"] for row in rows), key=lambda d: sum(row["dtype"] == d for row in rows))
    note = "bands: quartiles; dashed: a copy of as many bytes as have to be moved, in the same minutes"
    fig, axes = figure(
        2, len(sweeps), (3.6 * len(sweeps), 5.6), f"One aggregation, {dtype}", (note, foot), sharey="row"
    )
    for i, (size, found) in enumerate(sweeps.items()):
        for j, direction in enumerate(("forward", "backward")):
            panel = [row for row in found if row["dtype"] == dtype and row["direction"] == direction]
            if not panel:
                axes[j][i].set_visible(False)
                continue
            _lines(axes[j][i], panel, size)
            fixed = {other: panel[0][other] for other in SIZES if other != size}
            where = ", ".join(f"{SIZES[other][-1]} = {value}" for other, value in fixed.items())
            axes[j][i].set_title(f"{direction}, {where}")
            axes[j][i].set_xlabel(SIZES[size])
        axes[0][0].set_ylabel("ms")
        axes[1][0].set_ylabel("ms")
    _legend(fig, axes[0][0])
    return fig


def _sweep(rows: Sequence[Row], size: str) -> list[Row]:
    """The rows in which the other two sizes have their most frequent values."""
    for other in SIZES:
        if other != size and rows:
            values = [row[other] for row in rows]
            frequent = max(dict.fromkeys(values), key=values.count)
            rows = [row for row in rows if row[other] == frequent]
    return list(rows)


def _lines(axes: Axes, rows: Sequence[Row], size: str) -> None:
    for name in dict.fromkeys(row["implementation"] for row in rows):
        by_size = {row[size]: row for row in rows if row["implementation"] == name}
        own = [by_size[x] for x in sorted(by_size)]
        x, y = [row[size] for row in own], [row["median"] * 1e3 for row in own]
        width = 2.4 if name == "blockres" else 1.5
        axes.plot(x, y, "o-", color=color(name), label=name, linewidth=width, markersize=4)
        low = [row["q1"] * 1e3 for row in own]
        axes.fill_between(x, low, [row["q3"] * 1e3 for row in own], color=color(name), alpha=0.15, linewidth=0)
    copies = {row[size]: row["bytes"] / row["copy_gb_per_s"] / 1e6 for row in rows}
    at = sorted(copies)
    axes.plot(at, [copies[x] for x in at], "--", color="#999999", linewidth=1, label="copy of the same bytes")
    _logarithmic(axes, sorted({row[size] for row in rows}))


def _logarithmic(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(fig: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside center right", frameon=False, fontsize=8)


def fractions(rows: Sequence[Row], foot: str) -> Figure | None:
    """How much of the copy bandwidth each operation reaches, at the shape that most rows have."""
    rows = [row for row in rows if row["suite"] == "operations"]
    if not rows:
        return None
    shapes = [tuple(row[size] for size in SIZES) for row in rows]
    shape = max(dict.fromkeys(shapes), key=shapes.count)
    rows = [row for row, own in zip(rows, shapes, strict=True) if own == shape]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    title = "Bandwidth as a fraction of a copy's"
    note = (
        "by the bytes that have to be moved; dashed: the copy, taken in turn with what is measured; "
        "whiskers: half of the distance of the quartiles"
    )
    fig, axes = figure(1, len(dtypes), (4.4 * len(dtypes) + 1, 5.2), title, (note, foot), sharey=True)
    for panel, dtype in zip(axes[0], dtypes, strict=True):
        own = [row for row in rows if row["dtype"] == dtype]
        labels = list(dict.fromkeys(f"{row['operation']}\n{row['direction']}" for row in own))
        _grouped(panel, own, labels, lambda row: f"{row['operation']}\n{row['direction']}", "fraction_of_copy")
        panel.axvline(1, color="#999999", linestyle="--", linewidth=1)
        panel.set_title(f"{dtype}, N = {shape[0]}, T = {shape[1]}, D = {shape[2]}")
    _legend(fig, axes[0][0])
    return fig


def _grouped(axes: Axes, rows: Sequence[Row], labels: Sequence[str], label: Callable[[Row], str], value: str) -> None:
    """Horizontal bars, one group for each label, one bar for each implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        own = {label(row): row for row in rows if row["implementation"] == name}
        at = [j + (i - (len(names) - 1) / 2) * height for j, text in enumerate(labels) if text in own]
        values = [own[text][value] for text in labels if text in own]
        spreads = [own[text]["spread"] * own[text][value] / 2 for text in labels if text in own]
        bars = axes.barh(at, values, height * 0.92, xerr=spreads, color=color(name), label=name, error_kw=WHISKERS)
        axes.bar_label(bars, fmt=lambda x: number(x, 2), padding=2, fontsize=7, color="#444444")
    _names_down(axes, labels)


def _names_down(axes: Axes, names: Sequence[str]) -> None:
    """Names beside horizontal bars, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def stacks(rows: Sequence[Row], foot: str) -> Figure | None:
    """Time of a whole training stack by implementation, forward and backward on top of each other."""
    rows = [row for row in rows if row["suite"] == "stacks"]
    if not rows:
        return None
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    shape = rows[0]
    title = f"A stack of {shape['sublayers']} sublayers, {shape['per_block']} per block, between free sublayers"
    note = "`standard`: the residual that is replaced, with its norms; whiskers: half of the distance of the quartiles"
    fig, axes = figure(1, len(dtypes), (4.4 * len(dtypes) + 0.6, 3.2), title, (note, foot))
    for panel, dtype in zip(axes[0], dtypes, strict=True):
        _stacked(panel, [row for row in rows if row["dtype"] == dtype])
        panel.set_title(f"{dtype}, T = {shape['tokens']}, D = {shape['dim']}")
        panel.set_xlabel("ms, forward (dark) + backward (light)")
    return fig


def _stacked(axes: Axes, rows: Sequence[Row]) -> None:
    times: dict[str, dict[str, float]] = {}
    whiskers: dict[str, float] = {}
    for row in rows:
        times.setdefault(row["implementation"], {})[row["direction"]] = row["median"] * 1e3
        whiskers[row["implementation"]] = row["median"] * row["spread"] * 1e3 / 2
    names = sorted(times, key=lambda name: sum(times[name].values()))
    for j, name in enumerate(names):
        forward, backward = (times[name].get(direction, 0.0) for direction in ("forward", "backward"))
        axes.barh(j, forward, 0.7, color=color(name))
        bar = axes.barh(j, backward, 0.7, left=forward, color=color(name), alpha=0.55)
        axes.errorbar(forward + backward, j, xerr=whiskers[name], **WHISKERS)
        axes.bar_label(bar, [f"{forward + backward:.3g}"], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    _names_down(axes, names)


def cpu(rows: Sequence[Row], foot: str) -> Figure | None:
    """Forward and backward of one aggregation on a CPU, by the number of threads and the allocator's setting."""
    cases = list(dict.fromkeys((row["allocator"], row["threads"]) for row in rows))
    if not cases:
        return None
    allocators, threads = (list(dict.fromkeys(part)) for part in zip(*cases, strict=True))
    title = "One aggregation over 8 sources of width 1024 on a CPU, forward and backward"
    note = (
        "in turns; whiskers: half of the distance of the quartiles; "
        "allocator: glibc gives freed memory back (default) or keeps it (keep)"
    )
    size = (4.6 * len(threads) + 0.8, 0.6 + 3.0 * len(allocators))
    fig, axes = figure(len(allocators), len(threads), size, title, (note, foot), sharex=True)

    def label(row: Row) -> str:
        return f"{row['dtype']}\nT = {row['tokens']}"

    for i, allocator in enumerate(allocators):
        for panel, count in zip(axes[i], threads, strict=True):
            own = [row for row in rows if (row["allocator"], row["threads"]) == (allocator, count)]
            if not own:
                panel.set_visible(False)
                continue
            _grouped(panel, own, list(dict.fromkeys(map(label, own))), label, "ms")
            panel.set_xscale("log")
            panel.margins(x=0.15)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.set_title(f"{count} thread{'s' if count > 1 else ''}, allocator: {allocator}")
            panel.set_xlabel("ms")
    _legend(fig, axes[0][0])
    return fig


def counted(rows: Sequence[Row], foot: str) -> Figure | None:
    """Bytes of a whole stack, counted, in row sets per sublayer."""
    if not rows:
        return None
    shapes = list(dict.fromkeys(row["stack"] for row in rows))
    title = "What a training stack moves, counted: row sets per sublayer, bfloat16"
    note = "counted exactly, so without spread; the standard residual, ideally fused, is the baseline"
    fig, axes = figure(1, len(shapes), (5.2 * len(shapes) + 0.6, 3.6), title, (note, foot))
    for panel, shape in zip(axes[0], shapes, strict=True):
        own = sorted((row for row in rows if row["stack"] == shape), key=lambda row: row["total"])
        for j, row in enumerate(own):
            panel.barh(j, row["forward"], 0.7, color=color(row["implementation"]))
            bar = panel.barh(
                j, row["backward"], 0.7, left=row["forward"], color=color(row["implementation"]), alpha=0.55
            )
            panel.bar_label(bar, [f"{row['total']:.3g}  (keeps {row['kept']:.2g})"], padding=3, fontsize=8)
        panel.margins(x=0.3)
        _names_down(panel, [row["implementation"] for row in own])
        sublayers, per_block = shape.split("x")
        panel.set_title(f"{sublayers} sublayers, {per_block} per block, D = {own[0]['dim']}")
        panel.set_xlabel("forward (dark) + backward (light)")
    return fig


def hop_units(table: Iterable[tuple[int, int, int, int, int, int]], foot: str) -> Figure:
    """Exact units on the wire per microbatch by P and V: `(P, V, total without, with cache, peak without, with)`."""
    rows = list(table)
    fig, axes = figure(1, 2, (9, 3.6), "What travels between pipeline ranks, per microbatch and direction", [foot])
    labels = [f"P {p}, V {v}" for p, v, *_ in rows]
    for panel, first, title in ((axes[0][0], 2, "all hops together"), (axes[0][1], 4, "the largest hop")):
        for shift, column, name, shade in (
            (-0.2, first, "every source, every hop", "#b0b0b0"),
            (0.2, first + 1, "with the block cache", "#d1495b"),
        ):
            bars = panel.bar(
                [i + shift for i in range(len(rows))], [row[column] for row in rows], 0.38, color=shade, label=name
            )
            panel.bar_label(bars, padding=1, fontsize=7)
        panel.set_xticks(range(len(rows)), labels, rotation=40, ha="right")
        panel.set_title(title)
        panel.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("units of [B, T, D]")
    axes[0][0].legend(frameon=False)
    return fig


def pipeline(rows: Sequence[Row], foot: str) -> Figure | None:
    """Simulated: time per step over the number of ranks, and how well they are used, by what travels between them."""
    simulated = [row for row in rows if row["part"] == "simulated"]
    if not simulated:
        return None
    models = list(dict.fromkeys(row["model"] for row in simulated))
    title = f"A step of a fixed model on P pipeline ranks, {simulated[0]['V']} stages each, simulated"
    note = "dotted: one rank's time over P; efficiency 1: no bubble, and nothing waits for the wire"
    size = (3.2 * len(models), 5.4)
    fig, axes = figure(2, len(models), size, title, (note, foot), sharey="row", sharex=True)
    for i, model in enumerate(models):
        own = [row for row in simulated if row["model"] == model]
        _over_ranks(axes[0][i], own, "ms")
        ideal = {row["P"]: row["ms"] * row["efficiency"] for row in own}
        axes[0][i].plot(list(ideal), list(ideal.values()), ":", color="#999999", linewidth=1)
        axes[0][i].set_yscale("log")
        _over_ranks(axes[1][i], own, "efficiency")
        assumed = f"{number(own[0]['ms per sublayer'])} ms a sublayer, {number(own[0]['link GB/s'])} GB/s"
        axes[0][i].set_title(f"{model}\n{assumed}", fontsize=8)
        axes[1][i].set_xlabel("pipeline ranks P")
    axes[0][0].set_ylabel("ms per step")
    axes[1][0].set_ylabel("efficiency T(1) / (P · T(P))")
    axes[1][0].legend(frameon=False, loc="lower left")
    return fig


def _over_ranks(axes: Axes, rows: Sequence[Row], value: str) -> None:
    for variant, shade in PIPELINE_COLORS.items():
        own = [row for row in rows if row["variant"] == variant]
        axes.plot([row["P"] for row in own], [row[value] for row in own], "o-", color=shade, label=variant, ms=4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))


def pipeline_check(rows: Sequence[Row], foot: str) -> Figure | None:
    """Steps of real ranks, whose stages sleep instead of computing, over the simulation of the same."""
    checked = [row for row in rows if row["part"] == "check"]
    if not checked:
        return None
    virtual = sorted({row["V"] for row in checked})
    title = "Stages that sleep, over gloo: real and simulated"
    note = "whiskers: half of the distance of the quartiles; links as fast as measured between ranks 0 and 1"
    fig, axes = figure(1, len(virtual), (3.6 * len(virtual) + 0.8, 3.2), title, (note, foot), sharey=True)
    for panel, count in zip(axes[0], virtual, strict=True):
        for cache, variant in ((False, "block"), (True, "block, cache")):
            own = sorted((r for r in checked if r["V"] == count and r["cache"] == cache), key=lambda row: row["P"])
            at, shade = [row["P"] for row in own], PIPELINE_COLORS[variant]
            panel.plot(at, [row["ms simulated"] for row in own], "-", color=shade, label=f"{variant}, simulated")
            whiskers = [row["ms real"] * row["spread"] / 2 for row in own]
            real = [row["ms real"] for row in own]
            panel.errorbar(at, real, whiskers, fmt="o", color=shade, ms=5, label=f"{variant}, real", elinewidth=0.7)
        _logarithmic(panel, sorted({row["P"] for row in checked}))
        panel.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_title(f"V = {count}")
        panel.set_xlabel("pipeline ranks P")
    axes[0][0].set_ylabel("ms per step")
    _legend(fig, axes[0][0])
    return fig


MEASURED = {
    "tokens/s": "tokens per second",
    "KiB per hop": "KiB per hop",
    "bubble": "bubble, share of the step",
    "peak MiB": "peak MiB of a rank",
}


def pipeline_measured(rows: Sequence[Row], foot: str) -> Figure | None:
    """What real runs over gloo gave, a row of panels for each dtype of the wire."""
    measured = [row for row in rows if row["part"] == "measured"]
    if not measured:
        return None
    wires = list(dict.fromkeys(row["wire"] for row in measured))
    labels = list(dict.fromkeys((row["pp_size"], row["virtual"]) for row in measured))
    note = "the standard residual is the baseline; whiskers: half of the distance of the quartiles of the steps' times"
    size = (12.5, 0.8 + 2.5 * len(wires))
    title = "Pipelined training of a small GPT over gloo on one machine, measured"
    fig, axes = figure(len(wires), len(MEASURED), size, title, (note, foot), sharey="col")
    for i, wire in enumerate(wires):
        for panel, (key, name) in zip(axes[i], MEASURED.items(), strict=True):
            _by_ranks_and_stages(panel, [row for row in measured if row["wire"] == wire], labels, key)
            panel.set_title(name if i == 0 else "")
        axes[i][0].set_ylabel(f"{wire} wire")
    _legend(fig, axes[0][0])
    return fig


def _by_ranks_and_stages(axes: Axes, rows: Sequence[Row], labels: Sequence[tuple[int, int]], value: str) -> None:
    """Bars by variant for each number of ranks and of stages on each."""
    for i, (variant, shade) in enumerate(PIPELINE_COLORS.items()):
        own = {(row["pp_size"], row["virtual"]): row for row in rows if row["variant"] == variant}
        found = [own[label] for label in labels if label in own]
        at = [j + 0.27 * (i - 1) for j, label in enumerate(labels) if label in own]
        whiskers = [row[value] * row["spread"] / 2 for row in found] if value == "tokens/s" else None
        heights = [row[value] for row in found]
        axes.bar(at, heights, 0.25, yerr=whiskers, color=shade, label=variant, error_kw=WHISKERS)
    axes.set_xticks(range(len(labels)), [f"P {p}\nV {v}" for p, v in labels], fontsize=7)
    axes.grid(axis="x", visible=False)


def learning(rows: Sequence[Row], foot: str) -> Figure | None:
    """Validation loss over steps, the mean of the seeds and their range; the last loss of each; tokens per second."""
    runs = [row for row in rows if row["part"] == "losses"]
    speed = {row["variant"]: row for row in rows if row["part"] == "speed"}
    if not runs:
        return None
    variants = list(dict.fromkeys(row["variant"] for row in runs))
    shades = plt.get_cmap("viridis")([i / max(1, len(variants) - 1) * 0.9 for i in range(len(variants))])
    colors = {v: "#8d99ae" if v == "standard" else shade for v, shade in zip(variants, shades, strict=True)}
    title = f"Learning at equal steps, batches and sublayers; {len({row['seed'] for row in runs})} seeds"
    note = "bands: range of the seeds; points: seeds, bars: their mean; whiskers: half of the distance of the quartiles"
    fig, axes = figure(1, 3, (11, 3.6), title, (note, foot), width_ratios=(1.6, 1, 1))
    for i, variant in enumerate(variants):
        own, shade = [row for row in runs if row["variant"] == variant], colors[variant]
        _loss_curve(axes[0][0], own, shade, variant)
        last = [row["validation"][-1] for row in own]
        axes[0][1].plot(last, [i] * len(last), "o", color=shade, alpha=0.6)
        axes[0][1].plot([sum(last) / len(last)], [i], "|", color=shade, markersize=18, markeredgewidth=2)
        if variant in speed:
            rate, apart = speed[variant]["tokens_per_s"], speed[variant]["spread"]
            bar = axes[0][2].barh(i, rate, 0.6, xerr=rate * apart / 2, color=shade, error_kw=WHISKERS)
            axes[0][2].bar_label(bar, fmt="%.0f", padding=3, fontsize=8)
    axes[0][0].set(title="validation loss", xlabel="step", ylabel="nats per byte")
    axes[0][0].legend(frameon=False)
    for panel, text in ((axes[0][1], "last validation loss"), (axes[0][2], "tokens per second")):
        _names_down(panel, variants)
        panel.set_title(text)
    axes[0][2].margins(x=0.2)
    axes[0][2].set_visible(bool(speed))
    return fig


def _loss_curve(axes: Axes, runs: Sequence[Row], shade: Any, label: str) -> None:
    steps = runs[0]["steps"][1:]  # before the first step all are alike, and far off
    losses = list(zip(*(row["validation"][1:] for row in runs), strict=True))
    axes.plot(steps, [sum(values) / len(values) for values in losses], color=shade, label=label)
    low, high = ([pick(values) for values in losses] for pick in (min, max))
    axes.fill_between(steps, low, high, color=shade, alpha=0.15, linewidth=0)


def huggingface(rows: Sequence[Row], foot: str) -> Figure | None:
    """Tokens per second and peak memory of a training step, by what the residual is."""
    if not rows:
        return None
    note = f"{rows[0]['case']}; the standard residual is the baseline; whiskers: half of the distance of the quartiles"
    fig, axes = figure(1, 2, (9, 2.6), "A training step of a Hugging Face model", (note, foot), sharey=True)
    names = [row["model"] for row in rows]
    for panel, key, title in ((axes[0][0], "tokens/s", "tokens per second"), (axes[0][1], "peak MiB", "peak MiB")):
        for j, row in enumerate(rows):
            apart = row[key] * row["spread"] / 2 if key == "tokens/s" else None
            bar = panel.barh(j, row[key], 0.6, xerr=apart, color=color(row["model"]), error_kw=WHISKERS)
            panel.bar_label(bar, [f"{row[key]:.0f} ({row[key] / rows[0][key]:.2f})"], padding=3, fontsize=8)
        _names_down(panel, names)
        panel.set_title(title)
        panel.margins(x=0.25)
    return fig
