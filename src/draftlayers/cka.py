"""Debiased linear CKA of two layers, as its formula stands.

Used by tests: it says in a few lines what chapter 04 computes, and the rest is held against it.
Everything is in memory and in float64; ``cka_sums`` computes the same for all pairs of layers and
any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cka(x: Tensor, y: Tensor) -> Tensor:
    """Debiased linear CKA of the same n positions at two boundaries.

    HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019), with the unbiased HSIC of
    Song et al. (2012). Not clamped: unrelated layers may be slightly negative.

    Parameters
    ----------
    x, y
        States ``[n, d]`` and ``[n, e]``, one position a row, n at least 4.

    Returns
    -------
    Tensor
        A number in float64; NaN when a layer's own HSIC is not positive.

    Examples
    --------
    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> turned = 3 * x.flip(1) + 1  # rotated, scaled and shifted
    >>> round(float(cka(x, turned)), 6)
    1.0
    >>> other = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    >>> abs(float(cka(x, other))) < 0.1
    True
    """
    return hsic(x, y) / torch.sqrt(hsic(x, x) * hsic(y, y))


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """The unbiased estimate HSIC_1 of Song et al. (2012, equation 5), linear kernels.

    For Gram matrices K and L with their diagonals set to zero, since a position agrees with itself
    whatever the layer,

        n(n-3) HSIC_1 = tr(KL) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2/(n-2) 1'KL1.

    Parameters
    ----------
    x, y
        ``[n, d]`` and ``[n, e]``.

    Raises
    ------
    ValueError
        With fewer than 4 rows.
    """
    n = len(x)
    if n < 4:
        raise ValueError(f"debiased CKA needs at least 4 rows, got {n}")
    # A shift changes nothing, and small numbers keep their digits.
    k, m = (z @ z.T for z in (x.double() - x.double().mean(0), y.double() - y.double().mean(0)))
    k, m = k.fill_diagonal_(0), m.fill_diagonal_(0)
    total = (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (k.sum(0) @ m.sum(0))) / (n * (n - 3))
