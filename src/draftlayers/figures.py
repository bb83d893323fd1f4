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


def layer_entropies(
    shares: np.ndarray, titles: Sequence[str], highlighted: int, marked: Sequence[int] = ()
) -> Figure:
    """Entropy of each layer as a share of its largest value: ``[definitions, N+1]``.

    One small panel for each definition, each with its own range; the definition that the run
    uses is drawn in colour, boundaries ``marked`` by dots.
    """
    count = len(shares)
    figure, panels = plt.subplots(count, 1, sharex=True, figsize=(6.4, 1.35 * count + 0.5))
    for i, (axes, values, title) in enumerate(zip(panels, shares, titles, strict=True)):
        colour = VERMILION if i == highlighted else BLUE
        axes.plot(values, color=colour)
        axes.plot(list(marked), values[list(marked)], "o", color=colour, ms=5)
        axes.set_title(title, loc="left", fontsize=9.5, color=colour, pad=3)
        axes.margins(y=0.15)
        axes.locator_params(axis="y", nbins=3)
    panels[-1].set_xlabel("boundary b")
    figure.supylabel("share of the largest possible entropy", fontsize=10)
    return figure


def agreement(correlation: np.ndarray, titles: Sequence[str]) -> Figure:
    """Rank correlation of definitions over sets of layers: ``[definitions, definitions]``."""
    figure, axes = plt.subplots(figsize=(5.6, 4.3))
    image = axes.imshow(correlation, cmap="PuOr_r", vmin=-1, vmax=1)
    axes.grid(False)
    axes.set_xticks(range(len(titles)), titles, rotation=30, ha="right")
    axes.set_yticks(range(len(titles)), titles)
    for i, row in enumerate(correlation):
        for j, value in enumerate(row):
            colour = "white" if abs(value) > 0.6 else BLACK
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
    figure.colorbar(image).set_label("Spearman's rank correlation")
    return figure


def spectrum_with_sinks(without: np.ndarray, with_them: np.ndarray, copies: np.ndarray) -> Figure:
    """Effective number of directions of each layer, ``[N+1]``, for three choices of rows."""
    figure, axes = plt.subplots()
    boundaries = np.arange(len(without))
    axes.plot(boundaries, without, color=BLUE, label="rows of the statistics")
    axes.plot(boundaries, with_them, color=ORANGE, ls="--", label="with attention sinks")
    axes.plot(boundaries, copies, color=VERMILION, ls=":", label="with sinks and copies")
    axes.set_yscale("log")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("effective number of directions")
    axes.yaxis.set_major_formatter("{x:g}")
    shown = np.concatenate([without, with_them, copies])
    narrow = np.nanmax(shown) < 10 * np.nanmin(shown)  # no power of ten to label
    axes.yaxis.set_minor_formatter("{x:g}" if narrow else "")
    axes.legend()
    return figure


# --- Chapter 03: token filtering ---------------------------------------------------------------


def predictive_entropies(entropy: np.ndarray, cut: float | None) -> Figure:
    """How uncertain the target is: histogram on a logarithmic scale and share above, side by side.

    entropy ``[n]`` in nats; ``cut`` marks the threshold in use.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.2))
    floor = 1e-4
    shown = np.clip(entropy, floor, None)
    left.hist(shown, bins=np.geomspace(floor, max(shown.max(), 10 * floor), 40), color=BLUE)
    left.set_xscale("log")
    left.set_xlabel("predictive entropy (nats)")
    left.set_ylabel("positions")
    ordered = np.sort(shown)[::-1]
    right.plot(np.arange(1, len(ordered) + 1) / len(ordered), ordered, color=BLUE)
    right.set_xlabel("share of positions kept")
    right.set_ylabel("entropy of the last one kept (nats)")
    if cut is not None:
        left.axvline(max(cut, floor), color=VERMILION, ls="--")
        right.axhline(max(cut, floor), color=VERMILION, ls="--")
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

    shift and error ``[shares]``: largest movement of CKA and its standard error; inclusion
    ``[shares, N+1]``: how often replicates choose each boundary; chosen: the choice at each share.
    """
    figure, (top, low) = plt.subplots(2, 1, figsize=(6.4, 5.6), sharex=True, height_ratios=[1, 1.8])
    top.fill_between(shares, 0, 2 * error, color=SKY, alpha=0.4, lw=0, label="2 standard errors")
    top.plot(shares, shift, "o-", color=BLUE, ms=4, label="largest change of any pair")
    top.set_ylabel("change of CKA")
    top.legend(loc="upper right")
    step = np.diff(shares).min() if len(shares) > 1 else 0.1
    edges = np.append(shares - step / 2, shares[-1] + step / 2)
    image = low.pcolormesh(edges, np.arange(inclusion.shape[1] + 1) - 0.5, inclusion.T,
                           cmap="Blues", vmin=0, vmax=1)  # fmt: skip
    for x, layers in zip(shares, chosen, strict=True):
        low.plot([x] * len(layers), layers, "o", color=VERMILION, ms=4)
    for axes in (top, low):
        axes.axvline(used, color=BLACK, ls="--", lw=1)
    low.grid(False)
    low.set_xlabel("share of positions kept (dashed: in use)")
    low.set_ylabel("boundary b")
    figure.colorbar(image, ax=low).set_label("chosen in replicates (share)")
    return figure


