"""Figures of chapter 7: how fast decoding is, and what decides it.

``acceptance_rates`` is chapter 6's too, for the rates that a head is estimated to reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from draftlayers.figures.style import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    colour,
    depth_axis,
    legend,
    marker,
    numbers,
    subplots,
)

DASHES = ("-", "--", "-.", ":")


def pass_costs(tokens: Sequence[int], milliseconds: Mapping[str, Sequence[float]]) -> Figure:
    """Time of a target pass against the tokens in it, one line for each way of running it."""
    figure, axes = subplots()
    for i, (name, values) in enumerate(milliseconds.items()):
        axes.plot(tokens, values, color=colour(i), marker=marker(i), ms=5, label=name)
    axes.set_xlabel("new tokens in the pass")
    axes.set_ylabel("time of the pass (ms)")
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def acceptance_rates(rates: Mapping[str, Sequence[float | None]]) -> Figure:
    """Share of guesses accepted at each place of a chain, one line for each head.

    A place that no guess reached has the rate None and no mark.
    """
    figure, axes = subplots()
    longest = max((len(values) for values in rates.values()), default=1)
    for i, (name, values) in enumerate(rates.items()):
        places = np.arange(1, len(values) + 1)
        axes.plot(places, numbers(values), color=colour(i), marker=marker(i), ms=5, label=name)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(1 - 0.05 * longest, longest + 0.05 * longest)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("place j of the guess")
    axes.set_ylabel("acceptance rate $\\alpha_j$")
    legend(axes)
    return figure


def speedups(
    names: Sequence[str],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    tau: Sequence[float],
) -> Figure:
    """Speedup over plain decoding of each method with its interval; τ is written beside it."""
    figure, axes = subplots(size=(6.4, 1.5 + 0.42 * len(names)))
    middle, lower, upper = numbers(values), numbers(low), numbers(high)
    rows = np.arange(len(names))[::-1]
    errors = [np.clip(middle - lower, 0, None), np.clip(upper - middle, 0, None)]
    axes.axvline(1, color=GREY, ls="--", lw=1.2)
    axes.errorbar(middle, rows, xerr=errors, fmt="o", color=BLUE, ms=6, capsize=3, lw=1.6)
    everything = np.concatenate([middle, lower, upper])
    everything = everything[np.isfinite(everything)]
    left, right = min([0.9, *everything]) * 0.95, max([1.1, *everything]) * 1.02
    for row, length in zip(rows, numbers(tau), strict=True):
        if np.isfinite(length):
            axes.text(right, row, f"τ = {length:.2f}", va="center", fontsize=9)
    axes.set_yticks(rows, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(left, right + 0.17 * (right - left) + 0.05)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speedup over plain decoding (dashed: none)")
    return figure


def predicted_speedups(
    predicted: Sequence[float], measured: Sequence[float], kinds: Sequence[str]
) -> Figure:
    """Measured against predicted speedup of each prompt, coloured by the prompt's kind."""
    figure, axes = subplots(size=(6.4, 4.4))
    everything = [*predicted, *measured] or [1.0]
    span = max(everything) - min(everything) or 1.0
    ends = min(everything) - 0.06 * span, max(everything) + 0.06 * span
    axes.plot(ends, ends, color=GREY, ls="--", lw=1.2, label="as predicted")
    for i, kind in enumerate(dict.fromkeys(kinds)):
        chosen = [j for j, other in enumerate(kinds) if other == kind]
        axes.plot([predicted[j] for j in chosen], [measured[j] for j in chosen], marker(i),
                  color=colour(i), ms=6, label=kind)  # fmt: skip
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_xlabel("speedup predicted by the cost model")
    axes.set_ylabel("speedup measured")
    legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def depth_sweep(
    depths: Sequence[int],
    predicted: Sequence[float],
    perfect: Sequence[float],
    measured: Mapping[int, float],
) -> Figure:
    """Speedup against the depth of a chain: predicted, measured, and with perfect guesses."""
    figure, axes = subplots()
    axes.plot(depths, perfect, color=GREEN, ls=":", label="every guess accepted (bound)")
    axes.plot(depths, predicted, color=BLUE, label="predicted from acceptance rates")
    taken = sorted(measured)
    axes.plot(taken, [measured[depth] for depth in taken], "o", color=VERMILION, ms=7,
              label="measured")  # fmt: skip
    depth_axis(axes, depths)
    axes.set_ylabel("speedup over plain decoding")
    legend(axes)
    return figure


def speed_by_kind(
    kinds: Sequence[str], values: Mapping[str, Sequence[float | None]], xlabel: str
) -> Figure:
    """A quantity for each kind of prompt, one marker for each method; None has no marker."""
    figure, axes = subplots(size=(6.4, 1.5 + 0.4 * len(kinds)))
    rows = np.arange(len(kinds))[::-1]
    axes.axvline(1, color=GREY, ls="--", lw=1.2)
    step = min(0.12, 0.8 / max(1, len(values)))
    for i, (name, points) in enumerate(values.items()):
        offset = step * (i - (len(values) - 1) / 2)
        axes.plot(numbers(points), rows - offset, marker(i), color=colour(i), ms=6, label=name)
    axes.set_yticks(rows, kinds)
    axes.set_ylim(-0.6, len(kinds) - 0.4)
    axes.set_xlabel(xlabel)
    legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def device_speedups(depths: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Predicted speedup against the depth of a chain on different devices."""
    figure, axes = subplots()
    for i, (name, values) in enumerate(curves.items()):
        axes.plot(depths, values, color=colour(i), ls=DASHES[i % len(DASHES)], label=name)
    depth_axis(axes, depths)
    axes.set_ylabel("predicted speedup")
    legend(axes)
    return figure
