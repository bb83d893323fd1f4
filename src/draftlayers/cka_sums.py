"""Debiased linear CKA of all pairs of layers from sums that only add up.

Used in chapters 02 to 05. It gives what ``cka.cka`` gives for every pair, for any number of layers
and rows, with bootstrap replicates over whole sequences. Which rows are read, and at what cost, is
``cka_pass``'s business.

Each layer is split by an orthogonal basis into its r strongest directions and the rest. What the
strong directions alone contribute is computed **exactly over all pairs of rows**, from r x r
cross-products, which only add up. What is left is small and is estimated **in shuffled blocks** of
rows, as a sum over blocks divided by the number of pairs, never as a mean of ratios (minibatch
form: Nguyen et al. 2021). With r = d nothing is left and the result is exact; the memory it needs
is (layers x r)^2 numbers for each part of the data, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlayers.store import Source

BLOCK = 64  # rows of a shuffled block, at least
BASIS_ROWS = 512  # rows that a basis is fitted to
DOUBLE_BYTES = 2**28  # of the large sums, at most, if they are held in double precision
LONGEST_ROWS = 1e4  # products of rows with themselves over HSIC: 1e-7 of it is rounding
REPLICATES = 4  # whose large sums are formed at once
FLUSH_ROWS = 2048  # rows that wait to be multiplied together
_ADDITIVE = (
    "cross", "sum", "by_norm", "norm_products", "norms", "full_norms", "full_norm_products",
    "full_sum", "count", "rest", "rest_pairs",
)  # fmt: skip


@dataclass(frozen=True)
class Basis:
    """Shift, scale and strong directions of each layer, shared by all sums that are to merge.

    shift ``[layers, d]`` and scale ``[layers]`` only serve precision: CKA does not depend on
    them. vectors ``[layers, d, r]`` are orthonormal columns; None stands for all d directions.
    Any basis gives an unbiased result; a good one leaves little to the blocks.
    """

    shift: Tensor
    scale: Tensor
    vectors: Tensor | None

    @classmethod
    def fit(cls, source: Source, rows: Tensor, rank: int, boundaries: Sequence[int]) -> Basis:
        """Take mean, spread and about the ``rank`` first principal directions of 512 rows.

        Raises
        ------
        ValueError
            When a layer is constant over the rows, or holds NaN or infinite values.
        """
        shifts, scales, vectors = [], [], []
        # One start for all layers, so that copies of a layer get one basis and a CKA of 1.
        start = torch.randn(source.d, rank, generator=torch.Generator().manual_seed(0))
        for boundary in boundaries:
            x = next(source.blocks(rows[:BASIS_ROWS], BASIS_ROWS, [boundary]))[0].float()
            _check_finite(x[None], [boundary])
            mean = x.mean(0)
            x = x - mean
            spread = torch.linalg.vector_norm(x) / len(x) ** 0.5
            if not spread > 1e-6 * mean.norm():
                raise ValueError(
                    f"boundary {boundary} is constant over the rows, so its CKA is undefined; "
                    "leave it out"
                )
            shifts.append(mean)
            scales.append(spread)
            if rank < source.d:  # three subspace iterations; an eigensolver is no better here
                q = start.to(x)
                for _ in range(3):
                    q = torch.linalg.qr(x.T @ (x @ q))[0]
                vectors.append(q)
        return cls(
            torch.stack(shifts), torch.stack(scales), torch.stack(vectors) if vectors else None
        )


def _check_finite(block: Tensor, boundaries: Sequence[int]) -> None:
    bad = [b for b, x in zip(boundaries, block, strict=True) if not torch.isfinite(x).all()]
    if bad:
        raise ValueError(f"NaN or infinite states at boundaries {bad}; collect them again")


@dataclass(frozen=True)
class CKA:
    """Result for one set of rows; all float64 on the CPU, ``[layers, layers]`` unless said.

    matrix
        Debiased CKA; not clamped, so unrelated layers may be slightly negative. NaN for a layer
        whose HSIC_ii is not positive: a few rows outweigh all others, or there are too few.
    biased
        The plug-in estimate, for comparison only: it rises with width / rows.
    se
        Jackknife standard error over parts of whole sequences; None with a single part. What
        blocks estimate is held fixed in it: the error of that estimate comes on top, and is small
        where ``exact_share`` is near 1.
    overlap
        HSIC_ij / (t_i t_j) with t the trace of the covariance: the inner product of the
        trace-normalised covariances. Its diagonal is the purity, 1 / effective rank.
    exact_share
        ``[layers]``; share of HSIC_ii that the exact part holds (1 for exact sums).
    """

    matrix: Tensor
    biased: Tensor
    se: Tensor | None
    overlap: Tensor
    exact_share: Tensor
    n: int
    boundaries: tuple[int, ...]


class CKASums:
    """Additive sums from which debiased CKA follows: ``update``, ``merge``, ``compute``.

    Parameters
    ----------
    basis
        Shared by all accumulators that will be merged.
    boundaries
        Names of the layers, for messages and results.
    parts
        Groups of whole sequences, for jackknife and bootstrap.
    levels
        Nested shares of the rows: level l counts the rows whose ``level`` is at most l.
    block
        Rows of a shuffled block; unused by exact sums.

    Notes
    -----
    Merging is addition, so ranks of a distributed job that share a basis get the result of one
    process up to rounding, whatever the order. Exact sums do not depend on how rows are cut into
    updates either; in the split, the rows of one update are cut into blocks as they come, so
    shuffle them.
    """

    def __init__(
        self,
        basis: Basis,
        boundaries: Sequence[int],
        *,
        parts: int = 1,
        levels: int = 1,
        block: int = BLOCK,
    ):
        self.basis, self.boundaries = basis, tuple(boundaries)
        self.parts, self.levels, self.block = parts, levels, block
        layers, d = basis.shift.shape
        self.layers = layers
        self.rank = d if basis.vectors is None else basis.vectors.shape[2]
        cells, width = parts * levels, layers * self.rank
        device = basis.shift.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        # Few sums are held in double precision: then no row is too long beside the others.
        wide = torch.float64 if cells * width**2 * 8 <= DOUBLE_BYTES else torch.float32
        # Z'Z, upper blocks only
        self.cross = torch.zeros(cells, width, width, device=device, dtype=wide)
        self.sum = zeros(cells, width)  # Z'1
        self.by_norm = zeros(cells, width, layers)  # Z'k
        self.norm_products = zeros(cells, layers, layers)  # k'k, strong directions
        self.norms = zeros(cells, layers)  # k'1, strong directions
        self.full_norms = zeros(cells, layers)  # k'1, all directions
        self.full_norm_products = zeros(levels, layers, layers)
        self.full_sum = zeros(levels, layers, d)
        self.count = zeros(cells)
        self.rest = zeros(levels, layers, layers)  # sum over blocks of m(m-3) HSIC
        self.rest_pairs = zeros(levels)
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def update(
        self, block: Tensor, part: Tensor | None = None, level: Tensor | None = None
    ) -> None:
        """Add rows.

        Parameters
        ----------
        block
            ``[layers, m, d]`` states, any float type; computed in float32.
        part, level
            ``[m]`` group of each row's sequence, and the smallest level the row belongs to.

        Raises
        ------
        ValueError
            When the shape does not fit, or a state is NaN or infinite.
        """
        layers, m, d = block.shape
        if (layers, d) != tuple(self.basis.shift.shape):
            raise ValueError(
                f"expected [layers, m, d] = [{self.layers}, m, {self.basis.shift.shape[1]}], "
                f"got {tuple(block.shape)}"
            )
        device = self.basis.shift.device
        zero = torch.zeros(m, dtype=torch.long)
        part = zero if part is None else part.long()
        level = zero if level is None else level.long()
        z = torch.empty(m, layers, self.rank, device=device)
        full = torch.empty(m, layers, device=device)
        vectors = self.basis.vectors
        split = vectors is not None
        cuts = [(0, m - m % self.block, self.block), (m - m % self.block, m, m % self.block)]
        cuts = [(start, stop, b) for start, stop, b in cuts if b >= 4 and stop > start]
        grams = [torch.empty(layers, (q - p) // b, b, b, device=device) for p, q, b in cuts]
        member = torch.nn.functional.one_hot(level, self.levels).to(device, torch.float32)
        for i, scale in enumerate(self.basis.scale):
            y = (block[i].to(device, torch.float32) - self.basis.shift[i]).div_(scale)
            full[:, i] = torch.linalg.vector_norm(y, dim=1).square()
            by_level = y.sum(0, keepdim=True) if self.levels == 1 else member.T @ y
            self.full_sum[:, i] += by_level.double().cpu()
            z[:, i] = y if vectors is None else y @ vectors[i]
            if split:
                for (p, q, b), gram in zip(cuts, grams, strict=True):
                    rows = y[p:q].view(-1, b, d)
                    torch.bmm(rows, rows.mT, out=gram[i])
        _check_finite(full.T, self.boundaries)
        if split:
            for (p, q, b), gram in zip(cuts, grams, strict=True):
                rows = z[p:q].view(-1, b, layers, self.rank).permute(2, 0, 1, 3)
                self._add_rest(gram, rows @ rows.mT, level[p:q].view(-1, b))
        norms = full.double().cpu()
        cell = level * self.parts + part
        self.full_norms.index_add_(0, cell, norms)
        for top in range(self.levels):
            chosen = norms[level == top]
            self.full_norm_products[top] += chosen.T @ chosen
        self._waiting.append((z.flatten(1), cell))
        if sum(len(c) for _, c in self._waiting) >= FLUSH_ROWS:
            self._flush()

    def _add_rest(self, gram: Tensor, strong: Tensor, level: Tensor) -> None:
        """Add m(m-3) HSIC_1 of each block, of all directions minus the strong ones alone.

        gram and strong ``[layers, blocks, b, b]`` are overwritten, level is ``[blocks, b]``.
        """
        gram.diagonal(dim1=2, dim2=3).zero_()
        strong.diagonal(dim1=2, dim2=3).zero_()
        for top in range(self.levels):
            inside = level <= top
            inside &= inside.sum(1, keepdim=True) >= 4  # fewer rows have no HSIC_1
            m = inside.sum(1).double()
            self.rest_pairs[top] += (m * (m - 3)).sum()
            pairs = None
            if not inside.all():
                pairs = (inside[:, :, None] & inside[:, None]).to(gram)
            self.rest[top] += _block_hsic(gram if pairs is None else gram * pairs, m)
            self.rest[top] -= _block_hsic(strong if pairs is None else strong * pairs, m)

    def _flush(self) -> None:
        if not self._waiting:
            return
        z = torch.cat([z for z, _ in self._waiting])
        cell = torch.cat([c for _, c in self._waiting])
        self._waiting.clear()
        order = cell.argsort(stable=True)
        z = z[order.to(z.device)].to(self.cross.dtype)
        layers, r = self.layers, self.rank
        step = max(1, 512 // r) * r  # strips of layers: only the upper half is computed
        start = 0
        for c, rows in enumerate(cell.bincount(minlength=len(self.count)).tolist()):
            if not rows:
                continue
            x = z[start : start + rows]
            start += rows
            for a in range(0, layers * r, step):
                self.cross[c, a : a + step, a:].addmm_(x[:, a : a + step].T, x[:, a:])
            k = x.view(rows, layers, r).pow(2).sum(2)
            self.sum[c] += x.sum(0, dtype=torch.float64).cpu()
            self.by_norm[c] += (x.T @ k).double().cpu()
            k = k.double().cpu()
            self.norm_products[c] += k.T @ k
            self.norms[c] += k.sum(0)
            self.count[c] += rows

    def merge(self, other: CKASums) -> CKASums:
        """Add the sums of ``other``, collected with the same basis, parts and levels.

        Raises
        ------
        ValueError
            When the two were not set up alike.
        """
        mine, theirs = self.basis, other.basis
        same = (self.parts, self.levels, self.boundaries, self.rank) == (
            other.parts, other.levels, other.boundaries, other.rank,
        ) and torch.equal(mine.shift, theirs.shift)  # fmt: skip
        if not same:
            raise ValueError("sums merge only with the same basis, boundaries, parts and levels")
        self._flush()
        other._flush()
        for name in _ADDITIVE:
            getattr(self, name).add_(getattr(other, name))
        return self

    def compute(self, level: int = -1) -> CKA:
        """CKA of the rows up to ``level`` (default: all rows), with its standard error.

        Raises
        ------
        ValueError
            With fewer than 4 rows.
        """
        level = range(self.levels)[level]
        self._flush()
        everything = torch.ones(1, self.parts)
        hsic, trace, strong = self._hsic(everything, level)
        hsic, trace, strong = hsic[0], trace[0], strong[0]
        n = int(self.count[: (level + 1) * self.parts].sum())
        se = None
        size = self.count.view(self.levels, self.parts)[: level + 1].sum(0)
        used = size.nonzero().flatten()
        if len(used) > 1 and n - size.max() >= 4:
            left_out = self.replicates(1 - torch.eye(self.parts)[used], level)[0]
            g = len(used)
            se = ((left_out - left_out.mean(0)).pow(2).sum(0) * (g - 1) / g).sqrt()
        return CKA(
            matrix=_normalise(hsic),
            biased=_normalise(self._biased(hsic, level, n)),
            se=se,
            overlap=hsic / torch.outer(trace, trace),
            exact_share=strong.diagonal() / hsic.diagonal(),
            n=n,
            boundaries=self.boundaries,
        )

    def replicates(self, weights: Tensor, level: int = -1) -> tuple[Tensor, Tensor]:
        """CKA and overlap when part g counts ``weights[:, g]`` times.

        A row that is drawn twice is never paired with its own copy, so resampling does not
        reintroduce the bias that the estimator removes. What the blocks estimate is held fixed
        and scaled with the layers' traces.

        Parameters
        ----------
        weights
            ``[replicates, parts]``, zero or positive.

        Returns
        -------
        matrix, overlap
            Each ``[replicates, layers, layers]`` float64.
        """
        level = range(self.levels)[level]
        hsic, trace, _ = self._hsic(weights, level)
        return _normalise(hsic), hsic / (trace[:, :, None] * trace[:, None, :])

    def bootstrap_weights(self, times: int, seed: int, level: int = -1) -> Tensor:
        """Multinomial weights ``[times, parts]``: parts drawn with replacement.

        Raises
        ------
        ValueError
            When there are fewer than two parts with rows to draw from.
        """
        level = range(self.levels)[level]
        self._flush()
        size = self.count.view(self.levels, self.parts)[: level + 1].sum(0)
        used = size.nonzero().flatten()
        if len(used) < 2:
            raise ValueError(
                "a bootstrap over sequences needs rows from at least two sequences; "
                "collect more conversations"
            )
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(used), (times, len(used)), generator=generator)
        weights = torch.zeros(times, self.parts)
        weights.scatter_add_(1, used[drawn], torch.ones(drawn.shape))
        return weights

    def _hsic(self, weights: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted HSIC_1 ``[B, L, L]``, traces ``[B, L]`` and the exact part of HSIC_1."""
        self._flush()
        cells = (level + 1) * self.parts
        w = weights.double().repeat(1, level + 1)  # [B, cells]; cells of a level are its parts
        n = (w @ self.count[:cells])[:, None, None]
        if (n < 4).any():
            raise ValueError(f"debiased CKA needs at least 4 rows, got {int(n.min())}")
        flat = self.cross[:cells].view(level + 1, self.parts, -1)
        flat = flat.sum(0) if level else flat[0]
        some = zip(weights.split(REPLICATES), w.split(REPLICATES), n.split(REPLICATES), strict=True)
        strong = torch.cat([self._strong(flat, *few, cells) for few in some])
        trace = self._traces(w, n[:, :, 0], cells, level)
        if self.basis.vectors is None:
            return strong, trace, strong
        everything = torch.ones(1, cells, dtype=torch.float64)
        count = self.count[:cells].sum()
        ratio = trace / self._traces(everything, count, cells, level)
        if self.rest_pairs[level] <= 0:
            raise ValueError("too few rows for one block of at least 4; collect more")
        rest = self.rest[level] / self.rest_pairs[level]
        return strong + rest * ratio[:, :, None] * ratio[:, None, :], trace, strong

    def _strong(self, flat: Tensor, weights: Tensor, w: Tensor, n: Tensor, cells: int) -> Tensor:
        """The exact part of HSIC_1 for a few replicates, whose sums are large."""
        layers, r = self.layers, self.rank
        twice = w.square()
        norms = twice @ self.norms[:cells]
        sums = (w @ self.sum[:cells]).view(-1, layers, r)
        by_norm = (twice @ self.by_norm[:cells].flatten(1)).view(-1, layers, r, layers)
        products = torch.einsum("bc,cij->bij", twice, self.norm_products[:cells])
        cubes = torch.einsum("bc,cij->bij", w.pow(3), self.norm_products[:cells])
        cross = (weights.to(flat) @ flat).view(-1, layers, r, layers, r)
        s = sums.to(cross)
        form = torch.einsum("bia,biajc,bjc->bij", s, cross, s).double().cpu()
        square = cross.square_().sum((2, 4)).double().cpu()
        rows = torch.einsum("bir,birj->bij", sums, by_norm)
        one = sums.square().sum(2) - norms
        inner = _upper(form) - rows - rows.mT + cubes
        strong = _upper(square) - products
        strong += one[:, :, None] * one[:, None, :] / ((n - 1) * (n - 2))
        strong = strong - 2 / (n - 2) * inner
        alone, together = (x.diagonal(dim1=1, dim2=2) for x in (products, strong))
        if cross.dtype != torch.float64 and (alone > LONGEST_ROWS * together).any():
            raise ValueError(
                "a few rows are so much longer than all others that their CKA cannot be summed "
                "in single precision; leave them out, as the filter does with attention sinks"
            )
        return strong / (n * (n - 3))

    def _traces(self, w: Tensor, n: Tensor, cells: int, level: int) -> Tensor:
        """Trace of each layer's covariance, ``[B, L]``."""
        offset = self.full_sum[: level + 1].sum(0) / self.count[:cells].sum()
        return (w @ self.full_norms[:cells] / n - offset.square().sum(1)) * n / (n - 1)

    def _biased(self, hsic: Tensor, level: int, n: int) -> Tensor:
        """The plug-in HSIC, ||X'Y||^2 / n^2 of centred states, from the debiased one."""
        products = self.full_norm_products[: level + 1].sum(0)
        norms = self.full_norms[: (level + 1) * self.parts].sum(0)
        if self.basis.vectors is None:  # exact centring of the norms
            cells = (level + 1) * self.parts
            mean = (self.sum[:cells].sum(0) / n).view(self.layers, self.rank)
            cross = self.cross[:cells].sum(0).view(*mean.shape, *mean.shape)
            offset = mean.to(cross)  # small: the states are shifted close to their mean
            twist = torch.einsum("ia,iajc,jc->ij", offset, cross, offset)
            twist = _upper(twist.double().cpu())
            by = torch.einsum(
                "ia,iaj->ij", mean, self.by_norm[:cells].sum(0).view(*mean.shape, self.layers)
            )
            size = mean.square().sum(1)
            along = n * size  # sum of x . mean over rows
            # sum over rows of (k_i - 2 x_i.m_i + |m_i|^2)(k_j - 2 x_j.m_j + |m_j|^2)
            products = products - 2 * by - 2 * by.T + 4 * twist
            products += torch.outer(norms, size) + torch.outer(size, norms)
            products -= 2 * (torch.outer(along, size) + torch.outer(size, along))
            products += n * torch.outer(size, size)
            norms = norms - n * size
        total = n * (n - 3) * hsic + n / (n - 2) * products
        return total - torch.outer(norms, norms) / ((n - 1) * (n - 2))


def _block_hsic(gram: Tensor, m: Tensor) -> Tensor:
    """Sum over blocks of m(m-3) HSIC_1 of Gram matrices ``[layers, blocks, b, b]``.

    Diagonals, and the rows and columns beyond the ``m [blocks]`` rows that count, are zero.
    """
    flat, row = gram.flatten(1), gram.sum(3)
    total = row.sum(2).double().cpu()
    scaled = row / (m - 2).clamp_min(1).to(row)[:, None]
    hsic = (flat @ flat.T - 2 * scaled.flatten(1) @ row.flatten(1).T).double().cpu()
    hsic += (total / ((m - 1) * (m - 2)).clamp_min(1)) @ total.T
    return (hsic + hsic.T) / 2


def _upper(matrix: Tensor) -> Tensor:
    """Copy the upper triangle over the lower one."""
    return matrix.triu() + matrix.triu(1).mT


def _normalise(hsic: Tensor) -> Tensor:
    scale = hsic.diagonal(dim1=-2, dim2=-1).sqrt()
    return hsic / (scale[..., :, None] * scale[..., None, :])
