"""Which positions count: what never does, and how many of the rest to keep.

Used in chapter 03, and by chapters 02, 04 and 05 for their rows. Two different things are
decided here. ``eligible`` drops what must not enter any statistic: prompt positions, copies of a
shared prefix, attention sinks. The *filter* then keeps the share of positions at which the target
is least certain of its next token: ``along_filter`` chooses layers at every share, and
``recommend`` looks at the whole curve and may find that no share can be recommended. How
similarity and entropy are computed is left to ``cka_sums`` and ``layer_entropy``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from draftlayers.cka_sums import CKASums
from draftlayers.layer_entropy import Definition, EntropySamples, replicated_shares
from draftlayers.project import Say, UserError, quiet
from draftlayers.selection import EXHAUSTIVE_K, all_sets, search
from draftlayers.spec import FEWEST_ROWS
from draftlayers.stability import Stability, bootstrap_choice

SINK_RATIO = 10.0  # times the median norm of a boundary: rows beyond it are outliers
SINK_POSITIONS = 1  # first positions of a sequence that are sinks whatever their norm
CONFIDENCE = 0.9  # share of bootstrap replicates in which a layer that can be trusted is chosen
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Eligible:
    """Rows that may enter a statistic, ordered by falling predictive entropy.

    rows ``[n]`` are indices into the store; counts says why the others are left out (a row is
    counted under the first reason that applies) and how many remain.
    """

    rows: Tensor
    counts: dict[str, int]


def sinks(norms: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Attention sinks: the first positions of a sequence, and rows of outlying norm.

    Massive activations sit on the first token and on a few others, such as the first full stop
    or newline (Sun et al. 2024), so a rule by position alone misses some of them. A row is an
    outlier when its norm exceeds ``SINK_RATIO`` times the median of its boundary at any boundary.

    Parameters
    ----------
    norms
        ``[boundaries, n]`` norms of the states.
    position
        ``[n]`` position in the sequence.

    Returns
    -------
    by_position, by_norm
        Each bool ``[n]``.
    """
    median = norms.nanmedian(dim=1).values
    return position < SINK_POSITIONS, (norms > SINK_RATIO * median[:, None]).any(0)


def eligible(meta: Mapping[str, Tensor], norms: Tensor, *, keep_sinks: bool = False) -> Eligible:
    """Rows for the statistics: answer positions, no copies, no sinks.

    Parameters
    ----------
    meta
        Columns of a ``StateStore``: ``answer``, ``duplicate``, ``position``,
        ``predictive_entropy``.
    norms
        ``[boundaries, n]``.
    keep_sinks
        Keep sinks, also those in prompts, to show what they would do. All else still goes.

    Raises
    ------
    UserError
        When fewer than 64 rows remain.
    """
    by_position, by_norm = sinks(norms, meta["position"])
    reasons = {"copies of a shared prefix": meta["duplicate"]}
    other = ~meta["answer"]
    if keep_sinks:
        other &= ~(by_position | by_norm)
    else:
        reasons |= {"sinks by position": by_position, "sinks by norm": by_norm}
    reasons["positions that do not predict an answer"] = other
    reasons["no predictive entropy"] = ~torch.isfinite(meta["predictive_entropy"])
    left = torch.ones_like(meta["duplicate"])
    counts = {"all": len(left)}
    for reason, dropped in reasons.items():
        counts[reason] = int((left & dropped).sum())
        left &= ~dropped
    rows = left.nonzero()[:, 0]
    counts["kept"] = len(rows)
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"only {len(rows)} of {len(left)} positions can be used "
            f"({', '.join(f'{n} {why}' for why, n in counts.items() if why not in ('all', 'kept'))}"
            f"); statistics need at least {FEWEST_ROWS}, so raise stat_tokens (in select: --tokens)"
        )
    # Rows of equal entropy in a random order, or a filter would prefer the first conversations.
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    order = torch.argsort(meta["predictive_entropy"][rows], descending=True, stable=True)
    return Eligible(rows[order], counts)


def kept(rows: Tensor, share: float) -> Tensor:
    """The first ``share`` of rows that are ordered by falling predictive entropy.

    A share is a quantile, so no entropy in nats has to be chosen, and a monotone change of the
    entropies changes nothing. Of ``rows [n]`` these are ``[round(share n)]``.
    """
    return rows[: round(len(rows) * share)]


@dataclass(frozen=True)
class Recommendation:
    """A share to keep, and why; ``share`` is 1 and ``found`` False when none can be recommended."""

    share: float
    found: bool
    reason: str


