"""The criterion, chapters 1 to 5: the one place that computes it, for notebooks and command line.

A notebook calls one step after the other and passes on what they found through the run's files;
``draftlayers select`` calls ``criterion``, which does them all. One pass over the states gives CKA,
its standard errors and its bootstrap replicates at every share of the filter, so that chapter 3
recommends a share, chapter 4 shows a matrix and chapter 5 tells how stable the choice is by the
same numbers. What the steps compute is left to the modules they call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlayers import filtering, selection
from draftlayers.cka_pass import PARTS, Plan, accumulate, choose_plan, deal_parts
from draftlayers.cka_sums import CKA
from draftlayers.corpus import load_corpus, until_tokens
from draftlayers.filtering import Level, Recommendation
from draftlayers.layer_entropy import (
    DEFINITIONS,
    Definition,
    EntropySamples,
    sample_entropies,
    sample_grams,
)
from draftlayers.project import Say, UserError, quiet
from draftlayers.runs import Run
from draftlayers.selection import Aggregate, Rank, Selection
from draftlayers.spec import FEWEST_ROWS
from draftlayers.stability import Stability
from draftlayers.states import collect
from draftlayers.store import StateStore
from draftlayers.targets import Target

# --- Chapters 1 and 2 ----------------------------------------------------------------------------


def collect_statistics(run: Run, target: Target, say: Say = quiet) -> StateStore:
    """States at all boundaries of as many training conversations as ``stat_tokens`` asks for."""
    conversations = until_tokens(load_corpus(target, run, say).train, run.spec.stat_tokens)
    boundaries = range(target.n_layers + 1)
    return collect(target, conversations, boundaries, run.path("states"), say=say)


def entropies(
    run: Run, target: Target, store: StateStore, rows: Tensor, say: Say = quiet
) -> tuple[CKA, EntropySamples]:
    """Similarity of all boundaries on all eligible rows, and entropies of samples of these.

    Parameters
    ----------
    rows
        ``[n]`` eligible rows by falling predictive entropy (``filtering.eligible``).

    Raises
    ------
    ValueError
        With fewer than 4 rows, constant layers, or states that are not finite.
    """
    seed = run.spec.seed
    similar = accumulate(store, rows, store.meta["sequence"][rows], seed=seed).compute()
    samples = sample_entropies(
        target, store, rows, similar.overlap, lens_tokens=run.spec.lens_tokens, seed=seed, say=say
    )
    return similar, samples


# --- Chapters 3 and 4 ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The choice at every share of the filter, and the share that is used.

    Attributes
    ----------
    levels
        By rising share; the last one keeps all rows.
    advice
        Which share can be recommended, if any.
    share
        The one in use: the parameter ``keep``, or what is recommended.
    """

    levels: list[Level]
    advice: Recommendation
    share: float

    def at(self, share: float) -> Level:
        """The level of a share, or of the next larger one that has rows enough."""
        return next(level for level in self.levels if level.share >= share)

    @property
    def used(self) -> Level:
        """The level in use."""
        return self.at(self.share)

    def to_arrays(self) -> dict[str, Tensor]:
        """Arrays of all levels, to store; with ``to_results`` the inverse of ``stored``."""
        names = ("matrix", "se", "biased", "overlap", "exact_share", "entropy")
        return {
            name: torch.from_numpy(np.stack([getattr(level, name) for level in self.levels]))
            for name in names
        }

    def to_results(self) -> dict[str, Any]:
        """What ``to_arrays`` leaves out."""
        levels = [
            {
                "share": level.share,
                "rows": level.rows,
                "layers": level.layers,
                "sets": level.stability.sets,
                "inclusion": level.stability.inclusion,
                "agreement": level.stability.agreement,
                "times": level.stability.times,
            }
            for level in self.levels
        ]
        return {
            "share": self.share,
            "levels": len(levels),
            "sweep": levels,
            "advice": vars(self.advice),
        }

    @classmethod
    def stored(cls, results: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Sweep:
        """Read back what ``to_results`` and ``to_arrays`` gave."""
        levels = []
        for number, row in enumerate(results["sweep"]):
            stable = Stability(
                [(tuple(layers), share) for layers, share in row["sets"]],
                np.array(row["inclusion"]),
                row["agreement"],
                row["times"],
            )
            parts = {name: stack[number].numpy() for name, stack in arrays.items()}
            layers = tuple(row["layers"])
            levels.append(
                Level(row["share"], row["rows"], layers=layers, stability=stable, **parts)
            )
        return cls(levels, Recommendation(**results["advice"]), results["share"])


def swept_shares(keep: float | None) -> tuple[float, ...]:
    """Shares of the filter that are looked at; the one asked for is always among them."""
    return tuple(sorted({*filtering.SHARES, *([] if keep is None else [keep])}))


def sweep_plan(run: Run, store: StateStore, rows: Tensor) -> Plan:
    """How the pass of ``sweep`` will compute, and what that costs."""
    shares = swept_shares(run.spec.keep)
    boundaries, cells = len(store.boundaries), PARTS * len(shares)
    return choose_plan(len(rows), boundaries, store.d, cells=cells, shares=shares)


def sweep(
    run: Run, store: StateStore, rows: Tensor, samples: EntropySamples, say: Say = quiet
) -> Sweep:
    """Choose layers at every share of the filter, in one pass, and decide which share to use.

    Parameters
    ----------
    rows
        ``[n]`` eligible rows by falling predictive entropy (``filtering.eligible``).
    samples
        Entropies of these rows.

    Raises
    ------
    UserError
        When ``keep`` leaves too few rows, these come from too few sequences for a bootstrap, or a
        boundary cannot be scored.
    ValueError
        With constant layers, or states that are not finite.
    """
    spec, sequence = run.spec, store.meta["sequence"][rows]
    shares, seed = swept_shares(spec.keep), spec.seed
    left = len(filtering.kept(rows, spec.keep or 1.0))
    if left < FEWEST_ROWS:
        raise UserError(
            f"keep = {spec.keep:g} leaves {left} of {len(rows)} positions; a choice needs at least "
            f"{FEWEST_ROWS}, so raise keep or stat_tokens (in select: --tokens)"
        )
    sums = accumulate(
        store, rows, sequence,
        shares=shares, how=sweep_plan(run, store, rows), seed=seed,
    )  # fmt: skip
    levels = filtering.along_filter(
        sums,
        deal_parts(sequence, seed),
        samples,
        DEFINITIONS[spec.entropy],
        shares,
        spec.k,
        grams=lambda share: sample_grams(store, filtering.kept(rows, share), seed=seed),
        bootstrap=spec.bootstrap,
        seed=seed,
        say=say,
    )
    advice = filtering.recommend(
        [level.share for level in levels],
        [level.layers for level in levels],
        [level.stability.inclusion for level in levels],
        [level.rows for level in levels],
    )
    return Sweep(levels, advice, advice.share if spec.keep is None else spec.keep)


# --- Chapter 5 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What each rule chooses on the rows in use, by entropies and CKA of these rows.

    Attributes
    ----------
    level
        The rows in use: their CKA, entropies and stability.
    samples
        Entropy samples of these rows.
    definition, aggregate
        The definition of entropy in use, and its entropy of sets as a function.
    found
        The set of the best score.
    rules
        What each rule chooses, by name.
    """

    level: Level
    samples: EntropySamples
    definition: Definition
    aggregate: Aggregate
    found: Selection
    rules: dict[str, Selection]

    def rank(self, layers: Sequence[int]) -> Rank:
        """Place of a set among all sets of its size."""
        level = self.level
        return selection.rank_of(layers, level.entropy, level.matrix, self.aggregate)

    def place(self, layers: Sequence[int]) -> tuple[float, float]:
        """Entropy and diversity of a set."""
        one = np.array([layers])
        across, up = self.aggregate(one), selection.diversity(one, self.level.matrix)
        return float(across[0]), float(up[0])


def choose(
    run: Run, store: StateStore, rows: Tensor, samples: EntropySamples, level: Level
) -> Choice:
    """Apply every rule on the rows that a level keeps.

    Parameters
    ----------
    rows, samples
        All ``[n]`` eligible rows by falling predictive entropy, and entropies of these.
    level
        Of the share in use (``Sweep.used``).

    Raises
    ------
    UserError
        When a boundary cannot be scored.
    """
    spec = run.spec
    kept = filtering.kept(rows, level.share)
    among = samples.among(
        level.rows, torch.from_numpy(level.overlap), sample_grams(store, kept, seed=spec.seed)
    )
    definition = DEFINITIONS[spec.entropy]
    aggregate = definition.aggregate_function(among)
    by = level.entropy, level.matrix, spec.k
    found = selection.search(*by, aggregate)
    rules = selection.all_rules(*by, spec.cka_threshold, aggregate)
    return Choice(level, among, definition, aggregate, found, rules)


def criterion(run: Run, target: Target, say: Say = quiet) -> tuple[Sweep, Choice]:
    """All of it, from text to layers."""
    store = collect_statistics(run, target, say)
    rows = filtering.eligible(store.meta, store.norms).rows
    say(f"CKA: {sweep_plan(run, store, rows)}")
    _, samples = entropies(run, target, store, rows, say)
    found = sweep(run, store, rows, samples, say)
    return found, choose(run, store, rows, samples, found.used)


def summary(run: Run, target: Target, found: Sweep, choice: Choice) -> dict[str, Any]:
    """What ``draftlayers select`` prints, as values that JSON can hold."""
    listed = []
    for name, chosen in {"chosen": choice.found, **choice.rules}.items():
        rank = choice.rank(chosen.layers)
        listed.append(
            {"name": name, "layers": list(chosen.layers), "score": chosen.score,
             "rank": rank.rank, "of": rank.total, "note": chosen.note}
        )  # fmt: skip
    return {
        "model": target.name,
        "n_layers": target.n_layers,
        "convention": "boundary b: the residual stream entering layer b (vLLM's numbering)",
        "chosen": list(choice.found.layers),
        "entropy": choice.definition.name,
        "rows": choice.level.rows,
        "kept_share": found.share,
        "reason": found.advice.reason if run.spec.keep is None else "set by the parameter keep",
        "same_choice_in_bootstrap": choice.level.stability.share(choice.found.layers),
        "sets": listed,
    }
