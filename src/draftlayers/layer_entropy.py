"""Entropy of layers and of layers taken together, under five definitions.

Used in chapters 02 (the definitions and where they disagree), 03 (how they move with the filter)
and 05 (the score of a set). What a definition computes from an array is in ``entropy``; here the
states of all layers are sampled once (``sample_entropies``) and every definition is read off the
samples, for single layers, for all sets and for bootstrap replicates. Which rows count is
``filtering``'s business; the Renyi-2 entropies follow from inner products of layers that
``cka_sums`` has at hand.

"The entropy of layers" is not one thing: definitions differ in what they are invariant to and
rank layers differently. Each is an entry of ``DEFINITIONS``. Every one is non-negative and is
also given as a share of its largest possible value, so that they fit one axis; a choice of layers
never depends on that factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftlayers.entropy import (
    CODING_PRECISION,
    coding_rate,
    entropy_of_logits,
    feature_softmax,
    spectrum_entropy,
    trace_gram,
)
from draftlayers.project import Say, UserError, quiet
from draftlayers.store import Source

GRAM_ROWS = 128  # sampled at each boundary for entropies of spectra
_LENS_ROWS = 128  # rows unembedded at once
_MIXTURE_ROWS = 32


class Unembedding(Protocol):
    """A target, as far as the logit lens needs it."""

    vocab_size: int

    def unembed(self, states: Tensor) -> Tensor:
        """Logits ``[n, V]`` of states ``[n, d]``."""


@dataclass(frozen=True)
class EntropySamples:
    """What was measured on some rows; layer and set entropies are computed from it.

    Attributes
    ----------
    lens : Tensor
        ``[L, m]`` logit-lens entropy in nats of sampled rows.
    lens_rows : Tensor
        ``[m]`` places of these rows in the list of rows that was measured.
    feature_entropy, log_mass : Tensor
        ``[L, m]`` entropy of softmax(h) over features and log-sum-exp of h, same rows.
    grams : Tensor
        ``[L, g, g]`` trace-1 Gram matrices of g centred rows.
    overlap : Tensor
        ``[L, L]`` inner products of trace-1 covariances, ``CKA.overlap``.
    weights : Tensor or None
        ``[B, m]`` bootstrap weights of the sampled rows; ``overlap`` is then ``[B, L, L]``.
    vocabulary, width, rows : int
        V, d and the number of rows behind ``overlap``.
    """

    lens: Tensor
    lens_rows: Tensor
    feature_entropy: Tensor
    log_mass: Tensor
    grams: Tensor
    overlap: Tensor
    vocabulary: int
    width: int
    rows: int
    weights: Tensor | None = None

    def among(self, count: int, overlap: Tensor, grams: Tensor) -> EntropySamples:
        """The same for the first ``count`` of the measured rows.

        Overlap ``[L, L]`` and Gram matrices ``[L, g, g]`` cannot be cut down and have to be those
        of these rows (``CKASums.compute``, ``sample_grams``).
        """
        kept = self.lens_rows < count
        return replace(
            self,
            lens=self.lens[:, kept],
            lens_rows=self.lens_rows[kept],
            feature_entropy=self.feature_entropy[:, kept],
            log_mass=self.log_mass[:, kept],
            overlap=overlap,
            grams=grams,
            rows=count,
        )

    def to_arrays(self) -> dict[str, Tensor]:
        """Tensors to store; the inverse of ``from_arrays``."""
        numbers = torch.tensor([self.vocabulary, self.width, self.rows])
        return {
            "lens": self.lens,
            "lens_rows": self.lens_rows,
            "feature_entropy": self.feature_entropy,
            "log_mass": self.log_mass,
            "grams": self.grams,
            "overlap": self.overlap,
            "numbers": numbers,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Tensor]) -> EntropySamples:
        """Read back what ``to_arrays`` gave."""
        vocabulary, width, rows = arrays["numbers"].tolist()
        fields = {name: array for name, array in arrays.items() if name != "numbers"}
        return cls(**fields, vocabulary=vocabulary, width=width, rows=rows)

    def resampled(self, weights: Tensor, overlaps: Tensor) -> EntropySamples:
        """Bootstrap replicates: rows weigh ``weights [B, m]``, overlaps are ``[B, L, L]``.

        Entropies of the logit lens, of features and Renyi-2 then get a leading axis B. Those of
        Gram matrices (von Neumann, coding rate) are held at their value.
        """
        return replace(self, weights=weights, overlap=overlaps)


@torch.inference_mode()
def sample_entropies(
    target: Unembedding,
    source: Source,
    rows: Tensor,
    overlap: Tensor,
    *,
    lens_tokens: int,
    seed: int = 0,
    say: Say = quiet,
) -> EntropySamples:
    """Measure every definition on samples of ``rows``.

    The logit lens costs 2 d V operations a row and layer, more than all else together, so it
    reads ``lens_tokens`` rows; the sample is evenly spread over the order of ``rows``.

    Parameters
    ----------
    target
        Its ``unembed`` has the final norm, logit scaling and soft-capping of the model.
    rows
        ``[n]`` indices into ``source``.
    overlap
        ``CKA.overlap`` of the same rows and boundaries.

    Raises
    ------
    ValueError
        When there are fewer than 4 rows.
    UserError
        When entropies of a boundary are not finite, or all of its rows are equal.
    """
    if len(rows) < 4:
        raise ValueError(f"entropies need at least 4 rows, got {len(rows)}")
    boundaries = source.boundaries
    generator = torch.Generator().manual_seed(seed)
    lens_rows = spread_sample(len(rows), lens_tokens, generator)
    lens = torch.empty(len(boundaries), len(lens_rows))
    features, mass = torch.empty_like(lens), torch.empty_like(lens)
    for i, boundary in enumerate(boundaries):
        start = 0
        for block in source.blocks(rows[lens_rows], _LENS_ROWS, [boundary]):
            stop = start + block.shape[1]
            lens[i, start:stop] = entropy_of_logits(target.unembed(block[0])).cpu()
            features[i, start:stop], mass[i, start:stop] = feature_softmax(block[0])
            start = stop
        say(f"logit-lens entropy: boundary {boundary}, {len(lens_rows):,} positions")
    good = (lens + mass).isfinite().all(1).tolist()
    if odd := [b for b, fine in zip(boundaries, good, strict=True) if not fine]:
        raise UserError(
            f"entropy at boundaries {odd} is NaN or infinite, since their states hold such values; "
            "delete the run's states and collect them again, or give another target"
        )
    grams = sample_grams(source, rows, seed=seed)
    return EntropySamples(
        lens, lens_rows, features, mass, grams, overlap, target.vocab_size, source.d, len(rows)
    )


def sample_grams(source: Source, rows: Tensor, *, seed: int = 0) -> Tensor:
    """Trace-1 Gram matrices ``[L, g, g]`` of the same g sampled rows at every boundary.

    Entropies of spectra grow with the number of rows, so compare them at equal g only; it is
    ``GRAM_ROWS``, or all rows where they are fewer.

    Raises
    ------
    UserError
        When all rows of a boundary are equal.
    """
    places = spread_sample(len(rows), GRAM_ROWS, torch.Generator().manual_seed(seed))
    chosen = rows[places]
    grams = []
    for b in source.boundaries:
        try:
            grams.append(trace_gram(next(source.blocks(chosen, len(chosen), [b]))[0]))
        except ValueError as err:
            raise UserError(f"boundary {b}: {err}") from None
    return torch.stack(grams)


def spread_sample(n: int, count: int, generator: torch.Generator) -> Tensor:
    """Rising places of range(n), int64 ``[min(n, count)]``: one drawn from each of equal intervals.

    >>> spread_sample(3, 9, torch.Generator().manual_seed(0))
    tensor([0, 1, 2])
    """
    count = min(n, count)
    edges = torch.arange(count + 1) * n // count
    return edges[:-1] + (torch.rand(count, generator=generator) * edges.diff()).long()


Sets = NDArray[np.integer]


@dataclass(frozen=True)
class Definition:
    """One meaning of "entropy of layers".

    Attributes
    ----------
    layers
        Function of ``EntropySamples``: ``[L]`` in nats; ``[B, L]`` for replicates.
    sets
        Function of ``EntropySamples`` and sets ``[M, k]`` of layer indices: the entropy of the
        concatenation, ``[M]`` or ``[B, M]``.
    largest
        Function of ``EntropySamples`` and k: the largest possible value.
    name, title, formula, aggregate, invariant, cost
        For the reader, in TeX and words.
    additive
        Whether the entropy of a set is the mean of its members'.
    """

    name: str
    title: str
    formula: str
    aggregate: str
    invariant: str
    cost: str
    layers: Callable[[EntropySamples], Tensor]
    sets: Callable[[EntropySamples, Sets], Tensor]
    largest: Callable[[EntropySamples, int], float]
    additive: bool = False

    def layer_shares(self, samples: EntropySamples) -> Tensor:
        """Layer entropies as shares of the largest possible value, ``[L]`` or ``[B, L]``."""
        return self.layers(samples) / self.largest(samples, 1)

    def set_shares(self, samples: EntropySamples, sets: Sets) -> Tensor:
        """Set entropies as shares of the largest possible value, ``[M]`` or ``[B, M]``."""
        return self.sets(samples, sets) / self.largest(samples, sets.shape[1])

    def aggregate_function(self, samples: EntropySamples) -> Callable[[Sets], NDArray[Any]]:
        """The shares of sets as a function that ``selection`` can call.

        Searching, ranking and drawing ask for the same thousands of sets; where each set costs a
        spectrum, what was computed once is remembered.
        """
        known: dict[bytes, NDArray[Any]] = {}

        def aggregate(sets: Sets) -> NDArray[Any]:
            if self.additive:
                return self.set_shares(samples, sets).numpy()
            wanted = np.ascontiguousarray(sets, dtype=np.int16)
            key = bytes([wanted.shape[1]]) + wanted.tobytes()
            if key not in known:
                known[key] = self.set_shares(samples, sets).numpy()
            return known[key]

        return aggregate


def _row_mean(values: Tensor, samples: EntropySamples) -> Tensor:
    """Mean over the last axis of ``[X, m]``, or weighted means ``[B, X]``."""
    values = values.double()
    if samples.weights is None:
        return values.mean(-1)
    w = samples.weights.double()
    return (w / w.sum(1, keepdim=True)) @ values.T


def _index(sets: Sets) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(sets, dtype=np.int64))


def _lens_sets(samples: EntropySamples, sets: Sets) -> Tensor:
    return _row_mean(samples.lens, samples)[..., _index(sets)].mean(-1)


def _feature_sets(samples: EntropySamples, sets: Sets) -> Tensor:
    """Grouping law: softmax over concatenated features = softmax over layers, then within."""
    found = []
    for part in _index(sets).split(512):
        mass = samples.log_mass.double()[part]  # [M, k, m]
        share = torch.softmax(mass, 1)
        inner = (share * samples.feature_entropy.double()[part]).sum(1)
        found.append(_row_mean(inner + torch.special.entr(share).sum(1), samples))
    return torch.cat(found, -1)


def _renyi_layers(samples: EntropySamples) -> Tensor:
    # Of few rows the unbiased purity may fall below what any spectrum has, or even below zero.
    purity = samples.overlap.diagonal(dim1=-2, dim2=-1)
    return -purity.clamp(min=1 / samples.width).log()


def _renyi_sets(samples: EntropySamples, sets: Sets) -> Tensor:
    """The Gram matrix of a concatenation is the sum of its members', so overlaps add up."""
    index = _index(sets)
    k = index.shape[1]
    pairs = (samples.overlap[..., index[:, a], index[:, b]] for a in range(k) for b in range(k))
    purity = cast(Tensor, sum(pairs)) / k**2
    return -purity.clamp(min=1 / (k * samples.width)).log()


