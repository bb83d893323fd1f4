"""Training of draft heads by EAGLE-3's training-time test, on states collected beforehand.

Used in chapter 06. The target never runs here: its hidden states and its next-token
distributions come from a ``StateStore``, so one collection serves every layer set, and all
heads of a study see the same data in the same order. What a head is belongs to ``head``; what it
is worth in real decoding is measured in ``decoding``.

The training-time test (arXiv:2503.01840, Section 3.2; ``eagle/traineagle3/cnets.py``) lets the
head meet its own outputs while it learns. Step 0 reads the target's states. Step i reads the
head's own state of step i-1 at the same index and the next token of the text, and its attention
sees the true context up to that index plus its own chain. In a picture, for queries at indices
0..3 at step 2 (``x`` may be seen, one column block per step)::

    step 0   step 1   step 2
    x . . .  x . . .  x . . .
    x x . .  . x . .  . x . .
    x x x .  . . x .  . . x .
    x x x x  . . . x  . . . x

Only indices whose guesses are answer tokens are computed beyond keys and values, which is exact
and saves most of the work on prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from draftlayers.head import DraftHead, HeadConfig, start_at_random, start_from_target
from draftlayers.spec import RunSpec, UserError, fingerprint, write_atomically

if TYPE_CHECKING:
    from draftlayers.states import StateStore
    from draftlayers.targets import Target

STEP_WEIGHT = 0.8  # weight of step i is this to the power i, as in EAGLE-3's code
CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class TrainingSettings:
    """How a head is trained; the same for every layer set of a comparison.

    Attributes
    ----------
    epochs
        Passes over the training conversations; fractions are allowed.
    batch_tokens
        Answer tokens of an update, about.
    learning_rate
        Peak of AdamW's learning rate, after a linear warm-up and before a cosine to zero.
    ttt_steps
        Steps of the training-time test.
    start
        ``"target"`` (the target's last layer) or ``"random"``.
    train_lm_head
        Whether the output matrix learns, as in EAGLE-3's code, or stays as it starts.
    warmup
        Share of all updates spent warming up.
    clip
        Largest norm of the gradient.
    betas, weight_decay
        AdamW's.
    """

    epochs: float
    batch_tokens: int
    learning_rate: float
    ttt_steps: int
    start: str = "target"
    train_lm_head: bool = True
    warmup: float = 0.05
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0

    @classmethod
    def from_spec(cls, spec: RunSpec) -> TrainingSettings:
        """The settings that a run's spec asks for."""
        return cls(
            epochs=spec.head_epochs,
            batch_tokens=spec.batch_tokens,
            learning_rate=spec.learning_rate,
            ttt_steps=spec.ttt_steps,
            start=spec.head_start,
            train_lm_head=spec.train_lm_head,
        )


def draft_vocabulary(answers: Tensor, size: int) -> Tensor:
    """The most frequent tokens of the training answers, as ascending ids.

    Parameters
    ----------
    answers
        Token ids of all training answers, int ``[n]``.
    size
        Tokens wanted. Fewer are returned when the answers hold fewer different tokens: a token
        that was never seen cannot be learned, and would only make the output matrix slower.

    Returns
    -------
    Tensor
        int64 ``[D]``, ascending; ties go to the lower id.
    """
    ids, counts = answers.to(torch.int64).unique(return_counts=True)
    order = counts.sort(descending=True, stable=True).indices[:size]
    return ids[order].sort().values


def truncation_error(logits: Tensor, vocabulary: Tensor, m: int) -> dict[str, float]:
    """What is lost by keeping only the m most probable tokens of the target's distribution.

    Parameters
    ----------
    logits
        The target's logits ``[n, V]``.
    vocabulary
        Draft vocabulary, int64 ``[D]``.
    m
        Tokens kept before the distribution is restricted to the draft vocabulary.

    Returns
    -------
    dict
        Means over positions: ``rest``, the probability outside the top m; ``total_variation``
        between the training targets with and without the cut, both renormalised on the draft
        vocabulary; ``top_changed``, the share of positions whose most probable draft token
        changes.
    """
    p = logits.double().softmax(-1)
    top = p.topk(m, dim=-1)
    cut = torch.zeros_like(p).scatter(-1, top.indices, top.values)
    inside, whole = cut[:, vocabulary], p[:, vocabulary]
    some = inside.sum(-1) > 0
    inside, whole = inside[some], whole[some]
    inside, whole = (x / x.sum(-1, keepdim=True) for x in (inside, whole))
    return {
        "rest": (1 - top.values.sum(-1)).mean().item(),
        "total_variation": (0.5 * (inside - whole).abs().sum(-1)).mean().item(),
        "top_changed": (inside.argmax(-1) != whole.argmax(-1)).double().mean().item(),
    }


@dataclass
class Batch:
    """A few conversations, laid out for the training-time test.

    N indices of all conversations one after the other; A of them are active, that is, one of
    their S guesses is an answer token. Attention works on grids ``[B, T]`` of keys and
    ``[B, Q]`` of queries, padded; everything else on flat rows.

    Attributes
    ----------
    states
        Input layers' states ``[N, K*d]``.
    tokens
        Token one place ahead of each index, ``[N]``.
    positions
        Index within its conversation, ``[N]``.
    active
        Which of the N are active, ``[A]``, ascending.
    ahead_tokens
        ``[S, A]``: the token step i reads at each active index.
    key_slots, query_slots
        Place of each of the N, and of each of the A, in its grid (flattened).
    mask
        ``[B, Q, T]``: which keys of step 0 a query sees.
    answers, trained
        bool ``[S, A]``: the guess is an answer token; it also counts in the loss (the target's
        first choice is in the draft vocabulary).
    labels
        int ``[S, A]``: row in the tables below of the distribution the guess should match.
    draft_ids, probabilities
        Tables ``[R, M]``: the target's distribution on the draft vocabulary, renormalised.
    favourites
        ``[R]``: draft id of the target's first choice, -1 when outside the draft vocabulary.
    starts
        Per conversation: first and one-past-last of its active indices, and which of them is
        the first chain that decoding starts.
    """

    states: Tensor
    tokens: Tensor
    positions: Tensor
    active: Tensor
    ahead_tokens: Tensor
    key_slots: Tensor
    query_slots: Tensor
    mask: Tensor
    answers: Tensor
    trained: Tensor
    labels: Tensor
    draft_ids: Tensor
    probabilities: Tensor
    favourites: Tensor
    starts: list[tuple[int, int, int]]


class Conversations:
    """The positions of a store as training data for one layer set.

    Parameters
    ----------
    store
        Collected states and target distributions.
    layers
        Boundaries the head reads.
    sequences
        Which conversations of the store, int ``[C]``.
    vocabulary
        Draft vocabulary, int64 ``[D]``.
    vocab_size
        The target's V.
    device
        Where batches go.

    Raises
    ------
    UserError
        When the store lacks a boundary, or none of the conversations has an answer.
    """

    def __init__(
        self,
        store: StateStore,
        layers: Sequence[int],
        sequences: Tensor,
        vocabulary: Tensor,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if missing := sorted(set(layers) - set(store.boundaries)):
            raise UserError(
                f"no states were collected at boundaries {missing}; the store holds "
                f"{list(store.boundaries)}"
            )
        self.store, self.layers, self.device = store, tuple(layers), device
        self.draft_of = torch.full((vocab_size,), -1, dtype=torch.int64)
        self.draft_of[vocabulary.cpu()] = torch.arange(len(vocabulary))
        ids, lengths = store.meta["sequence"].unique_consecutive(return_counts=True)
        ends = lengths.cumsum(0)
        wanted = torch.isin(ids.long(), sequences.long())
        self.first = (ends - lengths)[wanted].tolist()
        self.length = lengths[wanted].tolist()
        self.answer = store.meta["answer"]
        self.trainable = self.answer & (self.draft_of[store.top_ids[:, 0].long()] >= 0)
        self.answer_tokens = [
            int(self.answer[f : f + n].sum()) for f, n in zip(self.first, self.length, strict=True)
        ]
        if not sum(self.answer_tokens):
            raise UserError("no answer tokens among the conversations to train on")

    def __len__(self) -> int:
        return len(self.first)

    def plan(self, batch_tokens: int, seed: int) -> list[list[int]]:
        """One epoch: conversations of similar length together, batches in random order."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        # Sorting by length within large shuffled pools keeps padding small and batches varied.
        per_batch = max(1, round(batch_tokens * len(self) / sum(self.answer_tokens)))
        pool = 16 * per_batch
        batches: list[list[int]] = []
        for begin in range(0, len(order), pool):
            members = sorted(order[begin : begin + pool], key=lambda c: self.length[c])
            batch: list[int] = []
            tokens = 0
            for c in members:
                if not self.answer_tokens[c]:
                    continue
                batch.append(c)
                tokens += self.answer_tokens[c]
                if tokens >= batch_tokens:
                    batches.append(batch)
                    batch, tokens = [], 0
            if batch:
                batches.append(batch)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def trained_guesses(self, chosen: Sequence[int], steps: int) -> list[int]:
        """How many guesses of each step count in the loss of these conversations."""
        counts = [0] * steps
        for c in chosen:
            rows = self.trainable[self.first[c] : self.first[c] + self.length[c]]
            for i in range(steps):
                counts[i] += int(rows[i + 1 :].sum())
        return counts

    def batch(self, chosen: Sequence[int], steps: int) -> Batch:
        """Lay out conversations for `steps` steps of the training-time test."""
        offsets = torch.arange(steps)[:, None]
        rows, tokens, positions, active, ahead, inside = [], [], [], [], [], []
        starts, total, count = [], 0, 0
        for c in chosen:
            first, entries = self.first[c], self.length[c] - 1
            index = torch.arange(entries)
            # Step i at index p reads token p+1+i and should guess what the target says there.
            place = index + 1 + offsets
            reach = place <= entries
            place = first + place.clamp(max=entries)
            use = (self.answer[place] & reach).any(0)
            rows.append(first + index)
            positions.append(index)
            active.append(total + index[use])
            ahead.append(place[:, use])
            inside.append(reach[:, use])
            used = index[use]
            opening = int((used < int(self.answer[first : first + entries].int().argmax())).sum())
            starts.append((count, count + len(used), count + opening))
            total += entries
            count += len(used)
        counts = [len(r) for r in rows]
        queries = [len(a) for a in active]
        row, place, reach = torch.cat(rows), torch.cat(ahead, 1), torch.cat(inside, 1)
        position, act = torch.cat(positions), torch.cat(active)
        t_max, q_max = max(counts), max(queries)
        mask = torch.zeros(len(counts), q_max, t_max, dtype=torch.bool)
        mask[:, :, 0] = True  # padded queries see something, so that no softmax is empty
        for b, (start, end, _) in enumerate(starts):
            mask[b, : end - start] = torch.arange(t_max) <= position[act[start:end], None]
        labelled, labels = place.unique(return_inverse=True)
        draft_ids = self.draft_of[self.store.top_ids[labelled].long()]
        p = self.store.top_logprobs[labelled].float().exp() * (draft_ids >= 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
        token = self.store.meta["token"].long()
        states = [self.store.load(b, row).to(self.device) for b in self.layers]
        to = {"device": self.device, "non_blocking": True}
        return Batch(
            states=torch.cat(states, -1).float(),
            tokens=token[row + 1].to(**to),
            positions=position.to(**to),
            active=act.to(**to),
            ahead_tokens=token[place].to(**to),
            key_slots=grid_slots(counts, t_max).to(**to),
            query_slots=grid_slots(queries, q_max).to(**to),
            mask=mask.to(**to),
            answers=(self.answer[place] & reach).to(**to),
            trained=(self.trainable[place] & reach).to(**to),
            labels=labels.to(**to),
            draft_ids=draft_ids.clamp(min=0).to(**to),
            probabilities=p.to(**to),
            favourites=draft_ids[:, 0].to(**to),
            starts=starts,
        )


def grid_slots(lengths: Sequence[int], width: int) -> Tensor:
    """Flat places, in a grid with rows of `width`, of sequences laid one to a row."""
    return torch.cat([torch.arange(n) + i * width for i, n in enumerate(lengths)])


def training_time_test(head: DraftHead, batch: Batch, steps: int) -> Iterator[Tensor]:
    """The head's states ``[A, d]`` at the active indices, one step after the other.

    The states are those before the final norm: pass them to ``head.logits``.
    """
    layer, attention = head.midlayer, head.midlayer.self_attn
    n_sequences, n_queries, n_keys = batch.mask.shape
    head.ensure_positions(n_keys + steps)

    def embed(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, head.embedding).float()

    fused = head.fuse(batch.states)
    mixed = layer.mix(embed(batch.tokens), fused)
    rotary = head.cos[batch.positions], head.sin[batch.positions]
    keys, values = (
        to_grid(x, batch.key_slots, (n_sequences, n_keys)).transpose(1, 2)
        for x in attention.keys_values(mixed, rotary)
    )
    hidden, mixed = fused[batch.active], mixed[batch.active]
    position = batch.positions[batch.active]
    chain: list[tuple[Tensor, Tensor]] = []
    for i in range(steps):
        rotary = head.cos[position + i], head.sin[position + i]
        if i:
            mixed = layer.mix(embed(batch.ahead_tokens[i]), hidden)
            chain.append(attention.keys_values(mixed, rotary))
        queries = attention.queries(mixed, rotary)
        hidden = layer.finish(hidden, attend(queries, keys, values, chain, batch))
        yield hidden


def to_grid(x: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Rows ``[n, ...]`` put at their slots of a grid ``[*shape, ...]`` of zeros."""
    grid = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
    return grid.index_copy(0, slots, x).unflatten(0, shape)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    batch: Batch,
) -> Tensor:
    """Attention of one step: true context of step 0, and each index's own later steps.

    Parameters
    ----------
    queries
        ``[A, n_heads, head_dim]``.
    keys, values
        Step 0, ``[B, n_kv_heads, T, head_dim]``.
    chain
        Keys and values ``[A, n_kv_heads, head_dim]`` of steps 1 up to this one.
    batch
        Gives the layout and the mask.

    Returns
    -------
    Tensor
        ``[A, n_heads * head_dim]``.
    """
    n_sequences, n_queries, n_keys = batch.mask.shape
    n_kv, head_dim = keys.shape[1], keys.shape[-1]
    # [A, n_kv, group, head_dim]: the queries that share a key-value head lie together.
    queries = (queries * head_dim**-0.5).unflatten(1, (n_kv, -1))
    grid = to_grid(queries, batch.query_slots, (n_sequences, n_queries)).permute(0, 2, 3, 1, 4)
    scores = grid.flatten(2, 3) @ keys.transpose(-1, -2)
    scores = scores.unflatten(2, (-1, n_queries)).masked_fill(
        ~batch.mask[:, None, None], -math.inf
    )
    if chain:
        own = torch.stack([(queries * k.unsqueeze(2)).sum(-1) for k, _ in chain], -1)
        own = to_grid(own, batch.query_slots, (n_sequences, n_queries)).permute(0, 2, 3, 1, 4)
        scores = torch.cat((scores, own), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    context = weights[..., :n_keys].flatten(2, 3) @ values
    out = from_grid(context.unflatten(2, (-1, n_queries)), batch.query_slots)
    if chain:
        shares = from_grid(weights[..., n_keys:], batch.query_slots)
        for j, (_, v) in enumerate(chain):
            out = out + shares[..., j, None] * v.unsqueeze(2)
    return out.flatten(1)


def from_grid(x: Tensor, slots: Tensor) -> Tensor:
    """Rows ``[n, n_kv, group, c]`` back from a grid ``[B, n_kv, group, Q, c]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)[slots]


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross-entropy with sparse target distributions.

    The gradient, softmax minus target, is made in place of the logits, so a step never holds
    more than one ``[rows, D]`` matrix.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        logits = logits.float()
        log_z = logits.logsumexp(-1, keepdim=True)
        loss = (p * (log_z - logits.gather(-1, ids))).sum()
        gradient = logits.sub_(log_z).exp_().scatter_add_(-1, ids, -p)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None
