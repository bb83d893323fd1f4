"""One pass over collected states, from which the CKA of all pairs of layers follows.

Used in chapters 03 (how CKA moves with the filter) and 04 (the matrix itself). It plans the work,
says what that costs, and feeds rows to ``cka_sums``. Which rows count is ``filtering``'s business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlayers.cka_sums import BASIS_ROWS, BLOCK, FLUSH_ROWS, REPLICATES, Basis, CKASums
from draftlayers.store import Source

SPLIT_RANK = 32
LARGEST_BLOCK = 512
PARTS = 16  # groups of whole sequences that jackknife and bootstrap draw from, at most
FLOP_LIMIT = 1e12
MEMORY_LIMIT = 2e9
_SUMS_BYTES = 700e6
_CHUNK_BYTES = 40e6
_BLOCK_FLOPS = 1e11  # for each share of the rows


@dataclass(frozen=True)
class Plan:
    """How CKA will be computed and what that costs; printed before the work starts.

    ``rank`` directions of each layer are exact (``rank == d``: everything is), the rest is
    estimated in blocks of ``block`` rows.
    """

    n: int
    layers: int
    d: int
    rank: int
    block: int
    flops: float
    peak_bytes: float
    reason: str

    @property
    def exact(self) -> bool:
        """Whether all directions are exact, so that nothing is left for the blocks."""
        return self.rank == self.d

    def __str__(self) -> str:
        how = "exact" if self.exact else f"rank {self.rank} exact, rest in blocks of {self.block}"
        return (
            f"CKA of {self.layers} layers, {self.n:,} rows of {self.d}: {how} ({self.reason}); "
            f"{self.flops:.1e} floating-point operations, "
            f"at most {self.peak_bytes / 1e6:,.0f} MB beside PyTorch itself"
        )


def _chunk_rows(layers: int, d: int, block: int) -> int:
    """Rows read at a time: whole blocks, about 40 MB, at least one block."""
    return max(1, min(1024, int(_CHUNK_BYTES / (4 * layers * d))) // block) * block


def choose_plan(
    n: int,
    layers: int,
    d: int,
    *,
    cells: int = PARTS,
    shares: Sequence[float] = (1.0,),
    flop_limit: float = FLOP_LIMIT,
    memory_limit: float = MEMORY_LIMIT,
) -> Plan:
    """Choose between the exact sums and the split into strong directions and blocks.

    The rule: exact when its operations stay below ``flop_limit`` (1e12, about ten seconds of two
    CPU cores) and its memory below ``memory_limit`` bytes; otherwise rank 32 exactly (halved until
    the sums take 700 MB at most, but not below 8) and the rest in shuffled blocks. Blocks have 64
    rows, doubled up to 512 while they cost at most 1e11 operations a share, and never so few that
    the smallest share has less than 8 rows in one.

    Parameters
    ----------
    n, layers, d
        Rows, boundaries and width.
    cells
        Separate sums kept: parts of the sequences times shares of the rows.
    shares
        Shares of the rows for which CKA is wanted.

    Raises
    ------
    ValueError
        With fewer than 4 rows, or when even the split needs more than ``memory_limit``.
    """
    if n < 4:
        raise ValueError(f"debiased CKA needs at least 4 rows, got {n}")
    block = max(BLOCK, math.ceil(8 / min(shares)))
    pairs = 2 * n * layers * (d + SPLIT_RANK + 2 * layers) * len(shares)
    while 2 * block <= min(LARGEST_BLOCK, n) and 2 * block * pairs <= _BLOCK_FLOPS * len(shares):
        block *= 2

    def cost(rank: int) -> tuple[float, float]:
        width = layers * rank
        chunk = _chunk_rows(layers, d, block)
        flops = n * width**2
        memory = cells * (width**2 + 2 * width * (layers + 1)) * 4  # the sums
        memory += (min(cells, REPLICATES) + 1) * width**2 * 4  # replicates for standard errors
        memory += chunk * layers * d * 6 + 3 * chunk * d * 4  # a chunk as read and in float32
        memory += 3 * min(n, FLUSH_ROWS + chunk) * width * 4  # rows waiting to be multiplied
        if rank < d:
            flops += 2 * n * layers * d * rank + block * pairs
            memory += layers * d * rank * 4 + 4 * layers * chunk * block * 4
            memory += BASIS_ROWS * d * 8
        return float(flops), float(memory)

    flops, memory = cost(d)
    if flops <= flop_limit and memory <= memory_limit:
        return Plan(n, layers, d, d, block, flops, memory, "within the limits for exact sums")
    reason = (
        f"exact sums would take {flops:.1e} operations and {memory / 1e9:.1f} GB, "
        f"the limits are {flop_limit:.0e} and {memory_limit / 1e9:.1f} GB"
    )
    rank = min(SPLIT_RANK, d)
    while rank > 8 and 4 * cells * (layers * rank) ** 2 > _SUMS_BYTES:
        rank //= 2
    flops, memory = cost(rank)
    if memory > memory_limit:
        raise ValueError(
            f"CKA of {layers} layers of width {d} needs {memory / 1e9:.1f} GB in {cells} parts, "
            f"more than the limit of {memory_limit / 1e9:.1f} GB; use fewer layers or parts"
        )
    return Plan(n, layers, d, rank, block, flops, memory, reason)


def deal_parts(sequence: Tensor, seed: int, most: int = PARTS) -> Tensor:
    """Deal whole sequences into at most ``most`` parts.

    Parameters
    ----------
    sequence
        ``[n]`` sequence of each row.
    seed
        Of the order in which sequences are dealt.

    Returns
    -------
    Tensor
        int64 ``[n]``: part of each row, the same for all rows of a sequence.
    """
    names, index = sequence.unique(return_inverse=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    return order[index] % most


def accumulate(
    source: Source,
    rows: Tensor,
    sequence: Tensor,
    *,
    shares: Sequence[float] = (1.0,),
    boundaries: Sequence[int] | None = None,
    how: Plan | None = None,
    parts: int = PARTS,
    seed: int = 0,
) -> CKASums:
    """Collect the sums of all layers over ``rows`` in one pass over the data.

    Parameters
    ----------
    source
        Where states are read, for example a ``StateStore``.
    rows
        ``[n]`` indices into the source. With several shares, ordered by importance: the share q
        counts the first q n of them.
    sequence
        ``[n]`` sequence of each of these rows.
    shares
        Rising shares of the rows, the last one 1; level l of the result is share l.
    boundaries
        Layers to compare; default all of the source.
    how
        A plan from ``choose_plan``; default the plan for this shape.

    Raises
    ------
    ValueError
        With too few rows, constant layers, NaN or infinite states.
    """
    boundaries = tuple(source.boundaries if boundaries is None else boundaries)
    shares = tuple(shares)
    if list(shares) != sorted(set(shares)) or shares[-1] != 1 or shares[0] <= 0:
        raise ValueError(f"shares must rise to 1, got {shares}")
    n = len(rows)
    how = how or choose_plan(n, len(boundaries), source.d, cells=parts * len(shares), shares=shares)
    generator = torch.Generator().manual_seed(seed)
    edges = [0, *(round(n * q) for q in shares)]
    level = torch.zeros(n, dtype=torch.long)
    for index, start in enumerate(edges[1:-1], 1):
        level[start:] = index
    part = deal_parts(sequence, seed, parts)
    # Every block gets its fair number of rows from each level: shuffle inside each level, then
    # put row i of a level of size m at the place i/m, so that a contiguous cut holds all levels.
    place = torch.empty(n, dtype=torch.float64)
    for start, stop in itertools.pairwise(edges):
        shuffled = torch.randperm(stop - start, generator=generator).double()
        place[start:stop] = (shuffled + 0.5) / max(1, stop - start)
    order = place.argsort(stable=True)
    rows, part, level = rows[order], part[order], level[order]
    basis = Basis.fit(source, rows, how.rank, boundaries)
    sums = CKASums(basis, boundaries, parts=parts, levels=len(shares), block=how.block)
    size = _chunk_rows(len(boundaries), source.d, how.block)
    start = 0
    for block in source.blocks(rows, size, boundaries):
        stop = start + block.shape[1]
        sums.update(block, part[start:stop], level[start:stop])
        start = stop
    return sums
