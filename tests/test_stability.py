"""Replicates that agree are told from replicates that do not."""

from __future__ import annotations

import numpy as np
import pytest

from draftlayers import selection as sel
from draftlayers.stability import bootstrap_choice


def problem(n_layers: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_layers + 1, 6))
    gram = x @ x.T
    scale = np.sqrt(gram.diagonal())
    return rng.uniform(0.1, 1, n_layers + 1), np.abs(gram / np.outer(scale, scale))


def test_stability_of_equal_and_of_varying_replicates():
    e, cka = problem(10)
    best = sel.exhaustive(e, cka, 3).layers
    same = bootstrap_choice(np.repeat(e[None], 5, 0), np.repeat(cka[None], 5, 0), 3)
    assert same.sets == [(best, 1.0)] and same.agreement == pytest.approx(1)
    assert same.share(best) == 1 and same.share((1, 2, 3)) == (best == (1, 2, 3))
    rng = np.random.default_rng(0)
    random = bootstrap_choice(rng.uniform(size=(300, 11)), np.repeat(np.eye(11)[None], 300, 0), 3)
    assert abs(random.agreement) < 0.05
    assert random.inclusion.sum() == pytest.approx(3)
    sets = sel.all_sets(range(1, 10), 3)
    by_set = sel.mean_entropy(e)(sets)
    again = bootstrap_choice(np.repeat(by_set[None], 2, 0), np.repeat(cka[None], 2, 0), 3)
    assert again.sets == [(best, 1.0)]


def test_more_than_four_layers_use_the_beam():
    e, cka = problem(10)
    found = sel.search(e, cka, 5)
    assert bootstrap_choice(e[None], cka[None], 5).sets == [(found.layers, 1.0)]


def test_a_layer_without_cka_in_a_replicate_is_not_chosen():
    e, cka = problem(8)
    best = sel.exhaustive(e, cka, 2).layers
    broken = cka.copy()
    broken[best[0]] = broken[:, best[0]] = np.nan
    found = bootstrap_choice(np.stack([e, e]), np.stack([cka, broken]), 2)
    assert found.inclusion[best[0]] == 0.5
