"""Writing: the target continues many sequences at once, and takes in a new one when one ends.

Used by chapter 01 for the questions that the target asks itself (``asking``) and for its answers
(``answers``). Each request has its own limit, temperature and seed. Passes are those of the engine
with packed weights where it has them, and the library's own decoder elsewhere. Nothing is checked
here but ends: what a text is worth is left to those who ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from draftlayers.contexts import cached_limit
from draftlayers.device import multiplies_bfloat16
from draftlayers.engine import Engine, decodable
from draftlayers.packing import PackedLinears, can_pack
from draftlayers.passes import LlamaPass
from draftlayers.targets import Target

STREAMS = 128  # sequences that are written side by side
# New ones are read when so many places are free: few at a time would cost a pass each.
ENTER_TOGETHER = 8
# Prompt tokens of a pass, padding included: states of more would leave the processor's cache.
ENTER_TOKENS = 1024
PIECE = 16  # sequences of about the same length, which read no more of the cache than they need
UNUSED = 64  # columns that no sequence needs any more are dropped when there are so many
BLOCK = 256  # tokens whose probabilities are added up before any is looked at alone


@dataclass(frozen=True)
class Request:
    """A sequence to be continued.

    Attributes
    ----------
    ids
        Token ids to begin with.
    limit
        New tokens at most.
    temperature
        Of the sampling; 0 is greedy.
    seed
        Of its own random numbers, so that what is written does not depend on its neighbours.
    ended
        Told the new tokens so far after each one: whether to stop here. The target's tokens that
        end an answer always do.
    """

    ids: Sequence[int]
    limit: int
    temperature: float = 0.0
    seed: int = 0
    ended: Callable[[list[int]], bool] | None = None


class Writes(Protocol):
    """Anything that continues sequences: ``Writer``, or a server (``served.Served``)."""

    def write(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """Number of a request and its new tokens, as they are finished."""


@dataclass
class _Stream:
    """A request that is being written."""

    place: int
    request: Request
    room: int
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)


class _Columns(DynamicLayer):
    """Keys and values ``[rows, heads, columns, width]`` of one layer, in memory with room to grow.

    All sequences end at the same column, so a pass writes one block; what lies to the left of a
    sequence's beginning is of others before it, and masked.
    """

    spare = (0, 0)  # rows and columns that there will be: memory that grows step by step is torn

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.rooms = [
            new.new_zeros(*new.shape[:2], 0, new.shape[3]) for new in (key_states, value_states)
        ]
        self.rows, self.filled = key_states.shape[0], 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        self._make_room(self.rows, self.filled)
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[: self.rows, :, start : self.filled] = new
        return self._view()

    def get_seq_length(self) -> int:
        return self.filled if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and forget the others."""
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        if moved:
            places, sources = (torch.tensor(x) for x in zip(*moved, strict=True))
            for room in self.rooms:
                room[places, :, : self.filled] = room[sources, :, : self.filled]
        self.rows = len(rows)
        self._view()

    def join(self, other: _Columns) -> None:
        """Take in further sequences, which end where these do."""
        first, shift = self.rows, max(0, other.filled - self.filled)
        self._make_room(self.rows + other.rows, self.filled + shift)
        if shift:
            self._shift(shift)
        start = self.filled - other.filled
        for room, new in zip(self.rooms, other.rooms, strict=True):
            room[first : first + other.rows, :, start : self.filled] = new[:, :, : other.filled]
        self.rows += other.rows
        self._view()

    def forget(self, columns: int) -> None:
        """Drop the first columns, which no sequence needs any more."""
        self._shift(-columns)
        self._view()

    def _shift(self, columns: int) -> None:
        start, end = max(0, -columns), self.filled
        for room in self.rooms:
            held = room[: self.rows, :, start:end].clone()
            room[: self.rows, :, start + columns : end + columns] = held
        self.filled += columns

    def _make_room(self, rows: int, columns: int) -> None:
        for i, room in enumerate(self.rooms):
            if rows > room.shape[0] or columns > room.shape[2]:
                rows = max(rows, room.shape[0], self.spare[0])
                columns = max(columns, room.shape[2], self.spare[1])
                larger = room.new_zeros(rows, room.shape[1], columns, room.shape[3])
                larger[: room.shape[0], :, : room.shape[2]] = room
                self.rooms[i] = larger

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[: self.rows, :, : self.filled] for room in self.rooms)
        return self.keys, self.values


