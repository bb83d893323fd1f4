"""Figures of chapter 2: entropies of layers, and how the definitions agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from draftlayers.figures.style import BLUE, ORANGE, VERMILION, legend, subplots


def layer_entropies(
    shares: np.ndarray, titles: Sequence[str], highlighted: int, marked: Sequence[int] = ()
) -> Figure:
    """Entropy of each layer as a share of its largest value: ``[definitions, N+1]``.

    One small panel for each definition, each with its own range; the definition that the run
    uses is drawn in colour, boundaries ``marked`` by dots.
    """
    count = len(shares)
    size = (6.4, 1.35 * count + 0.5)
    figure, panels = subplots(count, 1, size=size, sharex=True, squeeze=False)
    for i, (axes, values, title) in enumerate(zip(panels[:, 0], shares, titles, strict=True)):
        colour = VERMILION if i == highlighted else BLUE
        axes.plot(values, color=colour)
        axes.plot(list(marked), values[list(marked)], "o", color=colour, ms=5)
        axes.set_title(title, loc="left", fontsize=9.5, color=colour, pad=3)
        axes.margins(y=0.15)
        axes.locator_params(axis="y", nbins=3)
    panels[-1, 0].set_xlabel("boundary b")
    figure.supylabel("share of the largest possible entropy", fontsize=10)
    return figure


def agreement(correlation: np.ndarray, titles: Sequence[str]) -> Figure:
    """Rank correlation of definitions over sets of layers: ``[definitions, definitions]``.

    NaN, a definition that tells no sets apart, stays white.
    """
    figure, axes = subplots(size=(5.6, 4.3))
    sns.heatmap(
        correlation,
        ax=axes,
        cmap="PuOr_r",
        vmin=-1,
        vmax=1,
        annot=True,
        fmt=".2f",
        square=True,
        xticklabels=list(titles),
        yticklabels=list(titles),
        annot_kws={"fontsize": 9},
        cbar_kws={"label": "Spearman's rank correlation"},
    )
    axes.grid(False)
    for label in axes.get_xticklabels():
        label.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="y", rotation=0)
    axes.set_xlabel("definition")
    axes.set_ylabel("definition")
    return figure


def spectrum_with_sinks(without: np.ndarray, with_them: np.ndarray, copies: np.ndarray) -> Figure:
    """Effective number of directions of each layer, ``[N+1]``, for three choices of rows.

    A value that is not positive is no number of directions and leaves a gap.
    """
    figure, axes = subplots()
    curves = np.array([without, with_them, copies], dtype=float)
    curves = np.where(np.isfinite(curves) & (curves > 0), curves, np.nan)
    styles = (
        (BLUE, "-", "rows of the statistics"),
        (ORANGE, "--", "with attention sinks"),
        (VERMILION, ":", "with sinks and copies"),
    )
    for values, (colour, dashes, label) in zip(curves, styles, strict=True):
        axes.plot(values, color=colour, ls=dashes, label=label)
    shown = curves[~np.isnan(curves)]
    if len(shown):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        narrow = shown.max() < 10 * shown.min()  # no power of ten to label
        axes.yaxis.set_minor_formatter("{x:g}" if narrow else "")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("effective number of directions")
    legend(axes)
    return figure
