"""Figures of chapter 5: all sets of layers, and which one is chosen how surely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from draftlayers.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    legend,
    marker,
    subplots,
)

SCATTERED = 5000  # more sets than this are counted in hexagons
RULES = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, BLACK)  # the first is the chosen set's
LINES = (BLACK, BLUE, GREEN, VERMILION)


def entropy_cka_plane(
    entropy: np.ndarray,
    diversity: np.ndarray,
    marked: Mapping[str, tuple[float, float]],
    levels: Sequence[float],
) -> Figure:
    """All sets of layers in the plane of the two criteria.

    entropy and diversity ``[sets]``; marked: name to (entropy, diversity), names of one place share
    a marker; levels: scores whose curves entropy x diversity = score are drawn.
    """
    figure, axes = subplots(size=(6.4, 4.4))
    if len(entropy) <= SCATTERED:
        axes.plot(entropy, diversity, ".", ms=3, color="#9A9A9A", alpha=0.5, mew=0)
    else:
        cloud = axes.hexbin(entropy, diversity, gridsize=45, bins="log", cmap="Greys", lw=0)
        figure.colorbar(cloud).set_label("sets")
    by_place: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in marked.items():
        by_place.setdefault((round(x, 6), round(y, 6)), []).append(name)
    for i, (place, names) in enumerate(by_place.items()):
        size = max(6, 12 - i)  # so that a marker behind another can be seen
        axes.plot(*place, marker(i), color=RULES[i % len(RULES)], ms=size, mec="white", mew=0.8,
                  ls="none", label=", ".join(names))  # fmt: skip
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    if high > 0:
        grid = np.linspace(max(low, 1e-3 * high), high, 200)
        for level in dict.fromkeys(levels):
            axes.plot(grid, level / grid, color=GREY, lw=0.8, ls="--", zorder=1)
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    axes.set_xlabel("entropy of the set (share of the largest)")
    axes.set_ylabel("diversity, 1 - largest CKA of a pair")
    legend(figure, loc="outside lower center", ncols=2)
    return figure


def inclusion_bars(inclusion: np.ndarray, chosen: Sequence[int], default: Sequence[int]) -> Figure:
    """How often bootstrap replicates choose each boundary: ``[N+1]`` shares."""
    figure, axes = subplots(size=(6.4, 3.2))
    boundaries = np.arange(len(inclusion))
    colours = [VERMILION if b in chosen else SKY for b in boundaries]
    axes.bar(boundaries, inclusion, color=colours, width=0.8)
    axes.bar([0], [0], color=VERMILION, label="chosen on all sequences")
    if len(default):
        axes.plot(list(default), [-0.05] * len(default), "^", color=BLACK, ms=7, clip_on=False,
                  label="default rule")  # fmt: skip
    axes.set_ylim(-0.09, 1.02)
    axes.set_xlabel("boundary b")
    axes.set_ylabel("share of replicates")
    legend(figure, loc="outside upper right", ncols=2)
    return figure


def score_distribution(scores: np.ndarray, marked: Mapping[str, float], total: int) -> Figure:
    """Scores of all sets as a histogram, with some sets marked: ``[sets]``.

    Sets whose lines would lie on each other share one, and both names.
    """
    figure, axes = subplots(size=(6.4, 3.2))
    sns.histplot(scores, bins=60, ax=axes, color=SKY, alpha=1, linewidth=0, legend=False)
    everything = np.append(scores, list(marked.values()))
    apart = 0.005 * np.ptp(everything)  # the width of a line on the page
    groups: list[tuple[float, list[str]]] = []
    for name, score in sorted(marked.items(), key=lambda item: item[1]):
        if groups and score - groups[-1][0] <= apart:
            groups[-1][1].append(name)
        else:
            groups.append((score, [name]))
    for i, (score, names) in enumerate(groups):
        axes.axvline(score, color=LINES[i % len(LINES)], ls="--", label=", ".join(names))
    axes.set_xlabel("score, entropy x diversity")
    axes.set_ylabel(f"sets (of {total:,})")
    legend(figure, loc="outside upper right", ncols=3)
    return figure
