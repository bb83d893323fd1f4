"""How figures look: colours, type, sizes, and how a figure becomes a picture.

Used by every module of figures. What is drawn is left to the modules of the chapters, where
pictures are kept to ``drawing``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

# Okabe and Ito's palette, distinguishable with every common colour-vision deficiency; without its
# yellow, which is hard to see on white.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
GREY = "#6B6B6B"
MARKERS = "os^Dv<>P*X"
SIZE = (6.4, 3.8)  # inches


def use_style() -> None:
    """Set the book's figure style for this process, whatever was set before."""
    mpl.rcdefaults()
    mpl.rcParams.update(
        {
            "figure.figsize": SIZE,
            "figure.dpi": 150,
            "savefig.dpi": 150,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "axes.prop_cycle": cycler(color=PALETTE),
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


def render(figure: Figure) -> dict[str, bytes]:
    """A figure as ``svg`` and ``png``, the same bytes every time."""
    pictures = {}
    for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        file = io.BytesIO()
        figure.savefig(file, format=kind, metadata=metadata)
        pictures[kind] = file.getvalue()
    return pictures


def subplots(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE, **options: Any
) -> tuple[Figure, Any]:
    """A figure that pyplot knows nothing of, and its axes: ``plt.subplots`` without its state."""
    figure = Figure(figsize=size)
    return figure, figure.subplots(rows, columns, **options)


def colour(i: int) -> str:
    """Colour of the i-th of any number of lines."""
    return PALETTE[i % len(PALETTE)]


def marker(i: int) -> str:
    """Marker of the i-th of any number of lines."""
    return MARKERS[i % len(MARKERS)]


def numbers(values: Iterable[float | None]) -> np.ndarray:
    """Values as floats, NaN where there is none: lines have a gap there."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def legend(owner: Axes | Figure, **options: Any) -> None:
    """Add a legend where there is something to name."""
    axes = [owner] if isinstance(owner, Axes) else owner.axes
    if any(one.get_legend_handles_labels()[0] for one in axes):
        owner.legend(**options)


def depth_axis(axes: Axes, depths: Sequence[int]) -> None:
    """The x axis of figures that vary the depth of a chain, with the line of no speedup."""
    axes.axhline(1, color=GREY, ls="--", lw=1.2)
    axes.set_xticks(depths)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("depth of the chain γ (guesses in each pass)")
