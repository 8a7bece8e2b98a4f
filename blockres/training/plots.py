"""The two pictures of a run, drawn where matplotlib is installed (the `plot` extra)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXT, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAIN, VALIDATION = "#9fb3c8", "#0b69a3"


def draw_losses(
    path: Path,
    training: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    baseline: float,
    unit: str,
) -> None:
    """Training and validation losses, pairs of (steps done, nats per `unit`), and the unigram entropy as a line."""
    figure, axes = _canvas((7.2, 4.2))
    axes.plot(*zip(*training, strict=True), color=TRAIN, linewidth=1.2, label="training")
    axes.plot(
        *zip(*validation, strict=True), color=VALIDATION, linewidth=1.8, marker="o", markersize=4, label="validation"
    )
    axes.axhline(baseline, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"unigram entropy {baseline:.2f}", (1, baseline), xycoords=("axes fraction", "data"), xytext=(-4, 4),
        textcoords="offset points", ha="right", color=MUTED, fontsize=9,
    )  # fmt: skip
    last_step, last_loss = validation[-1]
    axes.annotate(
        f"{last_loss:.3f}", (last_step, last_loss), xytext=(0, -14), textcoords="offset points", ha="center",
        color=VALIDATION, fontsize=9,
    )  # fmt: skip
    axes.set_xlabel("steps")
    axes.set_ylabel(f"loss, nats per {unit}")
    axes.set_xlim(0, None)
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")
    _save(figure, path)


def draw_depth_weights(path: Path, weights: np.ndarray, sublayers_per_block: int) -> None:
    """The mean weights `[L + 1, 1 + blocks]` as `DepthWeights.gather` returns them, as a heat map.

    Cells that a sublayer cannot read are empty; the partial sum of the block that is still open is outlined.
    """
    rows, columns = weights.shape
    visible = _readable(rows, columns, sublayers_per_block)
    figure, axes = _canvas((2.6 + 0.62 * columns, 1.6 + 0.3 * rows))
    image = axes.imshow(np.ma.array(weights, mask=~visible), cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    _annotate(axes, weights, visible, sublayers_per_block)
    axes.set_xticks(range(columns), ["emb", *(f"b{n}" for n in range(1, columns))])
    kinds = ("attn", "mlp")
    axes.set_yticks(range(rows), [*(f"{l} {kinds[l % 2]}" for l in range(rows - 1)), "output"])
    axes.xaxis.tick_top()
    axes.set_title("share of each source in what is read, mean over validation tokens", fontsize=10, pad=12, color=TEXT)
    axes.set_xlabel("outlined: partial sum of the open block", fontsize=9, color=MUTED, labelpad=8)
    axes.set_ylabel("sublayer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.04)
    bar.outline.set_visible(False)
    _save(figure, path)


def _readable(rows: int, columns: int, sublayers_per_block: int) -> np.ndarray:
    """Which sources each sublayer sees, the open block's partial sum included, `[rows, columns]`."""
    last = np.arange(rows) // sublayers_per_block + (np.arange(rows) % sublayers_per_block > 0)
    return np.arange(columns)[None] <= last[:, None]


def _annotate(axes: Any, weights: np.ndarray, visible: np.ndarray, sublayers_per_block: int) -> None:
    from matplotlib.patches import Rectangle

    if visible.sum() > 400:
        return
    for row, column in np.argwhere(visible):
        value = weights[row, column]
        axes.text(
            column, row, f"{value:.2f}", ha="center", va="center", fontsize=7.5,
            color="white" if value > 0.55 else TEXT,
        )  # fmt: skip
        if row % sublayers_per_block and column == row // sublayers_per_block + 1:
            axes.add_patch(
                Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor=MUTED, linewidth=0.9)
            )


def _canvas(size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=TEXT)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
