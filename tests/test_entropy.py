"""Each definition as it stands, against the textbook formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from draftlayers import entropy
from draftlayers.targets import tiny_target


def states(rows: int = 60, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.arange(1, width + 1) ** -0.7
    return 3 * torch.randn(rows, width, generator=generator) * spread + 1


@pytest.mark.parametrize("vocabulary", [7, 1 << 18])  # all rows at once, and two at a time
def test_logits_and_log_probabilities_have_the_same_entropy(vocabulary):
    logits = 4 * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0))
    expected = reference.entropy(reference.softmax(logits.numpy()))
    assert entropy.entropy_of_logits(logits).numpy() == pytest.approx(expected, rel=1e-4)
    log_p = torch.log_softmax(logits, -1)
    assert entropy.entropy_of_log_probs(log_p).numpy() == pytest.approx(expected, rel=1e-4)


def test_forbidden_tokens_contribute_nothing():
    logits = torch.tensor([[0.0, 1.0, float("-inf")], [0.0, 0.0, float("-inf")]])
    expected = reference.entropy(reference.softmax(logits[:, :2].numpy()))
    assert entropy.entropy_of_logits(logits).numpy() == pytest.approx(expected, rel=1e-6)


def test_parts_are_all_rows_in_order():
    logits = torch.arange(6.0)[:, None].expand(6, 1 << 18)
    parts = entropy.in_cache(logits)
    assert [len(part) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat(parts), logits)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
def test_the_logit_lens_does_not_see_the_scale_of_a_layer(architecture):
    # The final norm removes it; a stale scale of another layer would not.
    target = tiny_target(architecture=architecture)
    x = torch.randn(1, 20, target.d_model, generator=torch.Generator().manual_seed(0))
    both = torch.cat([0.01 * x, 100 * x]) * 10
    small, large = entropy.entropy_of_logits(target.unembed(both))
    assert small == pytest.approx(large, rel=2e-3)


def test_features_survive_massive_activations():
    x = states()
    x[3, 5] = 7e4
    x = x.bfloat16()
    found, mass = entropy.feature_softmax(x)
    expected = reference.entropy(reference.softmax(x.double().numpy()))
    assert found.numpy() == pytest.approx(expected, abs=1e-6)
    assert mass[3] == pytest.approx(7e4, rel=3e-3)


@pytest.mark.parametrize("rows", [60, 8])  # more rows than features, and fewer
def test_a_gram_matrix_has_the_spectrum_of_the_covariance(rows):
    x = states(rows)
    gram, operator = entropy.trace_gram(x), reference.trace_normalised(x.numpy())
    assert float(gram.trace()) == pytest.approx(1)
    eye, weight = np.eye(len(operator)), 12 / 0.5**2
    of_covariance = {
        entropy.spectrum_entropy: reference.von_neumann(operator),
        entropy.renyi2_entropy: -np.log(np.trace(operator @ operator)),
        lambda k: entropy.coding_rate(k, width=12, precision=0.5): (
            0.5 * np.linalg.slogdet(eye + weight * operator)[1]
        ),
    }
    for function, expected in of_covariance.items():
        assert float(function(gram)) == pytest.approx(expected, rel=1e-9)
        assert function(torch.stack([gram, gram])).shape == (2,)


def test_a_larger_order_gives_a_smaller_entropy():
    gram = entropy.trace_gram(states())
    assert 0 < entropy.renyi2_entropy(gram) < entropy.spectrum_entropy(gram) < np.log(12)


def test_rows_that_are_all_equal_have_no_spectrum():
    with pytest.raises(ValueError, match="equal"):
        entropy.trace_gram(torch.ones(5, 3))
