"""Hidden-state collection: every boundary of the target, streamed to disk.

Chapter 01 uses it for the positions that statistics are computed on, chapter 06 for those that
heads learn from. One pass over the conversations writes shards of safetensors; a killed
collection goes on at the first missing shard, several processes can share the shards, and
boundaries asked for later are added by a further pass. What rows are used for is left to
``filtering`` and ``training``.

A *row* is one position of one conversation. Its state at boundary b has seen the tokens up to
and including that position, and its *predictive entropy* is the entropy of the target's
distribution of the token after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import Tensor

from draftlayers.corpus import Conversation
from draftlayers.spec import Run, UserError, fingerprint, write_atomically
from draftlayers.targets import Target

STORED = torch.bfloat16  # float32's range, so that massive activations survive
SHARD = 32  # conversations in a shard
BATCH = 2048  # tokens in a forward pass
LENS_ROWS = 256  # rows unembedded at once: 256 x 128k logits in float32 are 131 MB
CACHE_VALUES = 1 << 19  # logits worked on at once: 2 MB in float32
META = ("sequence", "position", "token", "answer", "duplicate", "predictive_entropy")


def duplicates(conversations: Sequence[Conversation]) -> list[Tensor]:
    """Which positions repeat an earlier conversation's tokens from the first one on.

    In a causal model such rows are copies of each other (a system prompt, say), and copies
    inflate every similarity. Returns one bool tensor ``[T]`` for each conversation, true where
    the same prefix was seen before.
    """
    seen: set[int] = set()
    found = []
    for conversation in conversations:
        prefix, flags = 0, []
        for token in conversation.tokens:
            prefix = (prefix * 1_000_003 + token + 1) % ((1 << 61) - 1)
            flags.append(prefix in seen)
            seen.add(prefix)
        found.append(torch.tensor(flags, dtype=torch.bool))
    return found


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy ``[n]`` in nats of the distributions that logits ``[n, V]`` stand for."""
    return torch.cat([_entropy(torch.log_softmax(x.float(), -1)) for x in in_cache(logits)])


