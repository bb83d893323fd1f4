"""Figures of chapter 4: how alike the states of two boundaries are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from draftlayers.figures.style import BLUE, VERMILION, legend, subplots


def cka_maps(matrices: Sequence[np.ndarray], titles: Sequence[str]) -> Figure:
    """CKA of all pairs of layers, ``[N+1, N+1]``, one heat map beside the other."""
    size = (3.2 * len(matrices) + 0.6, 3.5)
    figure, panels = subplots(1, len(matrices), size=size, squeeze=False)
    for axes, matrix, title in zip(panels[0], matrices, titles, strict=True):
        image = axes.imshow(matrix, origin="lower", vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        axes.set_title(title)
        axes.set_xlabel("boundary b")
    panels[0, 0].set_ylabel("boundary b")
    figure.colorbar(image, ax=list(panels[0]), shrink=0.85).set_label("debiased CKA")
    return figure


def bias_curve(rows: Sequence[int], biased: np.ndarray, debiased: np.ndarray) -> Figure:
    """Mean CKA of pairs against the number of rows: arrays ``[sizes, draws]``."""
    figure, axes = subplots()
    rows = list(rows)
    for values, colour, label in (
        (biased, VERMILION, "biased (plug-in)"),
        (debiased, BLUE, "debiased"),
    ):
        if len(rows):
            axes.plot(rows, values.mean(1), "o-", color=colour, ms=4, label=label)
            axes.fill_between(rows, values.min(1), values.max(1), color=colour, alpha=0.2, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [f"{n:,}" for n in rows])
    axes.minorticks_off()
    axes.set_xlabel("rows (band: range over draws)")
    axes.set_ylabel("mean CKA over pairs of layers")
    legend(axes)
    return figure
