"""Choosing k layers from entropies and CKA: rules, exhaustive search, and ranks.

Used in chapters 03 (the choice along the filter's curve) and 05. Everything here works on small
numpy arrays: ``entropy[b]`` is the score of boundary b, larger is better,
``cka[b, c]`` the similarity of boundaries b and c, both indexed 0..N. How they were measured is
``layer_entropy``'s and ``cka_sums``'s business, how far a choice can be trusted ``stability``'s.
Boundaries 1..N-1 are candidates.

A rule takes ``entropy [N+1]``, ``cka [N+1, N+1]``, the number of layers k and, where the entropy of
a set is not the mean of its members', an aggregate: a function from sets ``[M, k]`` to ``[M]``. It
gives a ``Selection``. It raises ``ValueError`` for shapes that do not fit or a k outside 1..N-1,
and ``UserError`` for boundaries whose numbers are not finite or whose entropy is negative.

The score of a set S is its aggregate entropy times its diversity,

    score(S) = E(S) (1 - max CKA_bc over pairs b, c of S),

so a common factor of the entropies never changes a choice; entropies are given as shares of their
largest possible value (0 to 1) only to be comparable on one axis. Among equal scores the first
set in lexicographic order wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftlayers.project import UserError

Aggregate = Callable[[NDArray[np.integer]], NDArray[np.floating]]
EXHAUSTIVE_K = 4
BEAM_WIDTH = 20
BEAM_POOL = 20
_CHUNK_SETS = 50_000


def check_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Return a selection as a sorted tuple of distinct boundaries of 1..N-1.

    Raises
    ------
    UserError
        When a boundary is outside 1..N-1, repeated, not an integer, or none is given.
    """
    if not all(isinstance(b, (int, np.integer)) and not isinstance(b, bool) for b in layers):
        raise UserError(f"layers must be whole numbers, got {list(layers)}")
    found = tuple(sorted(int(b) for b in layers))
    if not found:
        raise UserError("a selection needs at least one layer")
    outside = [b for b in found if not 1 <= b <= n_layers - 1]
    if outside:
        raise UserError(
            f"layers {outside} are outside 1..{n_layers - 1}, the boundaries between the "
            f"{n_layers} layers of this target"
        )
    if len(set(found)) < len(found):
        raise UserError(f"layers must differ, got {list(layers)}")
    return found


