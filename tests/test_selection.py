"""Selection against brute force, and what it must say when it cannot choose."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import reference

from draftlayers import selection as sel
from draftlayers.project import UserError


def problem(n_layers: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    walk = rng.normal(size=(n_layers + 1, 40)).cumsum(0)
    walk /= np.linalg.norm(walk, axis=1, keepdims=True)
    return rng.uniform(0.1, 1, n_layers + 1), (walk @ walk.T) ** 2


@pytest.mark.parametrize("n_layers", [7, 12, 30, 80])
def test_default_rule(n_layers):
    rule = sel.default_rule(n_layers)
    assert rule == (2, n_layers // 2, n_layers - 3)
    assert sel.check_layers(rule, n_layers) == rule


@pytest.mark.parametrize("n_layers", [1, 3, 4, 5, 6])
def test_default_rule_refuses_small_targets(n_layers):
    with pytest.raises(UserError, match="at least 7 layers"):
        sel.default_rule(n_layers)


def test_check_candidates():
    sel.check_candidates(7, 6)
    with pytest.raises(UserError, match="at least 7"):
        sel.check_candidates(6, 3)
    with pytest.raises(UserError, match="k = 7"):
        sel.check_candidates(7, 7)


@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 2], "outside"), ([2, 8], "outside"), ([2, 2], "differ"), ([], "at least one"),
     ([1.5], "whole numbers"), ([True, 2], "whole numbers")],
)  # fmt: skip
def test_check_layers_says_what_is_wrong(layers, message):
    with pytest.raises(UserError, match=message):
        sel.check_layers(layers, 8)


def test_check_layers_sorts():
    assert sel.check_layers([5, np.int64(2)], 8) == (2, 5)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_all_sets_and_chunks_equal_itertools(k, monkeypatch):
    monkeypatch.setattr(sel, "_CHUNK_SETS", 7)
    expected = list(itertools.combinations(range(1, 9), k))
    assert [tuple(s) for s in sel.all_sets(range(1, 9), k)] == expected
    assert [tuple(s) for c in sel._chunks(list(range(1, 9)), k) for s in c] == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_exhaustive_equals_brute_force(seed, k, monkeypatch):
    monkeypatch.setattr(sel, "_CHUNK_SETS", 20)
    e, cka = problem(10, seed)
    found = sel.exhaustive(e, cka, k)
    indices, score = reference.best_set(e[1:10], cka[1:10, 1:10], k)
    assert found.layers == tuple(i + 1 for i in indices)
    assert found.score == pytest.approx(score, rel=1e-12)
    scores = [row["score"] for row in found.trace]
    assert scores == sorted(scores, reverse=True)


def test_exhaustive_with_an_aggregate_that_is_not_a_mean():
    e, cka = problem(9)
    bonus = {(1, 5, 6): 50.0}

    def aggregate(sets):
        return np.array([bonus.get(tuple(s), 0.1) for s in sets.tolist()])

    assert sel.exhaustive(e, cka, 3, aggregate).layers == (1, 5, 6)


def test_ties_go_to_the_first_set(monkeypatch):
    for size in (3, 50_000):
        monkeypatch.setattr(sel, "_CHUNK_SETS", size)
        e, cka = np.full(9, 0.5), np.full((9, 9), 0.3)
        assert sel.exhaustive(e, cka, 3).layers == (1, 2, 3)
        assert [r["layers"] for r in sel.exhaustive(e, cka, 3, top=3).trace] == [
            [1, 2, 3], [1, 2, 4], [1, 2, 5],
        ]  # fmt: skip
    for method in (sel.greedy_product, sel.beam):
        assert method(e, cka, 3).layers == (1, 2, 3)
    assert sel.greedy_threshold(e, cka, 3, 0.5).layers == (1, 2, 3)


def test_greedy_threshold_follows_the_article():
    e = np.array([0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0])
    cka = np.eye(9)
    cka[1, 2] = cka[2, 1] = 0.95
    found = sel.greedy_threshold(e, cka, 3, 0.9)
    assert found.layers == (1, 3, 4)
    assert [(t["layer"], t["kept"]) for t in found.trace] == [
        (1, True), (2, False), (3, True), (4, True),
    ]  # fmt: skip
    assert found.trace[1]["nearest"] == 1


def test_greedy_threshold_says_when_it_finds_too_few():
    e, _ = problem(8)
    found = sel.greedy_threshold(e, np.full((9, 9), 0.99), 3, 0.9)
    assert len(found.layers) == 1
    assert "only 1 of 3" in found.note


def test_beam_with_full_width_is_exhaustive():
    for seed in range(3):
        e, cka = problem(12, seed)
        assert sel.beam(e, cka, 3, width=10**6, pool=12).layers == sel.exhaustive(e, cka, 3).layers


def test_beam_prunes_and_says_so():
    e, _ = problem(8)
    cka = np.full((9, 9), 0.99)
    assert "found 1" in sel.beam(e, cka, 3, threshold=0.9).note


def test_log_det_equals_greedy_determinants():
    e, cka = problem(10, 3)
    kernel = e[:, None] * cka * e
    kept: list[int] = []
    for _ in range(3):
        volume = {
            b: np.linalg.slogdet(kernel[np.ix_([*kept, b], [*kept, b])])[1]
            for b in range(1, 10)
            if b not in kept
        }
        kept.append(max(volume, key=volume.get))
    found = sel.log_det(e, cka, 3)
    assert found.layers == tuple(sorted(kept))
    gain = sum(step["gain"] for step in found.trace)
    assert gain == pytest.approx(np.linalg.slogdet(kernel[np.ix_(kept, kept)])[1])


def test_log_det_stops_at_copies():
    e, _ = problem(8)
    found = sel.log_det(e, np.ones((9, 9)), 3)
    assert len(found.layers) == 1 and "fewer than 3" in found.note


def test_rank_counts_better_sets():
    e, cka = problem(11, 5)
    sets = list(itertools.combinations(range(1, 11), 3))
    score = {s: np.mean(e[list(s)]) * (1 - max(cka[a, b] for a, b in itertools.combinations(s, 2)))
             for s in sets}  # fmt: skip
    for s in [sets[0], sets[50], sel.exhaustive(e, cka, 3).layers]:
        rank = sel.rank_of(s, e, cka)
        assert rank.rank == 1 + sum(v > score[s] for v in score.values())
        assert rank.total == math.comb(10, 3)
        assert rank.percentile == pytest.approx(
            100 * sum(v < score[s] for v in score.values()) / rank.total
        )


def test_scale_of_the_entropy_never_matters():
    e, cka = problem(12, 2)
    for method in (sel.exhaustive, sel.greedy_product, sel.beam, sel.log_det):
        assert method(e, cka, 3).layers == method(7.3 * e, cka, 3).layers


def test_baselines():
    e, cka = problem(12)
    assert sel.last_layers(12, 3) == (9, 10, 11)
    assert sel.evenly_spaced(30, 3) == (6, 15, 24)
    assert sel.top_entropy(e, cka, 2).layers == tuple(sorted(1 + np.argsort(-e[1:12])[:2]))
    best = min(itertools.combinations(range(1, 12), 3),
               key=lambda s: max(cka[a, b] for a, b in itertools.combinations(s, 2)))  # fmt: skip
    assert sel.most_diverse(e, cka, 3).layers == best


def test_more_than_four_layers_use_the_beam():
    e, cka = problem(10)
    found = sel.search(e, cka, 5)
    assert found.method == "beam" and len(found.layers) == 5
    _, score = reference.best_set(e[1:10], cka[1:10, 1:10], 5)
    assert found.score == pytest.approx(score)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda e, c: (e * np.nan, c, 3), "NaN"), (lambda e, c: (e, c * np.inf, 3), "NaN"),
     (lambda e, c: (-e, c, 3), "negative"), (lambda e, c: (e, c, 10), "k must be"),
     (lambda e, c: (e, c, 0), "k must be"), (lambda e, c: (e[1:], c, 3), "expected")],
)  # fmt: skip
def test_bad_input_is_explained(change, message):
    with pytest.raises(ValueError, match=message):
        sel.exhaustive(*change(*problem(10)))


def test_a_boundary_that_cannot_be_scored_is_named():
    e, cka = problem(10)
    cka[4] = cka[:, 4] = np.nan
    with pytest.raises(UserError, match=r"boundaries \[4\] is NaN"):
        sel.search(e, cka, 3)
    cka[4] = cka[:, 4] = 0.5
    e[2] = -0.1
    with pytest.raises(UserError, match=r"boundaries \[2\] is negative"):
        sel.search(e, cka, 3)


def test_eighty_layers_four_at_a_time():
    e, cka = problem(80)
    start = time.perf_counter()
    found = sel.exhaustive(e, cka, 4)
    assert len(found.layers) == 4
    assert time.perf_counter() - start < 10  # under one second when the machine is free


def test_all_rules_runs_every_method():
    e, cka = problem(12, 1)
    found = sel.all_rules(e, cka, 3, 0.9)
    assert found["default"].layers == (2, 6, 9)
    best = max(found.values(), key=lambda s: s.score if len(s.layers) == 3 else -1)
    assert best.score == found["exhaustive"].score
    for s in found.values():
        assert sel.check_layers(s.layers, 12) == s.layers
        assert s.score == pytest.approx(float(sel.score_sets(
            np.array([s.layers]), sel.mean_entropy(e), cka)[0]))  # fmt: skip
        assert s.to_dict()["method"] == s.method
    assert "exhaustive" not in sel.all_rules(e, cka, 5, 0.9)


def test_some_sets_are_all_or_distinct_layers():
    assert len(sel.some_sets(12, 3)) == math.comb(11, 3)
    few = sel.some_sets(30, 6, most=500)
    assert few.shape == (500, 6) and (np.diff(few, axis=1) > 0).all()
    assert few.min() >= 1 and few.max() <= 29


def test_a_score_that_is_no_number_is_last():
    """An aggregate may be undefined for a set, and a debiased one may be negative."""
    e, cka = problem(8)
    sets = sel.all_sets(range(1, 8), 2)

    def aggregate(asked):
        values = sel.mean_entropy(e)(asked)
        values[(asked == 4).any(1)] = -1.0
        values[(asked == 3).any(1)] = np.nan
        return values

    ranks = {tuple(s): sel.rank_of(s, e, cka, aggregate) for s in sets.tolist()}
    undefined = [rank.rank for s, rank in ranks.items() if 3 in s]
    negative = [rank.rank for s, rank in ranks.items() if 4 in s and 3 not in s]
    rest = [rank.rank for s, rank in ranks.items() if 3 not in s and 4 not in s]
    assert max(rest) < min(negative) and max(negative) < min(undefined)
    assert set(undefined) == {len(sets) - len(undefined) + 1}
    assert 3 not in sel.exhaustive(e, cka, 2, aggregate).layers