def largest_shift(
    matrices: ArrayLike, errors: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How far CKA moves from that of all rows, and the standard error of the pair that moves most.

    Parameters
    ----------
    matrices, errors
        ``[shares, L, L]`` CKA and standard errors, all rows last.

    Returns
    -------
    shift, error
        Each ``[shares]``. The error treats the smaller sample as if it were independent of the
        whole one, which overstates it.
    """
    matrices, errors = np.asarray(matrices, np.float64), np.asarray(errors, np.float64)
    moved = np.abs(matrices - matrices[-1])
    flat = moved.reshape(len(moved), -1)
    at = flat.argmax(1)
    both = np.sqrt(errors**2 + errors[-1] ** 2).reshape(flat.shape)
    return flat[np.arange(len(flat)), at], both[np.arange(len(flat)), at]


def recommend(
    shares: Sequence[float],
    chosen: Sequence[tuple[int, ...]],
    inclusion: ArrayLike,
    rows: Sequence[int],
) -> Recommendation:
    """Recommend the smallest share whose choice of layers can be trusted.

    A share can be trusted when (i) every layer it chooses is also chosen in at least
    ``CONFIDENCE`` of its own bootstrap replicates, and (ii) all larger shares choose the same
    layers, so that the cut decides nothing by itself. When no share below 1 passes, nothing is
    filtered.

    Parameters
    ----------
    shares
        Rising, the last one 1.
    chosen
        Layers chosen at each share.
    inclusion
        ``[shares, N+1]`` share of bootstrap replicates that chose each layer.
    rows
        Rows at each share; one with fewer than 64 is passed over.
    """
    table = np.asarray(inclusion, np.float64)
    weakest = [float(min(p[list(s)], default=0.0)) for p, s in zip(table, chosen, strict=True)]
    best = None
    for i in range(len(shares) - 2, -1, -1):
        if chosen[i] != chosen[-1]:
            break
        if weakest[i] >= CONFIDENCE and rows[i] >= FEWEST_ROWS:
            best = i
    if best is not None:
        return Recommendation(
            shares[best],
            True,
            f"every share from {shares[best]:.0%} up chooses {list(chosen[best])}, and at "
            f"{shares[best]:.0%} each of these layers is chosen in at least "
            f"{weakest[best]:.0%} of the bootstrap replicates",
        )
    different = [q for q, s in zip(shares, chosen, strict=True) if s != chosen[-1]]
    if different:
        why = (
            f"the choice depends on the cut (keeping {max(different):.0%} chooses "
            f"{list(chosen[list(shares).index(max(different))])}, keeping everything "
            f"{list(chosen[-1])})"
        )
        if weakest[-1] < CONFIDENCE:
            why += f" and changes between replicates even without a cut ({weakest[-1]:.0%})"
    else:
        why = (
            "all cuts choose the same layers, but not reliably: in bootstrap replicates the "
            f"weakest of them is chosen in {max(weakest[:-1] or weakest):.0%} at best"
        )
    return Recommendation(1.0, False, f"no threshold can be recommended: {why}; all rows are kept")


@dataclass(frozen=True)
class Level:
    """What a filter that keeps a share of the rows would choose.

    Attributes
    ----------
    share, rows
        Share of the rows that is kept, and how many these are.
    matrix, se, biased
        ``[N+1, N+1]`` debiased CKA, its standard error (NaN where there is none), and the plug-in
        estimate.
    overlap
        ``[N+1, N+1]``, see ``cka_sums.CKA``.
    exact_share
        ``[N+1]`` share of each layer that the sums hold exactly.
    entropy
        ``[N+1]`` entropy of each layer as a share of the largest possible one.
    layers
        The choice on these rows.
    stability
        What bootstrap replicates over sequences choose.
    """

    share: float
    rows: int
    matrix: NDArray[np.floating]
    se: NDArray[np.floating]
    biased: NDArray[np.floating]
    overlap: NDArray[np.floating]
    exact_share: NDArray[np.floating]
    entropy: NDArray[np.floating]
    layers: tuple[int, ...]
    stability: Stability


def along_filter(
    sums: CKASums,
    part: Tensor,
    samples: EntropySamples,
    definition: Definition,
    shares: Sequence[float],
    k: int,
    *,
    grams: Callable[[float], Tensor],
    bootstrap: int,
    seed: int = 0,
    say: Say = quiet,
) -> list[Level]:
    """Search at every share of rows that ``sums`` holds, with a bootstrap over sequences at each.

    Shares that leave fewer than 64 rows are passed over.

    Parameters
    ----------
    sums
        From one pass of ``cka_pass.accumulate`` over all rows, with these shares.
    part
        ``[n]`` the part that each row was dealt into (``cka_pass.deal_parts``).
    samples, definition
        Entropies of the same rows, and which definition counts.
    grams
        Gram matrices of the rows that a share keeps (``layer_entropy.sample_grams``).

    Raises
    ------
    UserError
        When the rows come from too few sequences for a bootstrap.
    """
    sets = None
    if k <= EXHAUSTIVE_K:
        sets = all_sets(range(1, len(samples.lens) - 1), k)
    levels = []
    for number, share in enumerate(shares):
        if (left := round(len(part) * share)) < FEWEST_ROWS:
            say(f"filter: keeping {share:.0%} would leave {left} rows, too few to choose by")
            continue
        at = sums.compute(number)
        among = samples.among(at.n, at.overlap, grams(share))
        values, matrix = definition.layer_shares(among).numpy(), at.matrix.numpy()
        best = search(values, matrix, k, definition.aggregate_function(among))
        try:
            weights = sums.bootstrap_weights(bootstrap, seed, number)
            matrices, overlaps = sums.replicates(weights, number)
        except ValueError as err:
            raise UserError(f"{err}; raise stat_tokens (in select: --tokens)") from None
        again = replicated_shares(
            definition, among, sets, weights[:, part[among.lens_rows]], overlaps
        )
        se = at.matrix.new_full(at.matrix.shape, float("nan")) if at.se is None else at.se
        levels.append(
            Level(
                share,
                at.n,
                matrix,
                se.numpy(),
                at.biased.numpy(),
                at.overlap.numpy(),
                at.exact_share.numpy(),
                values,
                best.layers,
                bootstrap_choice(again, matrices, k),
            )
        )
        say(f"filter: keeping {share:.0%} ({at.n:,} rows) chooses {list(best.layers)}")
    return levels
