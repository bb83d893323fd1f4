"""Figures of chapter 1: where states are read, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from draftlayers.figures.style import BLACK, BLUE, GREY, SKY, VERMILION, legend, subplots

PER_LINE = 10  # boundaries that fit side by side


def boundary_diagram(n_layers: int, marked: Sequence[int]) -> Figure:
    """The residual stream as a line through the layers, with its boundaries numbered.

    The ends and ``marked`` are drawn, the others left out; a long stream goes on below.
    """
    ends = {0, 1, 2, n_layers - 1, n_layers}
    shown = sorted(b for b in {*ends, *marked} if 0 <= b <= n_layers)
    n_lines = -(-len(shown) // PER_LINE)
    per_line = -(-len(shown) // n_lines)
    figure, axes = subplots(size=(6.4, 0.6 + 1.7 * n_lines))
    axes.set_axis_off()
    for i, b in enumerate(shown):
        x, y = i % per_line, -1.9 * (i // per_line)
        if x == 0:
            last = min(per_line, len(shown) - i) - 1
            axes.plot([-0.9 if i else -0.4, last + 0.4], [y, y], color=GREY, lw=1.2, zorder=0)
        if i and b - shown[i - 1] == 1:
            axes.add_patch(Rectangle((x - 0.78, y - 0.32), 0.56, 0.64, fc="#DCEAF5", ec=BLUE))
            axes.text(x - 0.5, y, f"layer\n{b - 1}", ha="center", va="center", fontsize=7.5)
        elif i:
            axes.text(x - 0.5, y + 0.13, "…", ha="center", va="center", fontsize=13)
        chosen = b in marked
        face, edge = (VERMILION, VERMILION) if chosen else ("white", BLACK)
        axes.plot(x, y, "o", ms=8, color=face, mec=edge, zorder=3)
        weight = "bold" if chosen else "normal"
        axes.text(x, y - 0.52, f"b = {b}", ha="center", va="top", fontsize=8.5, fontweight=weight)
    axes.text(0, 0.45, "embeddings", ha="center", fontsize=8.5)
    axes.text(x, y + 0.45, "before the\nfinal norm", ha="center", fontsize=8.5)
    axes.set_xlim(-0.95 if n_lines > 1 else -0.75, per_line - 0.25)
    axes.set_ylim(y - 0.95, 0.95)
    return figure


def layer_norms(
    median: np.ndarray, low: np.ndarray, high: np.ndarray, largest: np.ndarray
) -> Figure:
    """Norms of the residual stream at each boundary: arrays ``[N+1]``, on a logarithmic scale."""
    figure, axes = subplots()
    boundaries = np.arange(len(median))
    axes.fill_between(boundaries, low, high, color=SKY, alpha=0.4, lw=0, label="10 to 90 percent")
    axes.plot(boundaries, median, color=BLUE, label="median position")
    axes.plot(boundaries, largest, color=VERMILION, ls="--", label="largest position")
    axes.set_yscale("log")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("norm of the residual stream")
    legend(axes)
    return figure


def sink_map(ratio: np.ndarray) -> Figure:
    """Norm of the first positions over the boundary's median: array ``[N+1, positions]``.

    A position that no conversation has is NaN and stays white.
    """
    figure, axes = subplots(size=(6.4, 4.2))
    powers = np.log10(np.where(ratio > 0, ratio, np.nan))
    image = axes.imshow(powers, origin="lower", aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("position in the conversation")
    axes.set_ylabel("boundary b")
    figure.colorbar(image).set_label("norm / median norm (powers of ten)")
    return figure
