"""Packed products equal plain ones, and the module that lends its weights stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftlayers.device import multiplies_bfloat16
from draftlayers.packing import PackedLinear, PackedLinears, can_pack, fastest_rows

native_bfloat16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 products here"),
)


@pytest.mark.parametrize("precision", [torch.float32, native_bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products(rows: int, bias: bool, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(48, 20, bias=bias), nn.Linear(48, 33, bias=bias)]
    packed = PackedLinear(parts, rows, precision)
    tolerance = 1e-5 if precision == torch.float32 else 2e-2
    for shape in [(1, 48), (3, 48), (2, 5, 48), (70, 48)]:
        x = torch.randn(shape)
        expected = torch.cat([part.double()(x.double()) for part in parts], dim=-1)
        found = packed(x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert packed(x).shape == (*shape[:-1], 53)
        for part in parts:
            part.float()


def test_fastest_rows_is_measured_once() -> None:
    weight = torch.randn(64, 32)
    assert fastest_rows(weight) in (1, 2, 4)
    assert fastest_rows(weight) == fastest_rows(torch.randn(64, 32))


def test_packed_linears_are_restored_after_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    expected, packed = module(x), PackedLinears(module)
    with torch.no_grad(), packed.installed():
        torch.testing.assert_close(module(x), expected)
    with pytest.raises(ValueError, match="stop"), packed.installed():
        raise ValueError("stop")
    assert "forward" not in vars(module[0])


def test_packed_copies_of_one_module_nest() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    expected = module(x)
    outer, inner = PackedLinears(module), PackedLinears(module)
    with torch.no_grad(), outer.installed():
        with inner.installed(), inner.installed():
            assert vars(module[0])["forward"] is inner.packed[0][1]
            torch.testing.assert_close(module(x), expected)
        assert vars(module[0])["forward"] is outer.packed[0][1]
        torch.testing.assert_close(module(x), expected)
    assert "forward" not in vars(module[0]) and "forward" not in vars(module[2])


def test_a_forward_that_was_there_before_comes_back() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    packed, own = PackedLinears(module), module[0].forward
    module[0].forward = own  # as hooks of other libraries leave it
    with packed.installed():
        assert vars(module[0])["forward"] is not own
    assert vars(module[0])["forward"] is own and "forward" not in vars(module[1])


def test_what_cannot_be_packed() -> None:
    assert can_pack(nn.Sequential(nn.Linear(8, 8)))
    assert not can_pack(nn.Sequential(nn.Linear(8, 8)).double())
    assert not can_pack(nn.Sequential(nn.LayerNorm(8)))
