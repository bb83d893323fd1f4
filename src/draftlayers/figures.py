"""Every figure of the book, drawn from arrays.

A function here takes plain arrays or tensors and returns a matplotlib ``Figure``; it computes
no statistic, reads no file and shows nothing. ``use_style`` is the one place that decides how
figures look; ``Run.save_figure`` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with every common colour-vision deficiency.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
GREY = "#6B6B6B"


def use_style() -> None:
    """Set the book's figure style for this process."""
    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 3.8),
            "figure.dpi": 150,
            "savefig.dpi": 150,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "axes.prop_cycle": mpl.cycler(color=PALETTE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E3E3E3",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "font.size": 10,
            "axes.titlesize": 10.5,
            "axes.labelsize": 10,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "image.cmap": "cividis",
            "svg.hashsalt": "draftlayers",
            "svg.fonttype": "path",
        }
    )


# --- Chapter 01: hidden states -----------------------------------------------------------------


def boundary_diagram(n_layers: int, marked: Sequence[int]) -> Figure:
    """The residual stream as a line through the layers, with its boundaries numbered."""
    shown = sorted({0, 1, 2, *marked, n_layers - 1, n_layers})
    figure, axes = plt.subplots(figsize=(6.4, 2.3))
    axes.set_axis_off()
    places: dict[int, float] = {}
    x = 0.0
    for i, b in enumerate(shown):
        if i:
            gap = b - shown[i - 1]
            if gap == 1:
                axes.add_patch(plt.Rectangle((x + 0.22, -0.32), 0.56, 0.64, fc="#DCEAF5", ec=BLUE))
                axes.text(x + 0.5, 0, f"layer\n{b - 1}", ha="center", va="center", fontsize=7.5)
            else:
                axes.text(x + 0.5, 0.13, "…", ha="center", va="center", fontsize=13)
            x += 1
        places[b] = x
    axes.plot([-0.4, x + 0.4], [0, 0], color=GREY, lw=1.2, zorder=0)
    for b, place in places.items():
        chosen = b in marked
        axes.plot(place, 0, "o", ms=8, color=VERMILION if chosen else "white", mec=VERMILION if
                  chosen else BLACK, zorder=3)  # fmt: skip
        weight = "bold" if chosen else "normal"
        axes.text(place, -0.52, f"b = {b}", ha="center", va="top", fontsize=8.5, fontweight=weight)
    axes.text(0, 0.45, "embeddings", ha="center", fontsize=8.5)
    axes.text(x, 0.45, "before the\nfinal norm", ha="center", fontsize=8.5)
    axes.set_xlim(-0.75, x + 0.75)
    axes.set_ylim(-0.95, 0.95)
    return figure


def layer_norms(
    median: np.ndarray, low: np.ndarray, high: np.ndarray, largest: np.ndarray
) -> Figure:
    """Norms of the residual stream at each boundary: arrays ``[N+1]``, on a logarithmic scale."""
    figure, axes = plt.subplots()
    boundaries = np.arange(len(median))
    axes.fill_between(boundaries, low, high, color=SKY, alpha=0.4, lw=0, label="10 to 90 percent")
    axes.plot(boundaries, median, color=BLUE, label="median position")
    axes.plot(boundaries, largest, color=VERMILION, ls="--", label="largest position")
    axes.set_yscale("log")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("norm of the residual stream")
    axes.legend()
    return figure


def sink_map(ratio: np.ndarray) -> Figure:
    """Norm of the first positions over the boundary's median: array ``[N+1, positions]``."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    image = axes.imshow(
        np.log10(ratio), origin="lower", aspect="auto", interpolation="nearest", cmap="cividis"
    )
    axes.grid(False)
    axes.set_xlabel("position in the conversation")
    axes.set_ylabel("boundary b")
    bar = figure.colorbar(image)
    bar.set_label("norm / median norm (powers of ten)")
    return figure


# --- Chapter 02: entropy -----------------------------------------------------------------------

# --- Chapter 03: token filtering ---------------------------------------------------------------

# --- Chapter 04: CKA ---------------------------------------------------------------------------

# --- Chapter 05: selection ---------------------------------------------------------------------

# --- Chapter 06: draft head --------------------------------------------------------------------

# --- Chapter 07: speedup -----------------------------------------------------------------------