def _gram_layers(score: Callable[[Tensor, int], Tensor]) -> Callable[[EntropySamples], Tensor]:
    return lambda samples: score(samples.grams, samples.width)


def _gram_sets(
    score: Callable[[Tensor, int], Tensor], mean: bool
) -> Callable[[EntropySamples, Sets], Tensor]:
    def sets_entropy(samples: EntropySamples, sets: Sets) -> Tensor:
        found = []
        for part in _index(sets).split(256):
            total = samples.grams[part[:, 0]].clone()
            for column in part.T[1:]:
                total += samples.grams[column]
            found.append(score(total / part.shape[1] if mean else total, samples.width))
        return torch.cat(found)

    return sets_entropy


def _directions(samples: EntropySamples, k: int) -> int:
    """Largest possible rank of g centred rows of k concatenated layers."""
    return min(samples.grams.shape[-1] - 1, k * samples.width)


def _largest_coding(samples: EntropySamples, k: int) -> float:
    r = _directions(samples, k)
    return 0.5 * r * math.log1p(k * samples.width / CODING_PRECISION**2 / r)


DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        Definition(
            name="logit_lens",
            title="logit lens",
            formula=r"\frac1n\sum_t H\big(\mathrm{softmax}(W_U\,\mathrm{norm}(h_t))\big)",
            aggregate="mean of the members",
            invariant="scale of each state (the final norm removes it)",
            cost=r"$2ndV$",
            layers=lambda samples: _row_mean(samples.lens, samples),
            sets=_lens_sets,
            largest=lambda samples, k: math.log(samples.vocabulary),
            additive=True,
        ),
        Definition(
            name="renyi2",
            title="Rényi-2",
            formula=r"-\log\,\mathrm{tr}\,\hat\Sigma^2,\quad\hat\Sigma=\Sigma/\mathrm{tr}\,\Sigma",
            aggregate=r"same formula for the concatenation, each layer scaled to trace 1",
            invariant="rotation, shift, scale",
            cost="none beyond CKA",
            layers=_renyi_layers,
            sets=_renyi_sets,
            largest=lambda samples, k: math.log(k * samples.width),
        ),
        Definition(
            name="von_neumann",
            title="von Neumann",
            formula=r"-\mathrm{tr}\,\hat\Sigma\log\hat\Sigma",
            aggregate=r"same formula for the concatenation, each layer scaled to trace 1",
            invariant="rotation, shift, scale",
            cost=r"$g^2d+g^3$ for $g$ rows",
            layers=_gram_layers(lambda grams, width: spectrum_entropy(grams)),
            sets=_gram_sets(lambda grams, width: spectrum_entropy(grams), mean=True),
            largest=lambda samples, k: math.log(_directions(samples, k)),
        ),
        Definition(
            name="coding_rate",
            title="coding rate",
            formula=r"\tfrac12\log\det\big(I+\tfrac{d}{\varepsilon^2}\hat\Sigma\big)",
            aggregate=r"same formula with the sum of the members' $\hat\Sigma$ in row space",
            invariant="rotation, shift, scale",
            cost=r"$g^2d+g^3/3$ for $g$ rows",
            layers=_gram_layers(coding_rate),
            sets=_gram_sets(coding_rate, mean=False),
            largest=_largest_coding,
        ),
        Definition(
            name="softmax",
            title="softmax over features",
            formula=r"\frac1n\sum_t H\big(\mathrm{softmax}(h_t)\big)",
            aggregate="same formula for the concatenated features",
            invariant="order of features only; scale acts as a temperature",
            cost=r"$nd$",
            layers=lambda samples: _row_mean(samples.feature_entropy, samples),
            sets=_feature_sets,
            largest=lambda samples, k: math.log(k * samples.width),
        ),
    )
}