def default_rule(n_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's fixed choice [2, N//2, N-3].

    Raises
    ------
    UserError
        Below N = 7, where the three coincide or leave the range.
    """
    if n_layers < 7:
        raise UserError(
            f"the default rule [2, N//2, N-3] needs a target of at least 7 layers; this one has "
            f"N = {n_layers}, so choose the layers yourself"
        )
    return 2, n_layers // 2, n_layers - 3


def check_candidates(n_layers: int, k: int) -> None:
    """Refuse a target on which the book's comparison cannot be made, before any work.

    Raises
    ------
    UserError
        When the default rule does not exist, or k layers cannot be chosen from 1..N-1.
    """
    default_rule(n_layers)
    if not 1 <= k <= n_layers - 1:
        raise UserError(
            f"k = {k} layers cannot be chosen; a target of {n_layers} layers has "
            f"{n_layers - 1} boundaries between its layers"
        )


@dataclass(frozen=True)
class Selection:
    """Layers chosen by one method.

    layers is sorted; trace tells each step in words and numbers, in the order it was taken;
    note is empty unless the method found something that the reader must know.
    """

    method: str
    layers: tuple[int, ...]
    score: float
    trace: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def all_sets(candidates: Sequence[int], k: int) -> NDArray[np.int16]:
    """All C(m, k) sets of k of m rising candidates, ``[sets, k]`` int16, in lexicographic order."""
    pool = np.asarray(candidates, dtype=np.int16)
    if k == 0:
        return np.empty((1, 0), np.int16)
    if k == 1:
        return pool[:, None].copy()
    m = len(pool)
    # Extend every set by each later position: repeat it as often as there are positions left.
    last = np.arange(m, dtype=np.int64)
    columns = [pool]
    for _ in range(k - 1):
        left = m - 1 - last
        start = np.cumsum(left) - left
        later = np.arange(left.sum()) - np.repeat(start - last - 1, left)
        columns = [np.repeat(c, left) for c in columns] + [pool[later]]
        last = later
    return np.stack(columns, axis=1)


def some_sets(n_layers: int, k: int, most: int = 200_000, seed: int = 0) -> NDArray[np.int16]:
    """All sets of k of the boundaries 1..N-1, or ``most`` random ones when there are more."""
    if math.comb(n_layers - 1, k) <= most:
        return all_sets(range(1, n_layers), k)
    keys = np.random.default_rng(seed).random((most, n_layers - 1))
    return np.sort(np.argpartition(keys, k, axis=1)[:, :k] + 1, axis=1).astype(np.int16)


def _chunks(candidates: Sequence[int], k: int) -> Iterator[NDArray[np.int16]]:
    """``all_sets`` in pieces of one first element, joined up to about 50,000 sets."""
    waiting: list[NDArray[np.int16]] = []
    size = 0
    for i, first in enumerate(candidates):
        tails = all_sets(candidates[i + 1 :], k - 1) if len(candidates) - i >= k else None
        if tails is None:
            break
        head = np.full((len(tails), 1), first, np.int16)
        waiting.append(np.concatenate([head, tails], axis=1))
        size += len(tails)
        if size >= _CHUNK_SETS:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)


def mean_entropy(entropy: ArrayLike) -> Aggregate:
    """The aggregate that is the mean of the members' entropies."""
    values = np.asarray(entropy, np.float64)

    def aggregate(sets: NDArray[np.integer]) -> NDArray[np.floating]:
        total: NDArray[np.float64] = values[sets[:, 0]]
        for column in sets.T[1:]:
            total = total + values[column]
        mean: NDArray[np.float64] = total / sets.shape[1]
        return mean

    return aggregate


def diversity(sets: NDArray[np.integer], cka: ArrayLike) -> NDArray[np.floating]:
    """1 - largest CKA among the pairs of each set, ``[sets]``; 1 for single layers."""
    matrix = np.asarray(cka, np.float64)
    largest = np.full(len(sets), -np.inf if sets.shape[1] > 1 else 0.0)
    columns = sets.T.astype(np.intp)
    flat, width = matrix.ravel(), matrix.shape[1]
    for a, b in itertools.combinations(range(sets.shape[1]), 2):
        np.maximum(largest, flat[columns[a] * width + columns[b]], out=largest)
    return 1 - largest


def score_sets(
    sets: NDArray[np.integer], aggregate: Aggregate, cka: ArrayLike
) -> NDArray[np.floating]:
    """E(S) (1 - max CKA) of each set, ``[sets]``; minus infinity where it is no number.

    A layer may have no CKA (a few rows outweigh all others), and then no set with it can win.
    """
    score = aggregate(sets) * diversity(sets, cka)
    return np.where(np.isnan(score), -np.inf, score)


def _prepare(
    entropy: ArrayLike, cka: ArrayLike, k: int
) -> tuple[NDArray[np.floating], NDArray[np.floating], list[int]]:
    values, matrix = np.asarray(entropy, np.float64), np.asarray(cka, np.float64)
    if values.ndim != 1 or matrix.shape != (len(values), len(values)):
        raise ValueError(
            f"expected entropies [N+1] and CKA [N+1, N+1], got {values.shape} and {matrix.shape}"
        )
    # One boundary without a similarity spoils its column in every row, and its own row whole.
    spoilt = (~np.isfinite(matrix)).sum(1)
    odd = ~np.isfinite(values) | ((spoilt > 0) & (spoilt == spoilt.max()))
    if odd.any():
        raise UserError(
            f"entropy or CKA at boundaries {np.flatnonzero(odd).tolist()} is NaN or infinite, so "
            "they cannot be scored; raise stat_tokens, or look at their states"
        )
    if (values < 0).any():
        raise UserError(
            f"entropy at boundaries {np.flatnonzero(values < 0).tolist()} is negative; expected 0 "
            "or more, since the score multiplies entropies"
        )
    n_layers = len(values) - 1
    if not 1 <= k <= n_layers - 1:
        raise ValueError(f"k must be 1..{n_layers - 1} for a target of {n_layers} layers, got {k}")
    return values, matrix, list(range(1, n_layers))


def _set_score(layers: Sequence[int], aggregate: Aggregate, cka: NDArray[np.floating]) -> float:
    return float(score_sets(np.array([sorted(layers)]), aggregate, cka)[0])


def greedy_threshold(
    entropy: ArrayLike,
    cka: ArrayLike,
    k: int,
    threshold: float,
    aggregate: Aggregate | None = None,
) -> Selection:
    """Walk layers in falling entropy and keep one whose CKA with all kept is below ``threshold``.

    The rule of the source article. May keep fewer than k layers; it then says so and does not
    pad.
    """
    values, matrix, candidates = _prepare(entropy, cka, k)
    kept: list[int] = []
    trace = []
    for b in sorted(candidates, key=lambda b: (-values[b], b)):
        nearest = max(kept, key=lambda c: matrix[b, c], default=None)
        similar = None if nearest is None else float(matrix[b, nearest])
        keep = similar is None or similar < threshold
        trace.append(
            {"layer": b, "entropy": float(values[b]), "nearest": nearest, "cka": similar,
             "kept": keep}
        )  # fmt: skip
        if keep:
            kept.append(b)
        if len(kept) == k:
            break
    note = ""
    if len(kept) < k:
        note = (
            f"only {len(kept)} of {k} layers have CKA below {threshold:g} with all others kept; "
            "raise the threshold to get more"
        )
    score = _set_score(kept, aggregate or mean_entropy(values), matrix)
    return Selection("greedy threshold", tuple(sorted(kept)), score, trace, note)


def greedy_product(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None
) -> Selection:
    """Add, k times, the layer with the largest e (1 - max CKA to those kept)."""
    values, matrix, candidates = _prepare(entropy, cka, k)
    kept: list[int] = []
    trace = []
    for _ in range(k):
        free = [b for b in candidates if b not in kept]
        far = 1 - matrix[np.ix_(free, kept)].max(1) if kept else np.ones(len(free))
        gain = values[free] * far
        best = int(np.argmax(gain))  # the first of equals: candidates rise
        kept.append(free[best])
        trace.append(
            {"layer": free[best], "entropy": float(values[free[best]]),
             "distance": float(far[best]), "gain": float(gain[best])}
        )  # fmt: skip
    score = _set_score(kept, aggregate or mean_entropy(values), matrix)
    return Selection("greedy product", tuple(sorted(kept)), score, trace)


def exhaustive(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None, top: int = 10
) -> Selection:
    """The best of all C(N-1, k) sets by E(S) (1 - max CKA); its trace lists the ``top`` sets.

    All sets are scored, in chunks, so the result is exact and memory small.
    """
    values, matrix, candidates = _prepare(entropy, cka, k)
    aggregate = aggregate or mean_entropy(values)
    best_sets, best = np.empty((0, k), np.int16), np.empty(0)
    for sets in _chunks(candidates, k):
        score = score_sets(sets, aggregate, matrix)
        if len(score) > top:  # all that reach the top-th value, so that ties stay in order
            floor = np.partition(score, -top)[-top]
            reach = score >= floor
            sets, score = sets[reach], score[reach]
        best_sets, best = np.concatenate([best_sets, sets]), np.concatenate([best, score])
        order = np.argsort(-best, kind="stable")[:top]
        best_sets, best = best_sets[order], best[order]
    trace = [
        {"layers": s.tolist(), "score": float(v), "entropy": float(aggregate(s[None])[0]),
         "diversity": float(diversity(s[None], matrix)[0])}
        for s, v in zip(best_sets, best, strict=True)
    ]  # fmt: skip
    return Selection("exhaustive", tuple(best_sets[0].tolist()), float(best[0]), trace)


def beam(
    entropy: ArrayLike,
    cka: ArrayLike,
    k: int,
    aggregate: Aggregate | None = None,
    *,
    width: int = BEAM_WIDTH,
    pool: int = BEAM_POOL,
    threshold: float = 1.0,
) -> Selection:
    """Grow the ``width`` best sets layer by layer from the ``pool`` layers of highest entropy.

    Sets with a pair of CKA ``threshold`` or more are pruned. May end with fewer than k layers
    when the threshold leaves none; it then says so.
    """
    values, matrix, candidates = _prepare(entropy, cka, k)
    aggregate = aggregate or mean_entropy(values)
    ranked = sorted(candidates, key=lambda b: (-values[b], b))[: max(pool, k)]
    beams: list[tuple[int, ...]] = [(b,) for b in sorted(ranked)]
    trace: list[dict[str, Any]] = []
    for size in range(1, k + 1):
        if size > 1:
            grown = sorted({tuple(sorted((*s, b))) for s in beams for b in ranked if b not in s})
            far = diversity(np.array(grown), matrix) if grown else np.empty(0)
            kept = [s for s, f in zip(grown, far, strict=True) if 1 - f < threshold]
            if not kept:
                break
            beams = kept
        score = score_sets(np.array(beams), aggregate, matrix)
        order = np.argsort(-score, kind="stable")[:width]
        beams = [beams[i] for i in order]
        trace.append(
            {"size": size, "considered": len(score), "best": list(beams[0]),
             "score": float(score[order[0]])}
        )  # fmt: skip
    note = ""
    if len(beams[0]) < k:
        note = f"no set of {k} layers has all CKA below {threshold:g}; found {len(beams[0])}"
    return Selection("beam", beams[0], trace[-1]["score"], trace, note)


def log_det(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None
) -> Selection:
    """Greedy MAP of the determinantal point process with kernel e_b CKA_bc e_c.

    Each step adds the layer that raises log det most, by one Cholesky row (Chen et al. 2018,
    algorithm 1).
    """
    values, matrix, candidates = _prepare(entropy, cka, k)
    aggregate = aggregate or mean_entropy(values)
    index = np.array(candidates)
    largest = values[index].max() or 1.0  # a common factor chooses nothing, and could overflow
    weights = values[index] / largest if values[index].any() else np.ones(len(index))
    kernel = weights[:, None] * matrix[np.ix_(index, index)] * weights
    left = kernel.diagonal().copy()
    factors = np.zeros((0, len(index)))
    kept: list[int] = []
    trace = []
    for _ in range(k):
        masked = np.where(np.isin(index, kept), -np.inf, left)
        j = int(np.argmax(masked))
        if masked[j] <= 1e-12 * kernel.diagonal().max():
            break
        row = (kernel[j] - factors[:, j] @ factors) / math.sqrt(left[j])
        trace.append({"layer": int(index[j]), "gain": math.log(left[j]) + 2 * math.log(largest)})
        kept.append(int(index[j]))
        factors = np.vstack([factors, row])
        left = left - row**2
    note = ""
    if len(kept) < k:
        note = f"after {len(kept)} layers every other one is a copy of them; fewer than {k} found"
    score = _set_score(kept, aggregate, matrix)
    return Selection("log-det", tuple(sorted(kept)), score, trace, note)


def top_entropy(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None
) -> Selection:
    """Baseline: the k layers of highest entropy, whatever their similarity."""
    values, matrix, candidates = _prepare(entropy, cka, k)
    layers = sorted(sorted(candidates, key=lambda b: (-values[b], b))[:k])
    return fixed("entropy alone", layers, aggregate or mean_entropy(values), matrix)


def most_diverse(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None
) -> Selection:
    """Baseline: the set whose largest CKA is smallest, whatever its entropy."""
    values, matrix, _ = _prepare(entropy, cka, k)
    layers = search(np.ones_like(values), matrix, k).layers
    return fixed("diversity alone", layers, aggregate or mean_entropy(values), matrix)


def search(
    entropy: ArrayLike, cka: ArrayLike, k: int, aggregate: Aggregate | None = None
) -> Selection:
    """The project's choice: exhaustive up to k = 4, beam search over all layers beyond."""
    if k <= EXHAUSTIVE_K:
        return exhaustive(entropy, cka, k, aggregate)
    return beam(entropy, cka, k, aggregate, width=500, pool=len(np.asarray(entropy)))


def evenly_spaced(n_layers: int, k: int) -> tuple[int, ...]:
    """Baseline: k boundaries spread evenly over 1..N-1."""
    # Halves go up: rounded to even numbers, neighbours could meet.
    places = [int(1.5 + (n_layers - 2) * (i + 0.5) / k) for i in range(k)]
    return check_layers(places, n_layers)


def last_layers(n_layers: int, k: int) -> tuple[int, ...]:
    """Baseline: the k last boundaries before the final one."""
    return check_layers(range(n_layers - k, n_layers), n_layers)


def all_rules(
    entropy: ArrayLike,
    cka: ArrayLike,
    k: int,
    threshold: float,
    aggregate: Aggregate | None = None,
) -> dict[str, Selection]:
    """Every method and baseline on the same entropies and CKA, by name.

    ``"chosen"`` is not among them: the project's choice is ``search``, which is the exhaustive
    result up to k = 4 and the beam's beyond.
    """
    values = np.asarray(entropy, np.float64)
    n_layers = len(values) - 1
    aggregate = aggregate or mean_entropy(values)
    found = {
        "default": fixed("default rule", default_rule(n_layers), aggregate, cka),
        "greedy_threshold": greedy_threshold(values, cka, k, threshold, aggregate),
        "greedy_product": greedy_product(values, cka, k, aggregate),
        "beam": beam(values, cka, k, aggregate),
        "log_det": log_det(values, cka, k, aggregate),
        "entropy_alone": top_entropy(values, cka, k, aggregate),
        "diversity_alone": most_diverse(values, cka, k, aggregate),
        "evenly_spaced": fixed("evenly spaced", evenly_spaced(n_layers, k), aggregate, cka),
        "last": fixed("last layers", last_layers(n_layers, k), aggregate, cka),
    }
    if k <= EXHAUSTIVE_K:
        found["exhaustive"] = exhaustive(values, cka, k, aggregate)
    return found


def fixed(method: str, layers: Sequence[int], aggregate: Aggregate, cka: ArrayLike) -> Selection:
    """A selection that does not look at the data, with its score."""
    matrix = np.asarray(cka, np.float64)
    return Selection(method, tuple(layers), _set_score(layers, aggregate, matrix))


@dataclass(frozen=True)
class Rank:
    """Place of a set among all sets of its size: 1 is best; percentile = share that score less."""

    rank: int
    total: int
    percentile: float
    score: float


def rank_of(
    layers: Sequence[int], entropy: ArrayLike, cka: ArrayLike, aggregate: Aggregate | None = None
) -> Rank:
    """Rank of one set among all C(N-1, k) sets by E(S) (1 - max CKA)."""
    values, matrix, candidates = _prepare(entropy, cka, len(layers))
    chosen = check_layers(layers, len(values) - 1)
    aggregate = aggregate or mean_entropy(values)
    score = _set_score(chosen, aggregate, matrix)
    slack = 1e-12 * abs(score) if math.isfinite(score) else 0.0  # rounding makes no ranks
    better = worse = total = 0
    for sets in _chunks(candidates, len(chosen)):
        others = score_sets(sets, aggregate, matrix)
        better += int((others > score + slack).sum())
        worse += int((others < score - slack).sum())
        total += len(others)
    return Rank(better + 1, total, 100 * worse / total, score)
