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

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from draftlayers.current import code_digest, digest, libraries, read_record, write_record
from draftlayers.device import dtype_name, join_processes
from draftlayers.entropy import entropy_of_log_probs, in_cache
from draftlayers.project import Say, UserError, quiet, write_atomically
from draftlayers.prompts import Conversation
from draftlayers.store import INDEX, STORED, StateStore, new_shard, shard_name, whole
from draftlayers.targets import Target

SHARD = 32  # conversations in a shard
BATCH = 2048  # tokens in a forward pass
LENS_ROWS = 256  # rows unembedded at once: 256 x 128k logits in float32 are 131 MB


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


def collect(
    target: Target,
    conversations: Sequence[Conversation],
    boundaries: Sequence[int],
    folder: Path,
    *,
    predict: str = "all",
    top: int = 0,
    say: Say = quiet,
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
    boundaries = sorted(set(boundaries))
    if not conversations or not boundaries:
        what = "boundaries" if conversations else "conversations"
        raise UserError(f"there are no {what} to collect hidden states from; give at least one")
    causes = {
        "target": target.digest,
        "precision": f"{target.device.type} {dtype_name(target.dtype)}",
        "predict": predict,
        "top": top,
        "conversations": digest([[c.id, c.tokens, len(c.prompt_ids)] for c in conversations]),
        "code": code_digest("states"),
        "libraries": libraries(),
    }
    store = folder / digest(causes)
    index = read_record(store / INDEX)
    if index is None or not isinstance(index.get("passes"), dict):
        if (store / INDEX).exists():
            say(f"{store / INDEX} is damaged and will be made again")
        index = {"causes": causes, "passes": {}}
    passes: dict[str, list[int]] = {}  # by name; the first one holds what is not of a boundary
    for b, name in index["passes"].items():
        passes.setdefault(name, []).append(int(b))
    if missing := [b for b in boundaries if str(b) not in index["passes"]]:
        # Named by its boundaries, so that a pass which was stopped is never taken for another.
        passes[f"pass-{digest(missing)[:8]}"] = missing
    count = len(_shards(conversations))
    for number, (name, members) in enumerate(passes.items()):
        if all(whole(store / shard_name(n, name)) for n in range(count)) and members != missing:
            continue
        _run_pass(target, conversations, members, store, name, predict, top, number == 0, say)
        rank, world = join_processes()
        if world > 1:
            dist.barrier()  # the index seals the store, so every shard must lie there first
        if rank == 0:
            index["passes"] |= {str(b): name for b in members}
            write_record(store / INDEX, {**index, "shards": count, "d": target.d_model})
        if world > 1:
            dist.barrier()
    return StateStore(store)


def _shards(conversations: Sequence[Conversation]) -> list[range]:
    count = len(conversations)
    return [range(start, min(start + SHARD, count)) for start in range(0, count, SHARD)]


def _run_pass(
    target: Target,
    conversations: Sequence[Conversation],
    boundaries: list[int],
    store: Path,
    name: str,
    predict: str,
    top: int,
    first: bool,
    say: Say,
) -> None:
    """One streaming pass: the shards of this process that are not whole on disk."""
    rank, world = join_processes()
    repeated = duplicates(conversations) if first else []
    done = 0
    shards = _shards(conversations)
    for number, shard in list(enumerate(shards))[rank::world]:
        path = store / shard_name(number, name)
        if not whole(path):
            if path.exists():
                say(f"{path} is damaged and will be made again")
            data, rows = _empty_shard(target, conversations, shard, boundaries, top, first)
            if first:
                rows["duplicate"][:] = torch.cat([repeated[i] for i in shard])
            _collect_shard(
                target, [conversations[i] for i in shard], boundaries, predict, first, rows
            )
            write_atomically(path, data)
            del data, rows  # before the next one is made
        done += sum(len(conversations[i].tokens) for i in shard)
        say(f"hidden states: shard {number + 1} of {len(shards)}, {done:,} positions")


def _empty_shard(
    target: Target,
    conversations: Sequence[Conversation],
    shard: range,
    boundaries: list[int],
    top: int,
    first: bool,
) -> tuple[bytearray, dict[str, Tensor]]:
    """The bytes and rows of a shard, with what is known before the target has seen it."""
    here = [conversations[i] for i in shard]
    lengths = torch.tensor([len(c.tokens) for c in here])
    total = int(lengths.sum())
    columns: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        f"b{b}": (STORED, (total, target.d_model)) for b in boundaries
    } | {f"norm{b}": (torch.float32, (total,)) for b in boundaries}
    if first:
        columns |= {name: (torch.int32, (total,)) for name in ("sequence", "position", "token")}
        columns |= {name: (torch.bool, (total,)) for name in ("answer", "duplicate")}
        columns["predictive_entropy"] = torch.float32, (total,)
        if top:
            columns["top_ids"] = torch.int32, (total, top)
            columns["top_logprobs"] = torch.float16, (total, top)
    data, rows = new_shard(columns)
    if first:
        rows["sequence"][:] = torch.tensor(shard).repeat_interleave(lengths)
        rows["position"][:] = torch.cat([torch.arange(n) for n in lengths.tolist()])
        rows["token"][:] = torch.tensor([t for c in here for t in c.tokens])
        rows["answer"][:] = torch.cat([_predicts_answer(c) for c in here])
        rows["predictive_entropy"].fill_(torch.nan)
        if top:  # what is not filled in, because there are fewer tokens, has no probability
            rows["top_logprobs"].fill_(-torch.inf)
    return data, rows


@torch.inference_mode()
def _collect_shard(
    target: Target,
    conversations: list[Conversation],
    boundaries: list[int],
    predict: str,
    first: bool,
    rows: dict[str, Tensor],
) -> None:
    """Fill in the rows of a few conversations, in their order, from batches of similar length."""
    lengths = [len(c.tokens) for c in conversations]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
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
            _predict(target, final[real_there.to(final.device)], where, rows, predict)


def _predict(
    target: Target, final: Tensor, where: Tensor, rows: dict[str, Tensor], predict: str
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
            rows["predictive_entropy"][here] = entropy_of_log_probs(log_p).cpu()
            if "top_ids" in rows:
                best = log_p.topk(min(rows["top_ids"].shape[1], log_p.shape[-1]), dim=-1)
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
