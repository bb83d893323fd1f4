"""Chapters 1 to 5 on a tiny target: the steps agree with each other and with the formulas."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import numpy as np
import pytest
import reference
import torch

from draftlayers import criterion, filtering
from draftlayers.cka import cka
from draftlayers.layer_entropy import DEFINITIONS, EntropySamples
from draftlayers.runs import Run
from draftlayers.selection import default_rule
from draftlayers.spec import FEWEST_ROWS, RunSpec
from draftlayers.store import StateStore
from draftlayers.targets import Target

SMALL = {
    "stat_tokens": 3000,
    "train_conversations": 24,
    "answer_tokens": 32,
    "lens_tokens": 64,
    "bootstrap": 12,
    "k": 2,
}


@dataclass
class Collected:
    """What the chapters before have left."""

    target: Target
    folder: object
    store: StateStore
    rows: torch.Tensor
    samples: EntropySamples

    def run(self, **changes) -> Run:
        """A fresh look at the run, in which nothing was read yet."""
        return Run(RunSpec.make("tiny", "smoke", **{**SMALL, **changes}), self.folder)


@pytest.fixture(scope="module")
def collected(tiny, tmp_path_factory) -> Collected:
    folder = tmp_path_factory.mktemp("runs")
    run = Run(RunSpec.make("tiny", "smoke", **SMALL), folder)
    store = criterion.collect_statistics(run, tiny)
    rows = filtering.eligible(store.meta, store.norms).rows
    _, samples = criterion.entropies(run, tiny, store, rows)
    return Collected(tiny, folder, store, rows, samples)


@pytest.fixture(scope="module")
def swept(collected) -> criterion.Sweep:
    run = collected.run()
    return criterion.sweep(run, collected.store, collected.rows, collected.samples)


def choose(collected, level, **changes) -> criterion.Choice:
    return criterion.choose(
        collected.run(**changes), collected.store, collected.rows, collected.samples, level
    )


def test_every_level_holds_the_cka_of_the_rows_it_keeps(collected, swept):
    assert swept.levels[-1].share == 1 and swept.levels[-1].rows == len(collected.rows)
    for level in swept.levels:
        kept = filtering.kept(collected.rows, level.share)
        assert level.rows == len(kept) >= FEWEST_ROWS
        states = collected.store.gather(kept).float()
        for i, j in ((1, 4), (3, 6), (2, 7)):
            assert level.matrix[i, j] == pytest.approx(float(cka(states[i], states[j])), abs=2e-4)


def test_entropies_are_those_of_the_target_on_all_rows(collected):
    samples = collected.samples
    sampled = collected.rows[samples.lens_rows]
    logits = collected.target.unembed(collected.store.load(5, sampled).float())
    expected = reference.entropy(reference.softmax(logits.detach().numpy())).mean()
    assert float(DEFINITIONS["logit_lens"].layers(samples)[5]) == pytest.approx(expected, rel=1e-4)


def test_a_sweep_is_read_back_as_it_was_written(collected, swept):
    """Through the files of a run, as chapters 4 and 5 read it."""
    run = collected.run()
    run.write_results("03-token-filtering", {**swept.to_results(), "more": 1})
    run.write_arrays("03-token-filtering", swept.to_arrays())
    again = criterion.Sweep.stored(
        run.results("03-token-filtering"), run.arrays("03-token-filtering")
    )
    assert (again.share, again.advice) == (swept.share, swept.advice)
    assert len(again.levels) == len(swept.levels)
    for level, expected in zip(again.levels, swept.levels, strict=True):
        for field in fields(level):
            found, wanted = getattr(level, field.name), getattr(expected, field.name)
            if field.name == "stability":
                np.testing.assert_equal(vars(found), vars(wanted))
            else:
                np.testing.assert_equal(found, wanted)
    mine, theirs = choose(collected, swept.used), choose(collected, again.used)
    assert mine.found == theirs.found and mine.rules == theirs.rules


def test_the_choice_is_that_of_its_level_whose_stability_it_reports(collected, swept):
    for level in swept.levels:
        choice = choose(collected, level)
        assert choice.found.layers == level.layers
        entropy, diversity = choice.place(level.layers)
        assert entropy * diversity == pytest.approx(choice.found.score)
        assert choice.rank(level.layers).rank == 1
    _, score = reference.best_set(level.entropy[1:-1], level.matrix[1:-1, 1:-1], 2)
    assert choice.found.score == pytest.approx(score)  # the definition is a mean of the members


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_sweep_and_choice_have_the_same_entropies(collected, name):
    """Under every definition, at a share that leaves rows out."""
    run = collected.run(entropy=name, keep=0.5)
    found = criterion.sweep(run, collected.store, collected.rows, collected.samples)
    choice = choose(collected, found.used, entropy=name, keep=0.5)
    again = DEFINITIONS[name].layer_shares(choice.samples).numpy()
    assert found.used.share == 0.5
    assert again == pytest.approx(found.used.entropy, rel=1e-12)
    assert choice.found.layers == found.used.layers


def test_the_share_that_is_asked_for_joins_the_sweep(collected):
    assert criterion.swept_shares(None) == filtering.SHARES
    assert criterion.swept_shares(0.5) == filtering.SHARES
    assert criterion.swept_shares(0.37) == (*filtering.SHARES[:3], 0.37, *filtering.SHARES[3:])
    run = collected.run(keep=0.37)
    found = criterion.sweep(run, collected.store, collected.rows, collected.samples)
    assert found.share == found.used.share == 0.37
    assert found.used.rows == len(filtering.kept(collected.rows, 0.37))
    choice = choose(collected, found.used, keep=0.37)
    told = criterion.summary(run, collected.target, found, choice)
    assert told["kept_share"] == 0.37 and told["reason"] == "set by the parameter keep"
    assert told["same_choice_in_bootstrap"] == found.used.stability.share(choice.found.layers)


def test_seventy_two_rows_suffice(collected):
    run, rows = collected.run(), collected.rows[:72]
    _, samples = criterion.entropies(run, collected.target, collected.store, rows)
    said: list[str] = []
    found = criterion.sweep(run, collected.store, rows, samples, said.append)
    assert [(level.share, level.rows) for level in found.levels] == [(0.9, 65), (1.0, 72)]
    assert sum("too few" in line for line in said) == len(filtering.SHARES) - 2
    choice = criterion.choose(run, collected.store, rows, samples, found.used)
    told = criterion.summary(run, collected.target, found, choice)
    json.dumps(told, allow_nan=False)
    assert found.levels[-1].stability.times == SMALL["bootstrap"]


def test_a_step_reads_only_the_parameters_that_it_needs(collected, swept):
    run = collected.run()
    criterion.choose(run, collected.store, collected.rows, collected.samples, swept.used)
    assert set(run.reading.parameters) == {"seed", "entropy", "k", "cka_threshold"}
    run = collected.run()
    criterion.sweep(run, collected.store, collected.rows, collected.samples)
    assert set(run.reading.parameters) == {"seed", "entropy", "k", "keep", "bootstrap"}
    run = collected.run()
    criterion.entropies(run, collected.target, collected.store, collected.rows)
    assert set(run.reading.parameters) == {"seed", "lens_tokens"}


def test_all_of_it_gives_what_the_steps_give(collected, swept):
    run = collected.run()
    found, choice = criterion.criterion(run, collected.target)
    assert [level.layers for level in found.levels] == [level.layers for level in swept.levels]
    assert found.share == swept.share and found.advice == swept.advice
    for level, expected in zip(found.levels, swept.levels, strict=True):
        np.testing.assert_array_equal(level.matrix, expected.matrix)
        np.testing.assert_array_equal(level.entropy, expected.entropy)
    told = criterion.summary(run, collected.target, found, choice)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["chosen"] == list(choice.found.layers) and told["n_layers"] == 8
    assert told["rows"] == found.used.rows
    sets = {row["name"]: row for row in told["sets"]}
    assert sets["default"]["layers"] == list(default_rule(8))
    assert sets["chosen"]["rank"] == sets["exhaustive"]["rank"] == 1
    assert sets["chosen"]["of"] == 21 and sets["default"]["of"] == 35
