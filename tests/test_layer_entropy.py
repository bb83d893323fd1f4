"""Entropies of layers and sets against textbook formulas in float64, and their invariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch

from draftlayers import layer_entropy
from draftlayers.cka_pass import accumulate
from draftlayers.project import UserError
from draftlayers.store import ArraySource

LAYERS, ROWS, WIDTH = 5, 60, 12


class Linear:
    """A target whose unembedding is one matrix, optionally soft-capped."""

    vocab_size = 30

    def __init__(self, cap: float | None = None, gain: float = 1.0, width: int = WIDTH):
        generator = torch.Generator().manual_seed(1)
        self.weight = gain * torch.randn(30, width, generator=generator)
        self.cap = cap

    def unembed(self, states: torch.Tensor) -> torch.Tensor:
        logits = states @ self.weight.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def states(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.arange(1, WIDTH + 1) ** -0.7
    x = torch.randn(LAYERS, ROWS, WIDTH, generator=generator) * spread + 1
    return x * torch.tensor([0.3, 1, 2, 4, 8])[:, None, None]


def measured(
    x: torch.Tensor, target: Linear | None = None, tokens: int = ROWS
) -> layer_entropy.EntropySamples:
    source = ArraySource(x)
    rows = torch.arange(x.shape[1])
    overlap = accumulate(source, rows, rows // 3).compute().overlap
    return layer_entropy.sample_entropies(
        target or Linear(width=x.shape[2]), source, rows, overlap, lens_tokens=tokens
    )


ALL_SETS = np.array(list(itertools.combinations(range(LAYERS), 3)))


def test_logit_lens_equals_the_formula():
    x, target = states(), Linear()
    found = layer_entropy.DEFINITIONS["logit_lens"].layers(measured(x, target))
    logits = x.numpy() @ target.weight.numpy().T
    expected = reference.entropy(reference.softmax(logits)).mean(-1)
    assert found.numpy() == pytest.approx(expected, rel=1e-5)


def test_logit_lens_applies_soft_capping_once():
    x = states()
    capped, gain = Linear(cap=30.0, gain=40.0), Linear(gain=40.0)
    logits = x.numpy() @ gain.weight.numpy().T
    assert np.abs(logits).max() > 124  # far beyond the cap
    expected = reference.entropy(reference.softmax(30 * np.tanh(logits / 30))).mean(-1)
    found = layer_entropy.DEFINITIONS["logit_lens"].layers(measured(x, capped)).numpy()
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_features_of_a_concatenation(k):
    x = states()
    sets = np.array(list(itertools.combinations(range(LAYERS), k)))
    found = layer_entropy.DEFINITIONS["softmax"].sets(measured(x), sets).numpy()
    for s, value in zip(sets, found, strict=True):
        joined = np.concatenate([x[i].numpy() for i in s], axis=1)
        assert value == pytest.approx(reference.entropy(reference.softmax(joined)).mean(), rel=1e-6)


def test_renyi_2_is_debiased_and_aggregates_exactly():
    x = states()
    m = measured(x)
    found = layer_entropy.DEFINITIONS["renyi2"].sets(m, ALL_SETS).numpy()
    n = ROWS
    for s, value in zip(ALL_SETS, found, strict=True):
        total = 0.0
        for i, j in itertools.product(s, s):
            traces = [np.var(x[b].double().numpy(), axis=0, ddof=1).sum() for b in (i, j)]
            total += reference.hsic_debiased(x[i].numpy(), x[j].numpy()) / np.prod(traces)
        assert value == pytest.approx(-np.log(total / 9), rel=1e-5)
    # With many rows the debiased value is that of the covariance of the concatenation.
    big = torch.randn(3, 4000, 6, generator=torch.Generator().manual_seed(3))
    rows = torch.arange(4000)
    overlap = accumulate(ArraySource(big), rows, rows).compute().overlap
    purity = np.square(reference.concatenated_operator(big.numpy())).sum()
    found = layer_entropy.DEFINITIONS["renyi2"].sets(
        layer_entropy.EntropySamples(*[torch.empty(0)] * 5, overlap, 0, 6, n), np.array([[0, 1, 2]])
    )
    assert float(found[0]) == pytest.approx(-np.log(purity), abs=0.01)


def test_von_neumann_of_layers_and_concatenations():
    x = states()
    m = measured(x)
    layers = layer_entropy.DEFINITIONS["von_neumann"].layers(m).numpy()
    sets = layer_entropy.DEFINITIONS["von_neumann"].sets(m, ALL_SETS).numpy()
    for layer, value in zip(x.numpy(), layers, strict=True):
        expected = reference.von_neumann(reference.trace_normalised(layer))
        assert value == pytest.approx(expected, rel=1e-8)
    for s, value in zip(ALL_SETS, sets, strict=True):
        expected = reference.von_neumann(reference.concatenated_operator(x.numpy()[s]))
        assert value == pytest.approx(expected, rel=1e-8)


def test_coding_rate_of_concatenations_is_submodular():
    x = states()
    m = measured(x)
    definition = layer_entropy.DEFINITIONS["coding_rate"]
    for s, value in zip(ALL_SETS, definition.sets(m, ALL_SETS).numpy(), strict=True):
        operator = 3 * reference.concatenated_operator(x.numpy()[s])
        eye = np.eye(len(operator))
        expected = 0.5 * np.linalg.slogdet(eye + operator * WIDTH / 0.25)[1]
        assert value == pytest.approx(expected, rel=1e-8)
    rate = {
        s: float(definition.sets(m, np.array([s]))[0])
        for k in (1, 2, 3)
        for s in itertools.combinations(range(LAYERS), k)
    }
    for a, b, c in itertools.permutations(range(LAYERS), 3):
        gain_small = rate[tuple(sorted((a, c)))] - rate[(a,)]
        gain_large = rate[tuple(sorted((a, b, c)))] - rate[tuple(sorted((a, b)))]
        assert gain_large <= gain_small + 1e-9


@pytest.mark.parametrize("name", ["renyi2", "von_neumann", "coding_rate"])
def test_spectra_do_not_see_rotation_shift_or_scale(name):
    x = states()
    generator = torch.Generator().manual_seed(9)
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    definition = layer_entropy.DEFINITIONS[name]
    plain = definition.layers(measured(x))
    moved = definition.layers(measured(17 * (x @ rotation) + 3))
    assert moved.numpy() == pytest.approx(plain.numpy(), rel=1e-4)


FLAT = torch.randn(LAYERS, 64, 256, generator=torch.Generator().manual_seed(1))
CROSSED = torch.eye(100, 120)[None].repeat(LAYERS, 1, 1)  # rows that are orthogonal exactly


@pytest.mark.parametrize("x", [states(), FLAT, CROSSED], ids=["decaying", "flat", "orthogonal"])
@pytest.mark.parametrize("name", list(layer_entropy.DEFINITIONS))
def test_shares_lie_between_zero_and_one(name, x):
    m, definition = measured(x), layer_entropy.DEFINITIONS[name]
    for share in (definition.layer_shares(m), definition.set_shares(m, ALL_SETS)):
        assert (share >= 0).all() and (share <= 1 + 1e-9).all()
    one = definition.sets(m, np.arange(LAYERS)[:, None])
    assert one.numpy() == pytest.approx(definition.layers(m).numpy(), rel=1e-9)
    assert definition.aggregate_function(m)(ALL_SETS).shape == (len(ALL_SETS),)


@pytest.mark.parametrize("name", list(layer_entropy.DEFINITIONS))
def test_remembered_aggregates_are_those_of_the_sets_asked_for(name):
    """Pairs and triples asked for in turn, some again and in another order."""
    definition, m = layer_entropy.DEFINITIONS[name], measured(states())
    aggregate = definition.aggregate_function(m)
    pairs, triples = ALL_SETS[:6, :2], ALL_SETS[:4]
    for sets in (pairs, triples, pairs.astype(np.int64), triples[::-1], triples):
        np.testing.assert_allclose(aggregate(sets), definition.set_shares(m, sets).numpy())


@pytest.mark.parametrize("name", ["logit_lens", "softmax", "renyi2"])
def test_replicates_with_equal_weights_are_the_estimate(name):
    m, definition = measured(states()), layer_entropy.DEFINITIONS[name]
    again = m.resampled(torch.ones(2, m.lens.shape[1]), m.overlap.expand(2, -1, -1))
    assert definition.layers(again)[1].numpy() == pytest.approx(definition.layers(m).numpy())
    expected = definition.sets(m, ALL_SETS).numpy()
    assert definition.sets(again, ALL_SETS)[0].numpy() == pytest.approx(expected)


def test_mixture_exceeds_the_mean_by_the_divergence():
    x, target = states(), Linear()
    rows = torch.arange(ROWS)
    mixture, mean = layer_entropy.mixture_entropy(target, ArraySource(x), rows, [(0, 2), (3, 3)])
    p = reference.softmax(x.numpy() @ target.weight.numpy().T)
    assert float(mixture[0]) == pytest.approx(reference.entropy((p[0] + p[2]) / 2).mean(), rel=1e-5)
    assert mixture[0] > mean[0]
    assert float(mixture[1]) == pytest.approx(float(mean[1]), rel=1e-6)


def test_sample_is_spread_and_the_subset_follows_it():
    places = layer_entropy.spread_sample(1000, 100, torch.Generator().manual_seed(0))
    assert len(places) == 100 and (places // 10 == torch.arange(100)).all()
    m = measured(states(), tokens=20)
    grams = layer_entropy.sample_grams(ArraySource(states()), torch.arange(30))
    half = m.among(30, m.overlap, grams)
    assert half.lens.shape[1] == int((m.lens_rows < 30).sum()) == 10
    assert torch.equal(half.lens, m.lens[:, :10])
    assert half.rows == 30 and half.grams.shape == (LAYERS, 30, 30)


def test_bad_states_are_refused():
    x = states()
    rows = torch.arange(ROWS)
    with pytest.raises(ValueError, match="at least 4 rows"):
        layer_entropy.sample_entropies(
            Linear(), ArraySource(x), rows[:3], torch.eye(5), lens_tokens=3
        )
    x[2, 4, 0] = float("nan")
    with pytest.raises(UserError, match=r"boundaries \[2\] is NaN"):
        layer_entropy.sample_entropies(Linear(), ArraySource(x), rows, torch.eye(5), lens_tokens=60)
    x[2] = 1.0
    with pytest.raises(UserError, match="boundary 2: all rows of states are equal"):
        layer_entropy.sample_grams(ArraySource(x), rows)


@pytest.mark.parametrize("name", list(layer_entropy.DEFINITIONS))
def test_replicates_have_the_shape_that_the_search_wants(name):
    m, definition = measured(states()), layer_entropy.DEFINITIONS[name]
    weights = torch.ones(3, m.lens.shape[1])
    found = layer_entropy.replicated_shares(
        definition, m, ALL_SETS, weights, m.overlap.expand(3, -1, -1)
    )  # fmt: skip
    assert found.shape == (3, LAYERS if definition.additive else len(ALL_SETS))
    again = layer_entropy.EntropySamples.from_arrays(m.to_arrays())
    assert torch.equal(definition.layers(again), definition.layers(m))
