"""The formula as it stands: against U-centred matrices, and against the sums over many layers."""

from __future__ import annotations

import doctest

import pytest
import reference
import torch

from draftlayers import cka, entropy
from draftlayers.cka_pass import accumulate
from draftlayers.store import ArraySource


@pytest.mark.parametrize("module", [cka, entropy])
def test_the_examples_hold(module):
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def layers(rows: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(rows, 10, generator=generator)
    turn = torch.randn(10, 10, generator=generator)
    second = first @ turn + torch.randn(rows, 10, generator=generator)
    return torch.stack([first, second, torch.randn(rows, 10, generator=generator)]) + 5


def test_it_is_the_unbiased_estimate():
    x, y, z = layers()
    for a, b in ((x, y), (x, z), (y, y)):
        assert float(cka.hsic(a, b)) == pytest.approx(reference.hsic_debiased(a, b), rel=1e-9)
    assert float(cka.cka(x, x)) == pytest.approx(1)
    assert abs(float(cka.cka(x, z))) < 0.15 < float(cka.cka(x, y))


def test_the_sums_give_it_for_every_pair():
    states = layers()
    rows = torch.arange(states.shape[1])
    found = accumulate(ArraySource(states), rows, rows // 9).compute().matrix
    for i, x in enumerate(states):
        for j, y in enumerate(states):
            assert float(found[i, j]) == pytest.approx(float(cka.cka(x, y)), abs=1e-5)


def test_three_rows_are_too_few():
    with pytest.raises(ValueError, match="at least 4 rows"):
        cka.cka(torch.randn(3, 2), torch.randn(3, 2))