def in_cache(logits: Tensor) -> tuple[Tensor, ...]:
    """Parts of ``[n, V]`` small enough to stay in a processor's cache while they are worked on."""
    if logits.device.type != "cpu":
        return (logits,)  # a GPU would spend the time on launching small kernels
    return logits.split(max(1, CACHE_VALUES // logits.shape[-1]))


def _entropy(log_p: Tensor) -> Tensor:
    """Entropy ``[n]`` in nats from log probabilities ``[n, V]`` in float32.

    A forbidden token has minus infinity; clamping it makes its share 0 times a number, not NaN.
    """
    return -torch.linalg.vecdot(log_p.exp(), log_p.clamp_min(-1e4))


def collect(
    target: Target,
    conversations: Sequence[Conversation],
    boundaries: Sequence[int],
    folder: Path,
    *,
    predict: str = "all",
    top: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> StateStore:
    """Write the states of conversations at some boundaries, and read them back as a store.

    Parameters
    ----------
    boundaries
        Which boundaries (0..N). Those that ``folder`` already has are not computed again.
    folder
        Parent folder; the store is a subfolder named by what determines its content.
    predict
        ``"all"`` or ``"answer"``: at which positions the target's next-token distribution is
        computed. Elsewhere the predictive entropy is NaN.
    top
        How many of the most probable next tokens are kept for each such position (0: none).
    say
        Called with one line of progress after each shard.

    Raises
    ------
    UserError
        When there is nothing to collect.
    """
    if not conversations:
        raise UserError("there are no conversations to collect hidden states from")
    boundaries = sorted(set(boundaries))
    identity = fingerprint(
        target.identity, predict, top, [[c.id, c.tokens, len(c.prompt_ids)] for c in conversations]
    )
    store = folder / identity
    index = _read_index(store)
    missing = [b for b in boundaries if str(b) not in index["passes"]]
    if missing or not index["passes"]:
        first = not index["passes"]
        name = f"pass{len(set(index['passes'].values()))}"
        _run_pass(target, conversations, missing, store, name, predict, top, first, say)
        rank, world = join_processes()
        if world > 1:
            dist.barrier()  # the index seals the store, so every shard must lie there first
        if rank == 0:
            index["passes"] |= {str(b): name for b in missing}
            index |= {"shards": len(_shards(conversations)), "d": target.d_model}
            write_atomically(store / "index.json", json.dumps(index, indent=1).encode())
        if world > 1:
            dist.barrier()
    return StateStore(store)


def _shards(conversations: Sequence[Conversation]) -> list[range]:
    count = len(conversations)
    return [range(start, min(start + SHARD, count)) for start in range(0, count, SHARD)]


def _read_index(store: Path) -> dict:
    path = store / "index.json"
    return json.loads(path.read_text()) if path.exists() else {"passes": {}}


def join_processes() -> tuple[int, int]:
    """This process's rank and the number of processes, joining them under ``torchrun``."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), world


def _run_pass(
    target: Target,
    conversations: Sequence[Conversation],
    boundaries: list[int],
    store: Path,
    name: str,
    predict: str,
    top: int,
    first: bool,
    say: Callable[[str], None],
) -> None:
    """One streaming pass: the shards of this process that are not on disk yet."""
    rank, world = join_processes()
    repeated = duplicates(conversations) if first else []
    done = 0
    shards = _shards(conversations)
    for number, shard in list(enumerate(shards))[rank::world]:
        path = store / f"{number:05d}-{name}.safetensors"
        if not path.exists():
            rows = _collect_shard(
                target, [conversations[i] for i in shard], boundaries, predict, top, first
            )
            if first:
                sequence = [
                    torch.full((len(conversations[i].tokens),), i, dtype=torch.int32) for i in shard
                ]
                rows["sequence"] = torch.cat(sequence)
                rows["duplicate"] = torch.cat([repeated[i] for i in shard])
            write_atomically(path, save(rows))
        done += sum(len(conversations[i].tokens) for i in shard)
        say(f"hidden states: shard {number + 1} of {len(shards)}, {done:,} positions")


@torch.inference_mode()
def _collect_shard(
    target: Target,
    conversations: list[Conversation],
    boundaries: list[int],
    predict: str,
    top: int,
    first: bool,
) -> dict[str, Tensor]:
    """All rows of a few conversations, in their order, from batches of similar length."""
    lengths = [len(c.tokens) for c in conversations]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    total = sum(lengths)
    rows: dict[str, Tensor] = {
        f"b{b}": torch.empty(total, target.d_model, dtype=STORED) for b in boundaries
    } | {f"norm{b}": torch.empty(total) for b in boundaries}
    if first:
        rows["predictive_entropy"] = torch.full((total,), float("nan"))
        rows["token"] = torch.tensor([t for c in conversations for t in c.tokens]).int()
        rows["position"] = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        rows["answer"] = torch.cat([_predicts_answer(c) for c in conversations])
        if top:
            rows["top_ids"] = torch.zeros(total, top, dtype=torch.int32)
            rows["top_logprobs"] = torch.zeros(total, top, dtype=torch.float16)
    captured = sorted({*boundaries, target.n_layers} if first else boundaries)
    for batch in batches(lengths):
        longest = max(lengths[i] for i in batch)
        # Padding stands on the right of a causal model, where no real position can see it.
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : lengths[i]] = torch.tensor(conversations[i].tokens)
        real = torch.arange(longest)[None] < torch.tensor([lengths[i] for i in batch])[:, None]
        where = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in batch])
        with target.capture(captured) as states:
            target.decoder(input_ids=ids.to(target.device), use_cache=False)
        real_there = real.to(target.device)
        for b in boundaries:
            kept = states[b][real_there.to(states[b].device)]
            rows[f"b{b}"][where] = kept.to(STORED).cpu()
            rows[f"norm{b}"][where] = kept.float().norm(dim=-1).cpu()
        if first:
            final = states[target.n_layers]
            _predict(target, final[real_there.to(final.device)], where, rows, predict, top)
    return rows


def _predict(
    target: Target, final: Tensor, where: Tensor, rows: dict[str, Tensor], predict: str, top: int
) -> None:
    """Fill in the target's next-token distributions from states ``final [n, d]`` at boundary N."""
    if predict == "answer":
        wanted = rows["answer"][where]
        final, where = final[wanted.to(final.device)], where[wanted]
    for part, place in zip(final.split(LENS_ROWS), where.split(LENS_ROWS), strict=True):
        done = 0
        for logits in in_cache(target.unembed(part)):
            log_p = torch.log_softmax(logits.float(), -1)
            here = place[done : done + len(logits)]
            done += len(logits)
            rows["predictive_entropy"][here] = _entropy(log_p).cpu()
            if top:
                best = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
                rows["top_ids"][here, : best.indices.shape[1]] = best.indices.int().cpu()
                rows["top_logprobs"][here, : best.values.shape[1]] = best.values.half().cpu()


def _predicts_answer(conversation: Conversation) -> Tensor:
    """Rows whose next token belongs to the answer: the last of the prompt to the last but one."""
    flags = torch.zeros(len(conversation.tokens), dtype=torch.bool)
    flags[len(conversation.prompt_ids) - 1 : -1] = True
    return flags


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Group sequences of similar length so that a padded batch holds at most ``BATCH`` tokens."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[i] > BATCH:
            yield batch
            batch = []
        batch.append(i)
    yield batch


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
        index = _read_index(folder)
        if not index["passes"]:
            raise UserError(f"{folder} holds no finished collection of hidden states")
        self.folder, self.d = folder, index["d"]
        self._passes = {int(b): name for b, name in index["passes"].items()}
        self.boundaries = tuple(sorted(self._passes))
        # Tensors of the shards are views of memory-mapped files: nothing is read until it is used.
        self._shards: list[dict[str, Tensor]] = []
        for number in range(index["shards"]):
            shard: dict[str, Tensor] = {}
            for name in sorted(set(self._passes.values())):
                shard |= load_file(folder / f"{number:05d}-{name}.safetensors")
            self._shards.append(shard)
        self.meta = {name: self._column(name) for name in META}
        self.n = len(self.meta["token"])
        self.norms = torch.stack([self._column(f"norm{b}") for b in self.boundaries])
        sizes = torch.tensor([len(shard["token"]) for shard in self._shards])
        self._ends = sizes.cumsum(0)

    def _column(self, key: str) -> Tensor:
        return torch.cat([shard[key] for shard in self._shards])

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
        owner = torch.bucketize(rows, self._ends, right=True)
        for number in owner.unique().tolist():
            here = (owner == number).nonzero()[:, 0]
            shard = self._shards[number]
            local = rows[here] - (self._ends[number] - len(shard["token"]))
            for i, b in enumerate(boundaries):
                out[i, here] = shard[f"b{b}"][local]
        return out

    def blocks(
        self, rows: Tensor, size: int, boundaries: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """Float32 blocks ``[L, <= size, d]`` of rows in the given order."""
        for part in rows.split(size):
            yield self.gather(part, boundaries).float()


def stored(run: Run) -> StateStore:
    """The states that chapter 01 collected for the statistics of a run."""
    return StateStore(run.folder / run.results("01-hidden-states")["store"])
