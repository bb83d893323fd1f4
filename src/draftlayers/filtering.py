"""Which positions count: what never does, and how many of the rest to keep.

Used in chapter 03, and by chapters 02, 04 and 05 for their rows. Two different things are
decided here. ``eligible`` drops what must not enter any statistic: prompt positions, copies of a
shared prefix, attention sinks. The *filter* then keeps the share of positions at which the target
is least certain of its next token; ``recommend`` looks at the whole curve over shares and may
find that none can be recommended. Statistics of the kept rows are ``cka``'s and ``entropy``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from draftlayers.spec import UserError

SINK_RATIO = 10.0
SINK_POSITIONS = 1
MIN_ROWS = 64
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Eligible:
    """Rows that may enter a statistic, ordered by falling predictive entropy.

    rows ``[n]`` are indices into the store; counts says why the others are left out (a row is
    counted under the first reason that applies) and how many remain.
    """

    rows: Tensor
    counts: dict[str, int]


def sinks(
    norms: Tensor, position: Tensor, *, ratio: float = SINK_RATIO, positions: int = SINK_POSITIONS
) -> tuple[Tensor, Tensor]:
    """Attention sinks: the first positions of a sequence, and rows of outlying norm.

    Massive activations sit on the first token and on a few others, such as the first full stop
    or newline (Sun et al. 2024), so a rule by position alone misses some of them.

    Parameters
    ----------
    norms
        ``[boundaries, n]`` norms of the states.
    position
        ``[n]`` position in the sequence.
    ratio
        A row is an outlier when its norm exceeds ``ratio`` times the median of its boundary at
        any boundary.
    positions
        How many first positions are sinks whatever their norm.

    Returns
    -------
    by_position, by_norm
        Each bool ``[n]``.
    """
    median = norms.median(dim=1).values
    return position < positions, (norms > ratio * median[:, None]).any(0)


def eligible(
    meta: Mapping[str, Tensor],
    norms: Tensor,
    *,
    keep_sinks: bool = False,
    ratio: float = SINK_RATIO,
) -> Eligible:
    """Rows for the statistics: answer positions, no copies, no sinks.

    Parameters
    ----------
    meta
        Columns of a ``StateStore``: ``answer``, ``duplicate``, ``position``,
        ``predictive_entropy``.
    norms
        ``[boundaries, n]``.
    keep_sinks
        Keep sinks, and prompt positions with them, to show what they would do. Copies still go.
    ratio
        See ``sinks``.

    Raises
    ------
    UserError
        When fewer than 64 rows remain.
    """
    by_position, by_norm = sinks(norms, meta["position"], ratio=ratio)
    reasons = {"copies of a shared prefix": meta["duplicate"]}
    if not keep_sinks:
        reasons |= {
            "sinks by position": by_position,
            "sinks by norm": by_norm,
            "positions that do not predict an answer": ~meta["answer"],
        }
    reasons["no predictive entropy"] = ~torch.isfinite(meta["predictive_entropy"])
    left = torch.ones_like(meta["duplicate"])
    counts = {"all": len(left)}
    for reason, dropped in reasons.items():
        counts[reason] = int((left & dropped).sum())
        left &= ~dropped
    rows = left.nonzero()[:, 0]
    counts["kept"] = len(rows)
    if len(rows) < MIN_ROWS:
        raise UserError(
            f"only {len(rows)} of {len(left)} positions can be used "
            f"({', '.join(f'{n} {why}' for why, n in counts.items() if why not in ('all', 'kept'))}"
            f"); statistics need at least {MIN_ROWS}, so raise stat_tokens"
        )
    order = torch.argsort(meta["predictive_entropy"][rows], descending=True, stable=True)
    return Eligible(rows[order], counts)


def kept(rows: Tensor, share: float) -> Tensor:
    """The first ``share`` of rows that are ordered by falling predictive entropy.

    A share is a quantile, so no entropy in nats has to be chosen, and a monotone change of the
    entropies changes nothing.
    """
    return rows[: round(len(rows) * share)]


@dataclass(frozen=True)
class Recommendation:
    """A share to keep, and why; ``share`` is 1 and ``found`` False when none can be recommended."""

    share: float
    found: bool
    reason: str


def largest_shift(matrices: ArrayLike, errors: ArrayLike) -> tuple[NDArray, NDArray]:
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
    *,
    confidence: float = 0.9,
) -> Recommendation:
    """Recommend the smallest share whose choice of layers can be trusted.

    A share can be trusted when (i) every layer it chooses is also chosen in at least
    ``confidence`` of its own bootstrap replicates, and (ii) all larger shares choose the same
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
        if weakest[i] >= confidence and rows[i] >= MIN_ROWS:
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
        if weakest[-1] < confidence:
            why += f" and changes between replicates even without a cut ({weakest[-1]:.0%})"
    else:
        why = (
            "all cuts choose the same layers, but not reliably: in bootstrap replicates the "
            f"weakest of them is chosen in {max(weakest[:-1]):.0%} at best"
        )
    return Recommendation(1.0, False, f"no threshold can be recommended: {why}; all rows are kept")
