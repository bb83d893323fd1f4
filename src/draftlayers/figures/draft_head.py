"""Figures of chapter 6: what a draft head is, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from draftlayers.figures.style import (
    BLACK,
    GREY,
    PALETTE,
    VERMILION,
    colour,
    legend,
    marker,
    numbers,
    subplots,
)


def head_diagram(layers: Sequence[int]) -> Figure:
    """The draft head: what it reads, its one layer, and the two ways out of it."""
    figure, axes = subplots(size=(6.4, 5.2))
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(0.3, 9.5)

    def box(x: float, y: float, text: str, width: float = 2.3, colour: str = "#DCEAF5") -> None:
        corner = (x - width / 2, y - 0.32)
        axes.add_patch(Rectangle(corner, width, 0.64, fc=colour, ec=BLACK, lw=0.8, zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5, zorder=3)

    def arrow(*points: tuple[float, float], **style: object) -> None:
        x, y = zip(*points, strict=True)
        line = {"color": BLACK, "lw": 1.1, "zorder": 1, **style}
        axes.plot(x[:-1], y[:-1], solid_capstyle="butt", **line)
        tip = {"arrowstyle": "-|>", "color": line["color"], "lw": line["lw"], "shrinkA": 0,
               "shrinkB": 0, "ls": line.get("ls", "-")}  # fmt: skip
        axes.annotate("", (x[-1], y[-1]), (x[-2], y[-2]), arrowprops=tip, zorder=1)

    names = [f"state {b}" for b in layers] if len(layers) <= 4 else [
        f"state {layers[0]}", f"state {layers[1]}", "…", f"state {layers[-1]}"
    ]  # fmt: skip
    width = min(1.5, 5.4 / len(names))
    for i, name in enumerate(names):
        x = 6.6 + (i - (len(names) - 1) / 2) * (width + 0.15)
        box(x, 0.75, name, width, "#FBE3D6")
        arrow((x, 1.07), (6.6 + (x - 6.6) * 0.35, 1.68))
    box(1.9, 0.75, "next token", colour="#FBE3D6")
    box(1.9, 2.0, "embedding")
    box(6.6, 2.0, "fc")
    arrow((1.9, 1.07), (1.9, 1.68))
    arrow((1.9, 2.32), (1.9, 2.88))
    box(1.9, 3.2, "norm")
    box(5.2, 3.2, "norm")
    box(3.5, 4.4, "concatenate", 2.6)
    box(3.5, 5.4, "attention", 2.6)
    arrow((1.9, 3.52), (1.9, 3.8), (2.9, 3.8), (2.9, 4.08))
    arrow((5.2, 3.52), (5.2, 3.8), (4.1, 3.8), (4.1, 4.08))
    arrow((3.5, 4.72), (3.5, 5.08))
    arrow((6.6, 2.32), (6.6, 2.6), (5.2, 2.6), (5.2, 2.88))
    # The residual stream runs on the right, and is never normed.
    for y in (6.2, 8.0):
        ring = {"boxstyle": "circle,pad=0.12", "fc": "white", "ec": BLACK, "lw": 0.8}
        axes.text(6.6, y, "+", ha="center", va="center", fontsize=11, zorder=4, bbox=ring)
    arrow((6.6, 2.6), (6.6, 5.98))
    arrow((3.5, 5.72), (3.5, 6.2), (6.35, 6.2))
    arrow((6.6, 6.42), (6.6, 7.78))
    box(3.5, 7.2, "norm, MLP", 2.6)
    arrow((6.6, 6.65), (3.5, 6.65), (3.5, 6.88))
    arrow((3.5, 7.52), (3.5, 8.0), (6.35, 8.0))
    arrow((6.6, 8.22), (6.6, 8.68))
    box(6.6, 9.0, "norm, lm_head")
    arrow((5.45, 9.0), (3.75, 9.0))
    axes.text(3.65, 9.0, "guess, a token of the\ndraft vocabulary", ha="right", va="center",
              fontsize=8.5)  # fmt: skip
    arrow((6.6, 8.45), (9.3, 8.45), (9.3, 2.6), (6.68, 2.6), color=VERMILION, ls="--")
    axes.text(9.15, 5.4, "next step:\nits own state\ninstead of\nthe target's", ha="right",
              va="center", fontsize=8.5, color=VERMILION)  # fmt: skip
    return figure


def attention_blocks(mask: np.ndarray, steps: int) -> Figure:
    """Who sees whom in the last step of the training-time test.

    mask ``[n, steps * n]``: true where the query at an index (row) sees the key of an index at a
    step (column).
    """
    n = len(mask)
    figure, axes = subplots(size=(6.4, 2.9))
    shade = np.where(mask, 1 + np.repeat(np.arange(steps), n)[None] % len(PALETTE), 0)
    colours = ListedColormap(["white", *PALETTE])
    edges = {"edgecolors": "#CFCFCF", "linewidth": 0.6, "vmin": 0, "vmax": len(PALETTE)}
    axes.pcolormesh(shade[::-1], cmap=colours, **edges)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_yticks(np.arange(n) + 0.5, range(n - 1, -1, -1))
    axes.set_xticks(np.arange(steps * n) + 0.5, list(range(n)) * steps)
    axes.tick_params(length=0, labelsize=8)
    axes.set_ylabel("query at index")
    axes.set_xlabel("key at index")
    for step in range(steps):
        name = "step 0: the target's states" if step == 0 else f"step {step}: the head's own"
        name = name if steps <= 3 else f"step {step}"
        axes.text((step + 0.5) * n, n + 0.35, name, ha="center", fontsize=8.5)
        if step:
            axes.axvline(step * n, color=BLACK, lw=1.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    return figure


def learning_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Loss and estimated acceptance length against answer tokens learned from.

    histories: head to records with ``tokens``, ``train_loss``, ``loss`` and ``tau``; a value that
    does not exist is None.
    """
    figure, (left, right) = subplots(1, 2, size=(6.4, 3.3))
    for i, (name, records) in enumerate(histories.items()):
        tokens = [record["tokens"] / 1000 for record in records]
        loss, learned, tau = (
            numbers(record[key] for record in records) for key in ("loss", "train_loss", "tau")
        )
        style = {"color": colour(i), "marker": marker(i), "ms": 4}
        left.plot(tokens, loss, **style)
        left.plot(tokens, learned, color=colour(i), ls=":")
        right.plot(tokens, tau, label=name, **style)
    left.plot([], [], color=GREY, marker="o", ms=4, label="validation")
    left.plot([], [], color=GREY, ls=":", label="training")
    left.set_ylabel("loss of all steps (nats)")
    right.set_ylabel("estimated τ (tokens per pass)")
    for axes in (left, right):
        axes.set_xlabel("answer tokens seen (thousands)")
        legend(axes)
    return figure
