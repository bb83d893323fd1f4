"""Figures of chapter 3: how certain the target is, and what leaving positions out changes."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from draftlayers.figures.style import BLACK, BLUE, SKY, VERMILION, legend, subplots

FLOOR = 1e-4  # nats; what is more certain is counted here, on an axis that knows no zero


def predictive_entropies(entropy: np.ndarray, cut: float | None) -> Figure:
    """How uncertain the target is: histogram on a logarithmic scale and share above, side by side.

    entropy ``[n]`` in nats; ``cut`` marks the threshold in use, None says that all are kept.
    """
    figure, (left, right) = subplots(1, 2, size=(6.4, 3.2))
    shown = np.clip(entropy, FLOOR, None)
    edges = np.geomspace(FLOOR, max(shown.max(initial=0), 10 * FLOOR), 41)
    sns.histplot(shown, bins=edges, ax=left, color=BLUE, alpha=1, linewidth=0, legend=False)
    left.set_xscale("log")
    left.set_xlabel("predictive entropy (nats)")
    left.set_ylabel("positions")
    ordered = np.sort(shown)[::-1]
    right.plot(np.arange(1, len(ordered) + 1) / max(1, len(ordered)), ordered, color=BLUE)
    right.set_xlabel("share of positions kept")
    right.set_ylabel("entropy of the last one kept (nats)")
    if cut is not None:
        left.axvline(max(cut, FLOOR), color=VERMILION, ls="--")
        right.axhline(max(cut, FLOOR), color=VERMILION, ls="--")
    return figure


def stability_curve(
    shares: np.ndarray,
    shift: np.ndarray,
    error: np.ndarray,
    inclusion: np.ndarray,
    chosen: Sequence[Sequence[int]],
    used: float,
) -> Figure:
    """What the filter changes, against the share of positions it keeps.

    shares ``[shares]`` rise; shift and error ``[shares]``: largest movement of CKA and its standard
    error; inclusion ``[shares, N+1]``: how often replicates choose each boundary; chosen: the
    choice at each share.
    """
    shares, error = np.asarray(shares), np.asarray(error)
    figure, (top, low) = subplots(2, 1, size=(6.4, 5.6), sharex=True, height_ratios=[1, 1.8])
    top.fill_between(shares, 0, 2 * error, color=SKY, alpha=0.4, lw=0, label="2 standard errors")
    top.plot(shares, shift, "o-", color=BLUE, ms=4, label="largest change of any pair")
    top.set_ylabel("change of CKA")
    legend(top, loc="upper right")
    # A cell reaches half way to the next share, and as far on its outer side.
    steps = np.diff(shares) if len(shares) > 1 else np.array([0.1])
    middles = (shares[1:] + shares[:-1]) / 2
    edges = [shares[0] - steps[0] / 2, *middles, shares[-1] + steps[-1] / 2]
    image = low.pcolormesh(edges, np.arange(inclusion.shape[1] + 1) - 0.5, inclusion.T,
                           cmap="Blues", vmin=0, vmax=1)  # fmt: skip
    for x, layers in zip(shares, chosen, strict=True):
        low.plot([x] * len(layers), list(layers), "o", color=VERMILION, ms=4)
    for axes in (top, low):
        axes.axvline(used, color=BLACK, ls="--", lw=1)
    low.grid(False)
    low.set_xlabel("share of positions kept (dashed: in use)")
    low.set_ylabel("boundary b")
    figure.colorbar(image, ax=low).set_label("chosen in replicates (share)")
    return figure


def entropy_by_share(values: np.ndarray, shares: np.ndarray) -> Figure:
    """Entropy of each layer for several shares of positions: ``[shares, N+1]`` of the largest."""
    figure, axes = subplots()
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(shares)))
    for row, share, colour in zip(values, shares, colours, strict=True):
        axes.plot(row, color=colour, label=f"{share:.0%}")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("share of the largest entropy")
    legend(axes, title="positions kept", ncols=2)
    return figure