def replicated_shares(
    definition: Definition,
    samples: EntropySamples,
    sets: Sets | None,
    weights: Tensor,
    overlaps: Tensor,
) -> NDArray[Any]:
    """Entropies in bootstrap replicates, as ``stability.bootstrap_choice`` wants them.

    Parameters
    ----------
    sets
        ``[M, k]``, all sets that will be searched; None when they are too many, and the mean of
        the members' entropies has to do.
    weights, overlaps
        See ``EntropySamples.resampled``.

    Returns
    -------
    ndarray
        ``[B, L]`` of layers when the definition is additive or sets is None, else ``[B, M]``.
    """
    again = samples.resampled(weights, overlaps)
    if definition.additive or sets is None:
        found = definition.layer_shares(again)
    else:
        found = definition.set_shares(again, sets)
    return found.expand(len(weights), found.shape[-1]).numpy()


@torch.inference_mode()
def mixture_entropy(
    target: Unembedding,
    source: Source,
    rows: Tensor,
    sets: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Logit-lens entropy of the mean of the members' distributions, for a few sets.

    The excess over the mean of the members' entropies is their Jensen-Shannon divergence: how
    much their readings of the same position differ. Too costly for all sets, V numbers for every
    row and layer.

    Parameters
    ----------
    sets
        Boundaries of each set.

    Returns
    -------
    mixture, mean
        Each ``[sets]``, in nats.
    """
    needed = sorted({b for s in sets for b in s})
    place = {b: i for i, b in enumerate(needed)}
    mixture, mean = torch.zeros(len(sets), dtype=torch.float64), torch.zeros(len(sets)).double()
    for block in source.blocks(rows, _MIXTURE_ROWS, needed):
        p = torch.stack([torch.softmax(target.unembed(x), -1).cpu() for x in block])
        own = torch.special.entr(p).sum(-1)
        for i, s in enumerate(sets):
            index = [place[b] for b in s]
            mixture[i] += torch.special.entr(p[index].mean(0)).sum()
            mean[i] += own[index].mean(0).sum()
    return mixture / len(rows), mean / len(rows)
