"""Every figure of the book, drawn from arrays.

A function here takes plain arrays or tensors and returns a matplotlib ``Figure``; it computes
no statistic, reads no file and shows nothing. ``use_style`` is the one place that decides how
figures look; ``Run.save_figure`` writes them.
"""

from __future__ import annotations

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

# --- Chapter 02: entropy -----------------------------------------------------------------------

# --- Chapter 03: token filtering ---------------------------------------------------------------

# --- Chapter 04: CKA ---------------------------------------------------------------------------

# --- Chapter 05: selection ---------------------------------------------------------------------

# --- Chapter 06: draft head --------------------------------------------------------------------

# --- Chapter 07: speedup -----------------------------------------------------------------------