class Writer:
    """Continues sequences with one target.

    Parameters
    ----------
    target
        What writes, in its own precision.
    streams
        Sequences side by side at most.
    packed
        Use packed weights where they can be.

    Attributes
    ----------
    way
        How passes are run, in words.
    """

    def __init__(self, target: Target, streams: int = STREAMS, packed: bool = True):
        self.target, self.streams = target, streams
        self.limit, _ = cached_limit(target.config, target.context_limit)
        self.eos = target.eos_ids
        self.lean: LlamaPass | None = None
        self.linears: PackedLinears | None = None
        self.way = "Hugging Face decoder"
        if packed and can_pack(target.model):
            self._pack()

    def _pack(self) -> None:
        """Take over the engine's lean pass where the engine found it right, or packed weights."""
        if LlamaPass.fits(self.target, True) and not decodable(self.target.config):
            engine = Engine(self.target)
            if isinstance(engine.passes, LlamaPass):
                self.lean, self.way = engine.passes, engine.way
                self.limit = engine.limit
                return
        self.linears = PackedLinears(self.target.model)
        self.way += ", packed weights"

    @torch.inference_mode()
    def write(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """Continue each sequence until it ends.

        Yields
        ------
        (int, list of int)
            Number of a request and its new tokens, the one that ended it included, as they are
            finished.
        """
        waiting = [
            _Stream(i, r, min(r.limit, self.limit - len(r.ids)), _generator(r.seed))
            for i, r in enumerate(requests)
        ]
        waiting.reverse()
        with self.linears.installed() if self.linears else nullcontext():
            longest = max((len(s.request.ids) + s.room for s in waiting), default=0)
            rows = _Rows(self, (min(self.streams, len(waiting)), longest + UNUSED))
            while waiting or rows.streams:
                free = self.streams - len(rows.streams)
                joins = not rows.streams or (rows.can_join and free >= ENTER_TOGETHER)
                if waiting and joins:
                    group = _together(waiting, free)
                    rows.enter(group)
                else:
                    rows.step()
                yield from rows.leave()


def precision(target: Target) -> torch.dtype:
    """What a target's answers are written in: bfloat16 where the processor multiplies it."""
    lowers = target.dtype == torch.float32 and multiplies_bfloat16() and can_pack(target.model)
    return torch.bfloat16 if lowers else target.dtype


def fast_twin(target: Target) -> Target:
    """The target itself, or a copy of it in the precision in which answers are written."""
    return target if target.dtype == precision(target) else target.in_precision(precision(target))


def _together(waiting: list[_Stream], free: int) -> list[_Stream]:
    """Take the next requests that are read in one pass."""
    group = [waiting.pop()]
    longest = len(group[0].request.ids)
    while waiting and len(group) < free:
        longest = max(longest, len(waiting[-1].request.ids))
        if longest * (len(group) + 1) > ENTER_TOKENS:
            break
        group.append(waiting.pop())
    return group


class _Rows:
    """The sequences that are being written: their streams, cache, and where each begins."""

    def __init__(self, writer: Writer, spare: tuple[int, int]):
        self.spare = spare
        self.writer, self.target, self.device = writer, writer.target, writer.target.device
        self.streams: list[_Stream] = []
        self.starts: list[int] = []  # first column of each
        self.columns = 0
        self.cache = self._new_cache()

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.target.model.config)
        # Layers that carry states of another kind cannot take in a further sequence.
        kinds = {type(layer) for layer in cache.layers}
        self.can_join = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        if self.can_join:
            for i in range(len(cache.layers)):
                cache.layers[i] = cast(Any, _Columns)()  # the library's __init__ has no types
        return cache

    @property
    def layers(self) -> list[_Columns]:
        """The layers of a cache that sequences can join."""
        return cast(list[_Columns], self.cache.layers)

    def enter(self, streams: list[_Stream]) -> None:
        """Read the beginnings of further sequences, and write their first tokens."""
        longest = max(len(stream.request.ids) for stream in streams)
        # What pads a prompt is masked; the tokenizer's own pad token may lie beyond the embedding.
        pads = [longest - len(stream.request.ids) for stream in streams]
        prompts = [[0] * pad + list(s.request.ids) for pad, s in zip(pads, streams, strict=True)]
        cache = self._new_cache()
        logits = self._read(torch.tensor(prompts, device=self.device), pads, 0, cache)
        if not self.streams:
            self.cache, self.columns, self.starts = cache, longest, pads
            for layer in self.layers if self.can_join else ():
                layer.spare = self.spare
        else:
            for layer, new in zip(self.layers, cast(list[_Columns], cache.layers), strict=True):
                layer.join(new)
            shift = max(0, longest - self.columns)
            self.columns += shift
            self.starts = [start + shift for start in self.starts]
            self.starts += [self.columns - longest + pad for pad in pads]
        self.streams += streams
        _sample(logits, streams)
        if self.can_join:
            self._arrange(sorted(range(len(self.streams)), key=self.starts.__getitem__))

    def step(self) -> None:
        """Write one token to each sequence."""
        tokens = torch.tensor([[s.tokens[-1]] for s in self.streams], device=self.device)
        unused = min(self.starts)
        if self.can_join and unused >= UNUSED:
            for layer in self.layers:
                layer.forget(unused)
            self.columns -= unused
            self.starts = [start - unused for start in self.starts]
        logits = self._read(tokens, self.starts, self.columns, self.cache)
        self.columns += 1
        _sample(logits, self.streams)

    def leave(self) -> Iterator[tuple[int, list[int]]]:
        """Let go of the sequences that have ended, and give them back."""
        eos = self.writer.eos
        over = [
            s.tokens[-1] in eos
            or len(s.tokens) >= s.room
            or (s.request.ended is not None and s.request.ended(s.tokens))
            for s in self.streams
        ]
        if not any(over):
            return
        yield from ((s.place, s.tokens) for s, end in zip(self.streams, over, strict=True) if end)
        keep = [row for row, end in enumerate(over) if not end]
        if self.can_join:  # those at the end take the empty places, so that few rows are copied
            count = len(keep)
            spare = iter([row for row in reversed(keep) if row >= count])
            keep = [row if not over[row] else next(spare) for row in range(count)]
        self._arrange(keep)

    def _arrange(self, order: list[int]) -> None:
        """Keep these sequences, in this order, and forget the others."""
        if self.can_join:
            for layer in self.layers:
                layer.keep(order)
        elif order:
            rows = torch.tensor(order, device=self.device)
            self.cache.reorder_cache(cast(torch.LongTensor, rows))
        self.streams = [self.streams[row] for row in order]
        self.starts = [self.starts[row] for row in order]

    def _read(self, tokens: Tensor, starts: list[int], before: int, cache: DynamicCache) -> Tensor:
        """Logits ``[B, V]`` after new tokens ``[B, n]``, of which those before a start are none."""
        n, first = tokens.shape[1], torch.tensor(starts, device=self.device)[:, None]
        columns = torch.arange(before + n, device=self.device)[None]
        live = columns >= first
        positions = (columns[:, before:] - first).clamp(min=0)
        if lean := self.writer.lean:
            visible = live[:, None]
            if n > 1:
                visible = visible & (columns <= columns[:, before:, None])[0]
                visible = visible | (columns == columns[:, before:, None])[0]  # padding: itself
            rows = [slice(row, row + PIECE) for row in range(0, len(starts), PIECE)]
            pieces = [(some, min(starts[some])) for some in rows]
            return lean.logits(lean.run(tokens, positions, visible, cache, pieces)[-1][:, -1])
        states = self.target.decoder(
            input_ids=tokens,
            attention_mask=live.long(),
            position_ids=positions,
            use_cache=True,
            **{self.target.cache_name: cache},
        ).last_hidden_state[:, -1]
        return self.target.output_logits(states)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sample(logits: Tensor, streams: Sequence[_Stream]) -> None:
    """Write the next token of each stream: the likeliest, or one drawn at its temperature."""
    tokens = logits.argmax(-1)
    warm = [i for i, stream in enumerate(streams) if stream.request.temperature > 0]
    if warm:
        draws = [torch.rand(1, dtype=torch.float64, generator=streams[i].generator) for i in warm]
        heats = [streams[i].request.temperature for i in warm]
        chosen = draw(logits[warm], heats, torch.cat(draws).to(logits.device))
        tokens[torch.tensor(warm, device=tokens.device)] = chosen
    for stream, token in zip(streams, tokens.tolist(), strict=True):
        stream.tokens.append(token)