def entropy_by_share(values: np.ndarray, shares: np.ndarray) -> Figure:
    """Entropy of each layer for several shares of positions: ``[shares, N+1]`` of the largest."""
    figure, axes = plt.subplots()
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(shares)))
    for row, share, colour in zip(values, shares, colours, strict=True):
        axes.plot(row, color=colour, label=f"{share:.0%}")
    axes.set_xlabel("boundary b")
    axes.set_ylabel("share of the largest entropy")
    axes.legend(title="positions kept", ncols=2)
    return figure


# --- Chapter 04: CKA ---------------------------------------------------------------------------


def cka_maps(matrices: Sequence[np.ndarray], titles: Sequence[str]) -> Figure:
    """CKA of all pairs of layers, ``[N+1, N+1]``, one heat map beside the other."""
    width = 3.2 * len(matrices) + 0.6
    figure, panels = plt.subplots(1, len(matrices), figsize=(width, 3.5), squeeze=False)
    for axes, matrix, title in zip(panels[0], matrices, titles, strict=True):
        image = axes.imshow(matrix, origin="lower", vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        axes.set_title(title)
        axes.set_xlabel("boundary b")
        axes.set_aspect("equal")
    panels[0, 0].set_ylabel("boundary b")
    figure.colorbar(image, ax=list(panels[0]), shrink=0.85).set_label("debiased CKA")
    return figure


def bias_curve(rows: np.ndarray, biased: np.ndarray, debiased: np.ndarray) -> Figure:
    """Mean CKA of pairs against the number of rows: arrays ``[sizes, draws]``."""
    figure, axes = plt.subplots()
    for values, colour, label in (
        (biased, VERMILION, "biased (plug-in)"),
        (debiased, BLUE, "debiased"),
    ):
        axes.plot(rows, values.mean(1), "o-", color=colour, ms=4, label=label)
        axes.fill_between(rows, values.min(1), values.max(1), color=colour, alpha=0.2, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [f"{n:,}" for n in rows])
    axes.minorticks_off()
    axes.set_xlabel("rows (band: range over draws)")
    axes.set_ylabel("mean CKA over pairs of layers")
    axes.legend()
    return figure


# --- Chapter 05: selection ---------------------------------------------------------------------


def entropy_cka_plane(
    entropy: np.ndarray,
    diversity: np.ndarray,
    marked: dict[str, tuple[float, float]],
    levels: Sequence[float],
) -> Figure:
    """All sets of layers in the plane of the two criteria.

    entropy and diversity ``[sets]``; marked: name to (entropy, diversity); levels: scores whose
    curves entropy x diversity = score are drawn.
    """
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    if len(entropy) <= 5000:
        axes.plot(entropy, diversity, ".", ms=3, color="#9A9A9A", alpha=0.5, mew=0)
    else:
        cloud = axes.hexbin(entropy, diversity, gridsize=45, bins="log", cmap="Greys", lw=0)
        figure.colorbar(cloud).set_label("sets")
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    grid = np.linspace(max(low, 1e-6), high, 200)
    for level in levels:
        axes.plot(grid, level / grid, color=GREY, lw=0.8, ls="--")
    colours = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, *PALETTE[:4])
    markers = zip("osD^vP*X<>", colours, strict=True)
    by_place: dict[tuple[float, float], list[str]] = {}
    for name, place in marked.items():
        by_place.setdefault(place, []).append(name)
    for (place, names), (marker, colour) in zip(by_place.items(), markers, strict=False):
        axes.plot(*place, marker, color=colour, ms=9, mec="white", mew=0.8, ls="none",
                  label=", ".join(names))  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    axes.set_xlabel("entropy of the set (share of the largest)")
    axes.set_ylabel("diversity, 1 - largest CKA of a pair")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def inclusion_bars(inclusion: np.ndarray, chosen: Sequence[int], default: Sequence[int]) -> Figure:
    """How often bootstrap replicates choose each boundary: ``[N+1]`` shares."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    boundaries = np.arange(len(inclusion))
    colours = [VERMILION if b in chosen else SKY for b in boundaries]
    axes.bar(boundaries, inclusion, color=colours, width=0.8)
    axes.plot(list(default), [-0.05] * len(default), "^", color=BLACK, ms=7, clip_on=False,
              label="default rule")  # fmt: skip
    axes.bar([0], [0], color=VERMILION, label="chosen on all sequences")
    axes.set_ylim(-0.09, 1.02)
    axes.set_xlabel("boundary b")
    axes.set_ylabel("share of replicates")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def score_distribution(scores: np.ndarray, marked: dict[str, float], total: int) -> Figure:
    """Scores of all sets as a histogram, with some sets marked: ``[sets]``."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    axes.hist(scores, bins=60, color=SKY)
    for (name, score), colour in zip(marked.items(), (BLACK, BLUE, GREEN, VERMILION), strict=False):
        axes.axvline(score, color=colour, ls="--", label=name)
    axes.set_xlabel("score, entropy x diversity")
    axes.set_ylabel(f"sets (of {total:,})")
    axes.legend()
    return figure


