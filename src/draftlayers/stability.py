"""How far a choice of layers can be trusted: the same search in bootstrap replicates.

Used in chapters 03 (at every share of the filter) and 05 (at the share in use). Works on small
numpy arrays; where the replicates come from is ``cka_sums``'s and ``layer_entropy``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftlayers.selection import EXHAUSTIVE_K, all_sets, diversity, mean_entropy, search


@dataclass(frozen=True)
class Stability:
    """What the search chose in bootstrap replicates.

    sets lists (layers, share of replicates) by falling share; inclusion ``[N+1]`` is the share of
    replicates that chose each boundary; agreement is 1 when every replicate chose the same set and
    about 0 when the choices are random (Nogueira et al. 2018, equation 4).
    """

    sets: list[tuple[tuple[int, ...], float]]
    inclusion: NDArray[np.floating]
    agreement: float
    times: int

    def share(self, layers: Sequence[int]) -> float:
        """Share of replicates that chose exactly these layers."""
        return dict(self.sets).get(tuple(sorted(layers)), 0.0)


def bootstrap_choice(entropies: ArrayLike, ckas: ArrayLike, k: int) -> Stability:
    """Search again in every replicate.

    Parameters
    ----------
    entropies
        ``[times, N+1]`` layer entropies; or ``[times, C(N-1, k)]`` aggregates of all sets, in the
        order of ``all_sets``, when the definition is not the mean of its members.
    ckas
        ``[times, N+1, N+1]``.
    k
        Layers of a set.

    Raises
    ------
    ValueError
        When the shapes do not fit, or no set could be scored in any replicate.
    """
    values, matrices = np.asarray(entropies, np.float64), np.asarray(ckas, np.float64)
    n_layers = matrices.shape[1] - 1
    per_layer = values.shape[1] == n_layers + 1
    if k > EXHAUSTIVE_K:
        if not per_layer:
            raise ValueError(f"aggregates of all sets are only searched up to k = {EXHAUSTIVE_K}")
        chosen = np.array([search(e, c, k).layers for e, c in zip(values, matrices, strict=True)])
    else:
        sets = all_sets(range(1, n_layers), k)
        if not per_layer and values.shape[1] != len(sets):
            raise ValueError(
                f"expected {n_layers + 1} layer entropies or {len(sets)} set entropies for each "
                f"replicate, got {values.shape[1]}"
            )
        best = []
        for e, c in zip(values, matrices, strict=True):
            score = (mean_entropy(e)(sets) if per_layer else e) * diversity(sets, c)
            # A replicate may leave a layer without a CKA; its sets cannot win.
            if not np.isnan(score).all():
                best.append(sets[np.nanargmax(score)])
        if not best:
            raise ValueError("no set of layers could be scored in any bootstrap replicate")
        chosen = np.array(best)
    found, counts = np.unique(chosen, axis=0, return_counts=True)
    order = np.lexsort((*found.T[::-1], -counts))
    times = len(chosen)
    inclusion = np.bincount(chosen.ravel(), minlength=n_layers + 1) / times
    m = n_layers - 1
    expected = k / m * (1 - k / m)
    spread = inclusion[1:n_layers] * (1 - inclusion[1:n_layers]) * times / max(1, times - 1)
    return Stability(
        [(tuple(found[i].tolist()), counts[i] / times) for i in order],
        inclusion,
        float(1 - spread.mean() / expected) if expected else 1.0,
        times,
    )
