"""Rows of states, read a block at a time: on disk (``StateStore``) or in memory.

Used by everything that computes on hidden states, in chapters 02 to 06. A *row* is one position of
one conversation. How states get to disk is left to ``states``; what rows mean to ``filtering`` and
``examples``.

Shards are memory-mapped, so that only what is asked for is read. What was read through a mapping
counts as memory of the process until it is let go, though the system could take it away at any
time: a store larger than ``MAPPED`` lets go of it whenever about as much has been read.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlayers.current import read_record
from draftlayers.project import UserError
from draftlayers.runs import Run

STORED = torch.bfloat16  # float32's range, so that massive activations survive
INDEX = "index.json"  # written last: it seals a store
MAPPED = 256_000_000  # bytes of a store's files that are held mapped, about
AROUND = 1 << 21  # bytes that may come along with each that is read: Linux maps huge pages whole
META = ("sequence", "position", "token", "answer", "duplicate", "predictive_entropy")


class Source(Protocol):
    """Anything that yields rows of states."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries at hand."""

    @property
    def d(self) -> int:
        """Width of a state."""

    def blocks(
        self, rows: Tensor, size: int, boundaries: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """Float32 blocks ``[L, <= size, d]`` of rows in the given order."""


class ArraySource:
    """States already in memory, ``[layers, rows, d]``, read like a store on disk."""

    def __init__(self, states: Tensor, boundaries: Sequence[int] | None = None):
        if states.ndim != 3:
            raise ValueError(f"states must be [layers, rows, d], got shape {tuple(states.shape)}")
        self.states = states
        self.boundaries = tuple(boundaries or range(states.shape[0]))
        self.d = states.shape[2]

    def blocks(
        self, rows: Tensor, size: int, boundaries: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """Yield float32 ``[layers, <= size, d]`` in the order of ``rows``.

        Raises
        ------
        UserError
            When a boundary is not at hand.
        """
        wanted = self.boundaries if boundaries is None else boundaries
        if absent := [b for b in wanted if b not in self.boundaries]:
            raise UserError(f"boundaries {absent} are not among {list(self.boundaries)}")
        index = [self.boundaries.index(b) for b in wanted]
        for part in rows.split(size):
            yield torch.stack([self.states[i, part] for i in index]).float()


def shard_name(number: int, name: str) -> str:
    """File of a shard of a pass."""
    return f"{number:05d}-{name}.safetensors"


TYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
}


def _read(path: Path) -> tuple[mmap.mmap, dict[str, Tensor]]:
    """A shard's file, mapped, and its tensors as views of it."""
    try:
        with safe_open(path, "pt"), path.open("rb") as file:  # which checks that nothing is missing
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            # Private, and never written to; a mapping that cannot be written to makes torch warn.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, SafetensorError, ValueError) as err:
        raise UserError(
            f"{path} is damaged ({err}); delete it, and chapter 01 or 06 will collect it again"
        ) from err
    header.pop("__metadata__", None)
    return mapping, _views(mapping, header, 8 + size)


def _views(
    buffer: mmap.mmap | bytearray, header: Mapping[str, Any], base: int
) -> dict[str, Tensor]:
    """Tensors of a file that lies in memory, as its header names them."""
    tensors = {}
    for name, entry in header.items():
        shape, start = entry["shape"], base + entry["data_offsets"][0]
        flat = torch.frombuffer(
            buffer, dtype=TYPES[entry["dtype"]], count=math.prod(shape), offset=start
        )
        tensors[name] = flat.view(shape)
    return tensors


def new_shard(
    columns: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytearray, dict[str, Tensor]]:
    """A shard to be filled in: the bytes of its file, and its tensors, zeros, as views of them.

    So it is written as it lies, and nothing of it is ever there twice.

    Parameters
    ----------
    columns
        Type and shape of each tensor.
    """
    codes = {dtype: code for code, dtype in TYPES.items()}
    header, end = {}, 0
    # Wide numbers first, so that each tensor begins at a multiple of what its numbers take.
    for name in sorted(columns, key=lambda name: (-columns[name][0].itemsize, name)):
        dtype, shape = columns[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    data = bytearray(len(head) + end)
    data[: len(head)] = head
    return data, _views(data, header, len(head))


def whole(path: Path) -> bool:
    """Whether there is a file of tensors, and nothing of it is missing."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


class StateStore:
    """States on disk, read a boundary at a time.

    Attributes
    ----------
    boundaries : tuple of int
        Boundaries at hand.
    n, d : int
        Rows and width.
    meta : dict of Tensor
        ``sequence``, ``position``, ``token`` int32; ``answer`` bool (the token after this row
        belongs to the answer); ``duplicate`` bool; ``predictive_entropy`` float32 nats, NaN
        where it was not computed. Each of length n.
    norms : Tensor
        Euclidean norms ``[len(boundaries), n]`` in float32, taken before rounding.
    """

    def __init__(self, folder: Path):
        index = read_record(folder / INDEX)
        if not index or not {"passes", "shards", "d"} <= index.keys():
            raise UserError(
                f"{folder} holds no finished collection of hidden states: expected {INDEX}, which "
                "is written last; run chapter 01, or whatever collects them, again"
            )
        self.folder, self.d = folder, index["d"]
        self._passes = {int(b): name for b, name in index["passes"].items()}
        self.boundaries = tuple(sorted(self._passes))
        # Tensors of the shards are views of memory-mapped files: nothing is read until it is used.
        self._shards: list[dict[str, Tensor]] = []
        self._mappings: list[mmap.mmap] = []
        self._held = 0  # bytes of the mappings that count as memory now, at most
        for number in range(index["shards"]):
            shard: dict[str, Tensor] = {}
            for name in sorted(set(self._passes.values())):
                mapping, tensors = _read(folder / shard_name(number, name))
                self._mappings.append(mapping)
                shard |= tensors
            self._shards.append(shard)
        self.meta = {name: self._column(name) for name in META}
        self.n = len(self.meta["token"])
        self.norms = torch.stack([self._column(f"norm{b}") for b in self.boundaries])
        sizes = torch.tensor([len(shard["token"]) for shard in self._shards])
        self._ends = sizes.cumsum(0)
        self._starts = self._ends - sizes

    def _column(self, key: str) -> Tensor:
        column = torch.cat([shard[key] for shard in self._shards])
        self._hold(column.nbytes + len(self._shards) * AROUND)
        return column

    def _hold(self, count: int) -> None:
        """Note that so many bytes of the mappings were read, and let go when there are many."""
        self._held += count
        if self._held > MAPPED:
            self._held = 0
            if sum(map(len, self._mappings)) > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
                for mapping in self._mappings:
                    mapping.madvise(mmap.MADV_DONTNEED)  # the views stay good and read again

    @property
    def top_ids(self) -> Tensor:
        """Most probable next tokens, int32 ``[n, top]``; zeros where not computed."""
        return self._column("top_ids")

    @property
    def top_logprobs(self) -> Tensor:
        """Their natural log probabilities, float16 ``[n, top]``."""
        return self._column("top_logprobs")

    def load(self, boundary: int, rows: Tensor | None = None) -> Tensor:
        """States ``[n, d]`` of one boundary in bfloat16, or those of some rows.

        Raises
        ------
        UserError
            When the boundary was not collected.
        """
        rows = torch.arange(self.n) if rows is None else rows
        return self.gather(rows, [boundary])[0]

    def gather(self, rows: Tensor, boundaries: Sequence[int] | None = None) -> Tensor:
        """States ``[L, len(rows), d]`` in bfloat16 of some rows at some (default all) boundaries.

        Raises
        ------
        UserError
            When a boundary was not collected.
        """
        boundaries = self.boundaries if boundaries is None else boundaries
        for b in boundaries:
            if b not in self._passes:
                raise UserError(f"boundary {b} was not collected; there are {self.boundaries}")
        out = torch.empty(len(boundaries), len(rows), self.d, dtype=STORED)
        self._fill(rows, {f"b{b}": out[i] for i, b in enumerate(boundaries)})
        return out

    def distributions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``top_ids`` and ``top_logprobs`` of some rows, ``[len(rows), top]``."""
        first = self._shards[0]
        shape = len(rows), first["top_ids"].shape[1]
        found = {k: torch.empty(shape, dtype=first[k].dtype) for k in ("top_ids", "top_logprobs")}
        self._fill(rows, found)
        return found["top_ids"], found["top_logprobs"]

    def _fill(self, rows: Tensor, wanted: Mapping[str, Tensor]) -> None:
        """Copy rows of the named tensors of the shards to tensors of their own."""
        for number, there, here in self._pieces(rows):
            for name, out in wanted.items():
                tensor = self._shards[number][name]
                found = tensor[here]
                out[there] = found
                reads = 1 if isinstance(here, slice) else len(here)
                self._hold(min(tensor.nbytes, found.nbytes + reads * AROUND) + AROUND)

    def _pieces(self, rows: Tensor) -> Iterator[tuple[int, slice | Tensor, slice | Tensor]]:
        """What is copied at once: number of a shard, places in ``rows``, and rows of the shard."""
        owner = torch.bucketize(rows, self._ends, right=True)
        breaks = ((rows.diff() != 1) | (owner.diff() != 0)).nonzero()[:, 0] + 1
        if 10 * len(breaks) < len(rows):  # whole conversations, or nearly: copied as they lie
            for start, stop in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
                number = int(owner[start])
                first = int(rows[start] - self._starts[number])
                yield number, slice(start, stop), slice(first, first + stop - start)
        else:
            for number in owner.unique().tolist():
                there = (owner == number).nonzero()[:, 0]
                yield number, there, rows[there] - self._starts[number]

    def blocks(
        self, rows: Tensor, size: int, boundaries: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """Float32 blocks ``[L, <= size, d]`` of rows in the given order."""
        for part in rows.split(size):
            yield self.gather(part, boundaries).float()


def stored(run: Run) -> StateStore:
    """The states that chapter 01 collected for the statistics of a run."""
    return StateStore(run.path(run.results("01-hidden-states")["store"]))
