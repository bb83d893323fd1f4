"""Entropies against textbook formulas in float64, and their invariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch

from draftlayers import cka, entropy
from draftlayers.targets import tiny_target

LAYERS, ROWS, WIDTH = 5, 60, 12


class Linear:
    """A target whose unembedding is one matrix, optionally soft-capped."""

    vocab_size = 30

    def __init__(self, cap: float | None = None, gain: float = 1.0):
        generator = torch.Generator().manual_seed(1)
        self.weight = gain * torch.randn(30, WIDTH, generator=generator)
        self.cap = cap

    def unembed(self, states: torch.Tensor) -> torch.Tensor:
        logits = states @ self.weight.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def states(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.arange(1, WIDTH + 1) ** -0.7
    x = torch.randn(LAYERS, ROWS, WIDTH, generator=generator) * spread + 1
    return x * torch.tensor([0.3, 1, 2, 4, 8])[:, None, None]


def measured(x: torch.Tensor, target: Linear | None = None, tokens: int = ROWS) -> entropy.Measured:
    source = cka.ArraySource(x)
    rows = torch.arange(x.shape[1])
    overlap = cka.measure(source, rows, rows // 3).compute().overlap
    return entropy.measure(target or Linear(), source, rows, overlap, lens_tokens=tokens)


ALL_SETS = np.array(list(itertools.combinations(range(LAYERS), 3)))


def test_logit_lens_equals_the_formula():
    x, target = states(), Linear()
    found = entropy.DEFINITIONS["logit_lens"].layers(measured(x, target))
    logits = x.numpy() @ target.weight.numpy().T
    expected = reference.entropy(reference.softmax(logits)).mean(-1)
    assert found.numpy() == pytest.approx(expected, rel=1e-5)


def test_logit_lens_applies_soft_capping_once():
    x = states()
    capped, gain = Linear(cap=30.0, gain=40.0), Linear(gain=40.0)
    logits = x.numpy() @ gain.weight.numpy().T
    assert np.abs(logits).max() > 124  # far beyond the cap
    expected = reference.entropy(reference.softmax(30 * np.tanh(logits / 30))).mean(-1)
    found = entropy.DEFINITIONS["logit_lens"].layers(measured(x, capped)).numpy()
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
def test_logit_lens_does_not_see_the_scale_of_a_layer(architecture):
    # The final norm removes it; a stale scale of another layer would not.
    target = tiny_target(architecture=architecture)
    x = torch.randn(1, 20, target.d_model, generator=torch.Generator().manual_seed(0))
    both = torch.cat([0.01 * x, 100 * x]) * 10
    h = entropy.entropy_of_logits(target.unembed(both))
    assert h[0] == pytest.approx(h[1], rel=2e-3)


def test_forbidden_tokens_contribute_nothing():
    logits = torch.tensor([[0.0, 1.0, float("-inf")], [0.0, 0.0, float("-inf")]])
    expected = reference.entropy(reference.softmax(logits[:, :2].numpy()))
    assert entropy.entropy_of_logits(logits).numpy() == pytest.approx(expected, rel=1e-6)


def test_features_survive_massive_activations():
    x = states()[0].clone()
    x[3, 5] = 7e4
    x = x.bfloat16()
    h, mass = entropy.feature_softmax(x)
    expected = reference.entropy(reference.softmax(x.double().numpy()))
    assert h.numpy() == pytest.approx(expected, abs=1e-6)
    assert mass[3] == pytest.approx(7e4, rel=3e-3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_features_of_a_concatenation(k):
    x = states()
    sets = np.array(list(itertools.combinations(range(LAYERS), k)))
    found = entropy.DEFINITIONS["softmax"].sets(measured(x), sets).numpy()
    for s, value in zip(sets, found, strict=True):
        joined = np.concatenate([x[i].numpy() for i in s], axis=1)
        assert value == pytest.approx(reference.entropy(reference.softmax(joined)).mean(), rel=1e-6)


def test_renyi_2_is_debiased_and_aggregates_exactly():
    x = states()
    m = measured(x)
    found = entropy.DEFINITIONS["renyi2"].sets(m, ALL_SETS).numpy()
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
    overlap = cka.measure(cka.ArraySource(big), rows, rows).compute().overlap
    purity = np.square(reference.concatenated_operator(big.numpy())).sum()
    found = entropy.DEFINITIONS["renyi2"].sets(
        entropy.Measured(*[torch.empty(0)] * 5, overlap, 0, 6, n), np.array([[0, 1, 2]])
    )
    assert float(found[0]) == pytest.approx(-np.log(purity), abs=0.01)


def test_von_neumann_of_layers_and_concatenations():
    x = states()
    m = measured(x)
    layers = entropy.DEFINITIONS["von_neumann"].layers(m).numpy()
    sets = entropy.DEFINITIONS["von_neumann"].sets(m, ALL_SETS).numpy()
    for layer, value in zip(x.numpy(), layers, strict=True):
        expected = reference.von_neumann(reference.trace_normalised(layer))
        assert value == pytest.approx(expected, rel=1e-8)
    for s, value in zip(ALL_SETS, sets, strict=True):
        expected = reference.von_neumann(reference.concatenated_operator(x.numpy()[s]))
        assert value == pytest.approx(expected, rel=1e-8)


def test_coding_rate_of_concatenations_is_submodular():
    x = states()
    m = measured(x)
    definition = entropy.DEFINITIONS["coding_rate"]
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
    definition = entropy.DEFINITIONS[name]
    plain = definition.layers(measured(x))
    moved = definition.layers(measured(17 * (x @ rotation) + 3))
    assert moved.numpy() == pytest.approx(plain.numpy(), rel=1e-4)


@pytest.mark.parametrize("name", list(entropy.DEFINITIONS))
def test_shares_lie_between_zero_and_one(name):
    m, definition = measured(states()), entropy.DEFINITIONS[name]
    for share in (definition.layer_shares(m), definition.set_shares(m, ALL_SETS)):
        assert (share >= 0).all() and (share <= 1 + 1e-9).all()
    one = definition.sets(m, np.arange(LAYERS)[:, None])
    assert one.numpy() == pytest.approx(definition.layers(m).numpy(), rel=1e-9)
    assert definition.aggregate_function(m)(ALL_SETS).shape == (len(ALL_SETS),)


@pytest.mark.parametrize("name", list(entropy.DEFINITIONS))
def test_remembered_aggregates_are_those_of_the_sets_asked_for(name):
    """Pairs and triples asked for in turn, some again and in another order."""
    definition, m = entropy.DEFINITIONS[name], measured(states())
    aggregate = definition.aggregate_function(m)
    pairs, triples = ALL_SETS[:6, :2], ALL_SETS[:4]
    for sets in (pairs, triples, pairs.astype(np.int64), triples[::-1], triples):
        np.testing.assert_allclose(aggregate(sets), definition.set_shares(m, sets).numpy())


@pytest.mark.parametrize("name", ["logit_lens", "softmax", "renyi2"])
def test_replicates_with_equal_weights_are_the_estimate(name):
    m, definition = measured(states()), entropy.DEFINITIONS[name]
    again = m.resampled(torch.ones(2, m.lens.shape[1]), m.overlap.expand(2, -1, -1))
    assert definition.layers(again)[1].numpy() == pytest.approx(definition.layers(m).numpy())
    expected = definition.sets(m, ALL_SETS).numpy()
    assert definition.sets(again, ALL_SETS)[0].numpy() == pytest.approx(expected)


def test_mixture_exceeds_the_mean_by_the_divergence():
    x, target = states(), Linear()
    rows = torch.arange(ROWS)
    mixture, mean = entropy.mixture_entropy(target, cka.ArraySource(x), rows, [(0, 2), (3, 3)])
    p = reference.softmax(x.numpy() @ target.weight.numpy().T)
    assert float(mixture[0]) == pytest.approx(reference.entropy((p[0] + p[2]) / 2).mean(), rel=1e-5)
    assert mixture[0] > mean[0]
    assert float(mixture[1]) == pytest.approx(float(mean[1]), rel=1e-6)


def test_sample_is_spread_and_the_subset_follows_it():
    places = entropy.spread_sample(1000, 100, torch.Generator().manual_seed(0))
    assert len(places) == 100 and (places // 10 == torch.arange(100)).all()
    m = measured(states(), tokens=20)
    half = m.among(30, m.overlap)
    assert half.lens.shape[1] == int((m.lens_rows < 30).sum()) == 10
    assert torch.equal(half.lens, m.lens[:, :10])


def test_ranks_correlate_as_in_scipy():
    from scipy.stats import spearmanr

    a = np.random.default_rng(0).integers(0, 9, (3, 50)).astype(float)  # with ties
    expected = spearmanr(a, axis=1).statistic
    assert entropy.rank_correlation(a).numpy() == pytest.approx(expected, abs=1e-12)


def test_bad_states_are_refused():
    x = states()
    rows = torch.arange(ROWS)
    with pytest.raises(ValueError, match="at least 4 rows"):
        entropy.measure(Linear(), cka.ArraySource(x), rows[:3], torch.eye(5), lens_tokens=3)
    x[2, 4, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        entropy.measure(Linear(), cka.ArraySource(x), rows, torch.eye(5), lens_tokens=60)
    with pytest.raises(ValueError, match="equal"):
        entropy.trace_gram(torch.ones(5, 3))


@pytest.mark.parametrize("name", list(entropy.DEFINITIONS))
def test_replicates_have_the_shape_that_the_search_wants(name):
    m, definition = measured(states()), entropy.DEFINITIONS[name]
    weights = torch.ones(3, m.lens.shape[1])
    found = entropy.replicated_shares(
        definition, m, ALL_SETS, weights, m.overlap.expand(3, -1, -1)
    )  # fmt: skip
    assert found.shape == (3, LAYERS if definition.additive else len(ALL_SETS))
    again = entropy.Measured.from_arrays(m.to_arrays())
    assert torch.equal(definition.layers(again), definition.layers(m))