# --- Chapter 06: draft head --------------------------------------------------------------------


def head_diagram(layers: Sequence[int]) -> Figure:
    """The draft head: what it reads, its one layer, and the two ways out of it."""
    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(0.3, 9.5)

    def box(x: float, y: float, text: str, width: float = 2.3, colour: str = "#DCEAF5") -> None:
        corner = (x - width / 2, y - 0.32)
        axes.add_patch(plt.Rectangle(corner, width, 0.64, fc=colour, ec=BLACK, lw=0.8, zorder=2))
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
    figure, axes = plt.subplots(figsize=(6.4, 2.9))
    shade = np.where(mask, 1 + np.repeat(np.arange(steps), n)[None] % len(PALETTE), 0)
    colours = mpl.colors.ListedColormap(["white", *PALETTE])
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
        axes.text((step + 0.5) * n, n + 0.35, name, ha="center", fontsize=8.5)
        if step:
            axes.axvline(step * n, color=BLACK, lw=1.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    return figure


def learning_curves(histories: dict[str, Sequence[dict]]) -> Figure:
    """Loss and estimated acceptance length against answer tokens learned from.

    histories: head to records with ``tokens``, ``train_loss``, ``loss`` and ``tau``.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.3))
    for (name, records), marker in zip(histories.items(), "os^Dv<>", strict=False):
        tokens = [r["tokens"] / 1000 for r in records]
        (line,) = left.plot(tokens, [r["loss"] for r in records], marker=marker, ms=4)
        right.plot(tokens, [r["tau"] for r in records], marker=marker, ms=4, label=name)
        left.plot(tokens, [r["train_loss"] for r in records], color=line.get_color(), ls=":")
    left.plot([], [], color=GREY, marker="o", ms=4, label="validation")
    left.plot([], [], color=GREY, ls=":", label="training")
    left.set_ylabel("loss of all steps (nats)")
    right.set_ylabel("estimated τ (tokens per pass)")
    for axes in (left, right):
        axes.set_xlabel("answer tokens seen (thousands)")
        axes.legend()
    return figure


# --- Chapter 07: speedup -----------------------------------------------------------------------


def pass_costs(tokens: Sequence[int], milliseconds: dict[str, Sequence[float]]) -> Figure:
    """Time of a target pass against the tokens in it, one line for each way of running it."""
    figure, axes = plt.subplots()
    for (name, values), marker in zip(milliseconds.items(), "os^", strict=False):
        axes.plot(tokens, values, marker=marker, ms=5, label=name)
    axes.set_xlabel("new tokens in the pass")
    axes.set_ylabel("time of the pass (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def acceptance_rates(rates: dict[str, Sequence[float | None]]) -> Figure:
    """Share of guesses accepted at each place of a chain, one line for each head."""
    figure, axes = plt.subplots()
    for (name, values), marker in zip(rates.items(), "os^Dv<>", strict=False):
        places = [j for j, value in enumerate(values, 1) if value is not None]
        axes.plot(places, [values[j - 1] for j in places], marker=marker, ms=5, label=name)
    axes.set_xticks(range(1, 1 + max((len(v) for v in rates.values()), default=1)))
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("place j of the guess")
    axes.set_ylabel("acceptance rate $\\alpha_j$")
    axes.legend()
    return figure


def speedups(
    names: Sequence[str],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    tau: Sequence[float],
) -> Figure:
    """Speedup over plain decoding of each method with its interval; τ is written beside it."""
    figure, axes = plt.subplots(figsize=(6.4, 1.5 + 0.42 * len(names)))
    rows = np.arange(len(names))[::-1]
    errors = [np.subtract(values, low).clip(0), np.subtract(high, values).clip(0)]
    axes.axvline(1, color=GREY, ls="--", lw=1.2)
    axes.errorbar(values, rows, xerr=errors, fmt="o", color=BLUE, ms=6, capsize=3, lw=1.6)
    right = max(1.1, *high) * 1.02
    for row, t in zip(rows, tau, strict=True):
        axes.text(right, row, f"τ = {t:.2f}", va="center", fontsize=9)
    axes.set_yticks(rows, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(min(0.9, *low) * 0.95, right * 1.14)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speedup over plain decoding (dashed: none)")
    return figure


def predicted_speedups(
    predicted: Sequence[float], measured: Sequence[float], kinds: Sequence[str]
) -> Figure:
    """Measured against predicted speedup of each prompt, coloured by the prompt's kind."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    everything = [*predicted, *measured]
    span = max(everything) - min(everything) or 1.0
    ends = min(everything) - 0.06 * span, max(everything) + 0.06 * span
    axes.plot(ends, ends, color=GREY, ls="--", lw=1.2, label="as predicted")
    for i, kind in enumerate(dict.fromkeys(kinds)):
        chosen = [j for j, k in enumerate(kinds) if k == kind]
        axes.plot(
            [predicted[j] for j in chosen], [measured[j] for j in chosen],
            "os^Dv<>P"[i % 8], color=PALETTE[i % len(PALETTE)], ms=6, label=kind,
        )  # fmt: skip
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_xlabel("speedup predicted by the cost model")
    axes.set_ylabel("speedup measured")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def depth_sweep(
    depths: Sequence[int],
    predicted: Sequence[float],
    perfect: Sequence[float],
    measured: dict[int, float],
) -> Figure:
    """Speedup against the depth of a chain: predicted, measured, and with perfect guesses."""
    figure, axes = plt.subplots()
    axes.axhline(1, color=GREY, ls="--", lw=1.2)
    axes.plot(depths, perfect, color=GREEN, ls=":", label="every guess accepted (bound)")
    axes.plot(depths, predicted, color=BLUE, label="predicted from acceptance rates")
    axes.plot(*zip(*sorted(measured.items()), strict=True), "o", color=VERMILION, ms=7,
              label="measured")  # fmt: skip
    axes.set_xticks(depths)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("depth of the chain γ (guesses in each pass)")
    axes.set_ylabel("speedup over plain decoding")
    axes.legend()
    return figure


def speed_by_kind(kinds: Sequence[str], values: dict[str, Sequence[float]], xlabel: str) -> Figure:
    """A quantity for each kind of prompt, one marker for each method."""
    figure, axes = plt.subplots(figsize=(6.4, 1.5 + 0.4 * len(kinds)))
    rows = np.arange(len(kinds))[::-1]
    axes.axvline(1, color=GREY, ls="--", lw=1.2)
    for i, ((name, points), marker) in enumerate(zip(values.items(), "os^Dv<>", strict=False)):
        offset = 0.12 * (i - (len(values) - 1) / 2)
        axes.plot(points, rows - offset, marker, ms=6, label=name)
    axes.set_yticks(rows, kinds)
    axes.set_ylim(-0.6, len(kinds) - 0.4)
    axes.set_xlabel(xlabel)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def device_speedups(depths: Sequence[int], curves: dict[str, Sequence[float]]) -> Figure:
    """Predicted speedup against the depth of a chain on different devices."""
    figure, axes = plt.subplots()
    axes.axhline(1, color=GREY, ls="--", lw=1.2)
    for (name, values), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
        axes.plot(depths, values, ls=style, label=name)
    axes.set_xticks(depths)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("depth of the chain γ (guesses in each pass)")
    axes.set_ylabel("predicted speedup")
    axes.legend()
    return figure