def draw(logits: Tensor, temperatures: Sequence[float], uniform: Tensor) -> Tensor:
    """Tokens drawn by inverting the cumulative distribution.

    Parameters
    ----------
    logits
        float32 ``[B, V]``.
    temperatures
        One for each row, above 0.
    uniform
        float64 ``[B]`` in [0, 1).

    Returns
    -------
    Tensor
        int64 ``[B]``.

    Examples
    --------
    >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> [draw(logits, [1.0], torch.tensor([u], dtype=torch.float64)).item() for u in (0.4, 0.6)]
    [0, 1]
    """
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    mass = torch.softmax(logits / heat, -1)
    vocabulary = mass.shape[1]
    mass = torch.nn.functional.pad(mass, (0, -vocabulary % BLOCK)).view(len(mass), -1, BLOCK)
    # Sums of blocks first: adding up all of a vocabulary in double precision takes long.
    blocks = mass.sum(-1, dtype=torch.float64).cumsum(-1)
    aim = uniform[:, None] * blocks[:, -1:]
    block = torch.searchsorted(blocks, aim, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(mass), device=mass.device)
    inside = mass[rows, block[:, 0]].double().cumsum(-1)
    at = torch.searchsorted(inside, aim - before, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + at)[:, 0].clamp(max=vocabulary - 1)
