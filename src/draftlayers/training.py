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

from draftlayers.head import (
    DraftHead,
    HeadConfig,
    fit_start,
    start_at_random,
    start_from_target,
)
from draftlayers.spec import (
    Run,
    RunSpec,
    UserError,
    fingerprint,
    multiplies_bfloat16,
    write_atomically,
)
from draftlayers.states import collect, join_processes

if TYPE_CHECKING:
    from draftlayers.corpus import Corpus
    from draftlayers.states import StateStore
    from draftlayers.targets import Target

STEP_WEIGHT = 0.8  # weight of step i is this to the power i, as in EAGLE-3's code
CHECKPOINT_SECONDS = 60.0
FIT_ROWS = 50_000  # positions that the linear start is fitted on, at most
TOP = 64  # most probable next tokens that are kept of each of the target's distributions


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
        ``"target"`` (the target's last layer, then a linear fit to its final states, which the
        store must hold) or ``"random"``.
    train_lm_head
        Whether the output matrix learns, as in EAGLE-3's code, or stays as it starts.
    fc_norm
        Whether each input layer has its own norm.
    depth
        Steps of validation: the depth of the chain in decoding.
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
    fc_norm: bool = False
    depth: int = 5
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
            fc_norm=spec.fc_norm,
            depth=spec.depth,
        )


def draft_vocabulary(top_ids: Tensor, top_logprobs: Tensor, size: int) -> Tensor:
    """The tokens that the target is most likely to say in the training answers, ascending.

    EAGLE-3's code counts the answers' tokens. With its millions of answers that is the same; a
    small corpus lacks many tokens that its target would use next time, and the target's own
    probabilities, summed over all answer positions, know of them.

    Parameters
    ----------
    top_ids, top_logprobs
        The target's next-token distributions at the answer positions, ``[n, M]``.
    size
        Tokens wanted. Fewer are returned when fewer appear in the distributions.

    Returns
    -------
    Tensor
        int64 ``[D]``, ascending; ties go to the lower id.
    """
    ids, where = top_ids.flatten().long().unique(return_inverse=True)
    expected = torch.zeros(len(ids), dtype=torch.float64)
    expected.index_add_(0, where, top_logprobs.flatten().double().exp())
    order = expected.sort(descending=True, stable=True).indices[:size]
    return ids[order].sort().values


@dataclass(frozen=True)
class TrainingData:
    """What all heads of a comparison learn from and are judged on.

    Attributes
    ----------
    store
        States and target distributions of the conversations.
    train, validation
        Which of its conversations, int ids.
    vocabulary
        Draft vocabulary, int64 ``[D]``, ascending.
    """

    store: StateStore
    train: Tensor
    validation: Tensor
    vocabulary: Tensor

    @classmethod
    def split(cls, store: StateStore, validation: int, draft_vocab: int) -> TrainingData:
        """Keep the last `validation` conversations apart; count the vocabulary on the others."""
        ids = store.meta["sequence"].unique()
        train, held_out = ids[:-validation], ids[-validation:]
        answers = answer_rows(store, train)
        vocabulary = draft_vocabulary(
            store.top_ids[answers], store.top_logprobs[answers], draft_vocab
        )
        return cls(store, train, held_out, vocabulary)


def answer_rows(store: StateStore, conversations: Tensor) -> Tensor:
    """Which rows ``[n]`` of a store predict a token of the answers of these conversations."""
    return store.meta["answer"] & torch.isin(store.meta["sequence"], conversations)


def planned_sets(run: Run) -> dict[str, tuple[int, ...]]:
    """The layer sets that chapter 06 compares, by name: the default rule's and the chosen one."""
    selection = run.results("05-selection")
    sets = {"default": tuple(selection["layers"]["default"])}
    chosen = tuple(selection["chosen"]["layers"])
    return sets if chosen in sets.values() else {**sets, "chosen": chosen}


def head_folder(run: Run, layers: Sequence[int], seed: int) -> Path:
    """Where a run keeps the head of a layer set and seed."""
    return run.path("heads", f"{'-'.join(map(str, layers))}-s{seed}")


def prepare(
    run: Run, target: Target, corpus: Corpus, say: Callable[[str], None] = lambda text: None
) -> TrainingData:
    """Collect what all heads of a run learn from, once for all planned layer sets."""
    store = collect(
        target,
        [*corpus.train, *corpus.validation],
        # Boundary N is no input; the start of every head is fitted to it.
        sorted({target.n_layers, *(b for layers in planned_sets(run).values() for b in layers)}),
        run.folder / "states",
        predict="answer",
        top=TOP,
        say=say,
    )
    return TrainingData.split(store, len(corpus.validation), run.spec.draft_vocab)


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
    """The positions of a store as training data for one layer set, held in memory.

    In bfloat16 the states take 2·K·d bytes a position: 3 KB for three layers of a
    135-million-parameter model, 24 KB for an eight-billion one.

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
        self.device = device
        self.draft_of = torch.full((vocab_size,), -1, dtype=torch.int64)
        self.draft_of[vocabulary.cpu()] = torch.arange(len(vocabulary))
        self.rows = rows = torch.isin(store.meta["sequence"], sequences).nonzero()[:, 0]
        _, lengths = store.meta["sequence"][rows].unique_consecutive(return_counts=True)
        self.first, self.length = (lengths.cumsum(0) - lengths).tolist(), lengths.tolist()
        self.answer, self.token = store.meta["answer"][rows], store.meta["token"][rows].long()
        self.top_ids, self.top_logprobs = store.top_ids[rows], store.top_logprobs[rows]
        self.states = torch.cat([store.load(b, rows) for b in layers], -1)
        self.trainable = self.answer & (self.draft_of[self.top_ids[:, 0].long()] >= 0)
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

    def first_guesses(self, final: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """What step 0 reads, and the state it should guess, at evenly spaced answer positions.

        Parameters
        ----------
        final
            States at boundary N of all rows, ``[n, d]``.
        limit
            Positions wanted, at most.

        Returns
        -------
        tuple
            States ``[m, K*d]`` at positions p, tokens ``[m]`` and final states ``[m, d]`` at p + 1.
        """
        begins = torch.zeros(len(self.answer), dtype=torch.bool)
        begins[self.first] = True
        place = (self.answer[1:] & ~begins[1:]).nonzero()[:, 0]
        if len(place) > limit:
            place = place[torch.linspace(0, len(place) - 1, limit).long()]
        return self.states[place], self.token[place + 1], final[place + 1]

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
        rows, positions, active, ahead, inside = [], [], [], [], []
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
        draft_ids = self.draft_of[self.top_ids[labelled].long()]
        p = self.top_logprobs[labelled].float().exp() * (draft_ids >= 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
        to = {"device": self.device, "non_blocking": True}
        return Batch(
            states=self.states[row].to(**to).float(),
            tokens=self.token[row + 1].to(**to),
            positions=position.to(**to),
            active=act.to(**to),
            ahead_tokens=self.token[place].to(**to),
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
    n_sequences, _, n_keys = batch.mask.shape
    head.ensure_positions(n_keys + steps)

    def embed(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, head.embedding).float()

    fused = head.fuse(batch.states).float()  # mixed precision leaves the residual stream exact
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
    scores = scores.unflatten(2, (-1, n_queries)).masked_fill(~batch.mask[:, None, None], -math.inf)
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


def soft_cross_entropy(logits: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """Summed cross-entropy of logits ``[n, D]`` with targets ``p`` ``[n, M]`` on tokens ``ids``.

    Each row of `p` sums to one. `logits` is overwritten and must not be used afterwards.
    """
    return SoftCrossEntropy.apply(logits, ids, p)


def ttt_loss(head: DraftHead, batch: Batch, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Loss of a batch: soft cross-entropy of each step, weighted by 0.8^i and summed.

    Parameters
    ----------
    head, batch
        What is trained, and on what.
    counts
        Guesses of each step in the whole update (of all processes), which each step's mean is
        taken over; its length is the number of steps.

    Returns
    -------
    tuple
        The loss, and ``[S, 2]``: each step's own mean cross-entropy and share of guesses that
        are the target's first choice, without gradient.
    """
    total = batch.states.new_zeros(())
    report = []
    for i, hidden in enumerate(training_time_test(head, batch, len(counts))):
        chosen = batch.trained[i].nonzero()[:, 0]
        label = batch.labels[i, chosen]
        logits = head.logits(hidden[chosen])
        hits = (logits.argmax(-1) == batch.favourites[label]).sum()
        n = max(counts[i], 1)
        loss = soft_cross_entropy(logits, batch.draft_ids[label], batch.probabilities[label]) / n
        total = total + STEP_WEIGHT**i * loss
        report.append(torch.stack((loss.detach(), hits / n)))
    return total, torch.stack(report)


@dataclass(frozen=True)
class Validation:
    """Teacher-forced quality of a head.

    Attributes
    ----------
    loss
        The training loss, over the steps that training takes.
    agreement
        Per step: share of guesses that are the target's first choice.
    acceptance
        Per step: the same among chains whose earlier guesses all were (α_j); None without any.
    tau
        Estimated acceptance length, the target's own token included: the chain is walked through
        each answer as greedy decoding would, jumping over what it guesses right. It is exact for
        greedy answers and near it for answers drawn at low temperature.
    """

    loss: float
    agreement: list[float]
    acceptance: list[float | None]
    tau: float


@torch.no_grad()
def validate(
    head: DraftHead, data: Conversations, steps: int, loss_steps: int, batch_tokens: int = 1024
) -> Validation:
    """Run the training-time test without learning, over all conversations of `data`.

    `steps` is the depth of the chain that is judged, `loss_steps` how many of them the loss counts.
    """
    loss, trained = torch.zeros(steps), torch.zeros(steps)
    hits, guesses, runs, chances = (torch.zeros(steps) for _ in range(4))
    produced = passes = 0
    for chosen in data.plan(batch_tokens, seed=0):
        batch = data.batch(chosen, steps)
        agree = torch.zeros_like(batch.answers)
        for i, hidden in enumerate(training_time_test(head, batch, steps)):
            asked = batch.answers[i].nonzero()[:, 0]
            label = batch.labels[i, asked]
            logits = head.logits(hidden[asked])
            agree[i, asked] = logits.argmax(-1) == batch.favourites[label]
            keep = batch.trained[i, asked]
            label = label[keep]
            loss[i] += soft_cross_entropy(
                logits[keep], batch.draft_ids[label], batch.probabilities[label]
            ).cpu()
            trained[i] += len(label)
        run = agree.cumprod(0)
        before = torch.cat((torch.ones_like(run[:1]), run[:-1])) * batch.answers
        hits += agree.sum(1).cpu()
        guesses += batch.answers.sum(1).cpu()
        runs += run.sum(1).cpu()
        chances += before.sum(1).cpu()
        lengths, asked_first = run.sum(0).tolist(), batch.answers[0].tolist()
        for _, end, place in batch.starts:
            while place < end and asked_first[place]:
                passes += 1
                produced += lengths[place] + 1
                place += lengths[place] + 1
    weights = STEP_WEIGHT ** torch.arange(steps)
    by_step = weights * loss / trained.clamp(min=1)
    return Validation(
        loss=float(by_step[:loss_steps].sum()),
        agreement=(hits / guesses.clamp(min=1)).tolist(),
        acceptance=[float(r / c) if c else None for r, c in zip(runs, chances, strict=True)],
        tau=produced / max(passes, 1),
    )


def autocast(head: DraftHead) -> torch.autocast:
    """bfloat16 arithmetic where the device multiplies it natively; elsewhere it is slower."""
    device = head.fc.weight.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda" or multiplies_bfloat16())


@dataclass(frozen=True)
class TrainedHead:
    """A head as training left it: the weights that did best on validation.

    Attributes
    ----------
    head
        Ready to decode, on the target's device and in its precision.
    folder
        Where it lies.
    history
        One record for each validation: ``update``, ``tokens`` (answer tokens learned from so
        far), ``learning_rate``, ``train_loss`` and per-step ``train_step_losses`` and
        ``train_agreement`` since the record before, and the fields of `Validation`.
    best
        The record with the lowest validation loss, whose weights these are.
    seconds
        Time spent on training, all sessions together.
    """

    head: DraftHead
    folder: Path
    history: list[dict[str, Any]]
    best: dict[str, Any]
    seconds: float


def train_head(
    data: TrainingData,
    layers: Sequence[int],
    target: Target,
    settings: TrainingSettings,
    seed: int,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> TrainedHead:
    """Train one head, or load it when its folder already holds it.

    The folder names nothing by itself: a fingerprint of data, layers, vocabulary, settings and
    seed decides whether what lies there is this head. A run that was killed continues from its
    last checkpoint to the same numbers as an undisturbed one. Under ``torchrun`` the
    conversations of each update are shared out over the processes.

    Parameters
    ----------
    data
        Shared by all heads that are compared.
    layers
        Boundaries the head reads, ascending.
    target
        Whose embedding the head shares, and whose last layer it may start from.
    settings, seed
        How to train; the seed fixes the order of the data and the random part of the start.
    folder
        Where the head, its history and its checkpoint go.
    say
        Called with a line of progress now and then.

    Raises
    ------
    UserError
        When the data cannot serve, or the loss stops being finite.
    """
    folder = Path(folder)
    config = HeadConfig.for_target(target, layers, len(data.vocabulary), settings.fc_norm)
    mark = fingerprint(
        config.to_dict(),
        asdict(settings),
        seed,
        data.store.folder.name,  # the store names itself by its content
        [t.tolist() for t in (data.train, data.validation, data.vocabulary)],
    )
    if finished(folder, mark) is None:
        Trainer(config, data, target, settings, seed, folder, mark).run(say)
    record = finished(folder, mark)
    return TrainedHead(
        head=DraftHead.load(folder, target),
        folder=folder,
        history=record["history"],
        best=record["best"],
        seconds=record["seconds"],
    )


def finished(folder: Path, mark: str) -> dict[str, Any] | None:
    """The record of a finished training with this fingerprint, if the folder holds one."""
    try:
        record = json.loads((folder / "training.json").read_text())
    except FileNotFoundError:
        return None
    return record if record["fingerprint"] == mark else None


class Trainer:
    """One training run: its data, head, optimiser and place in the plan of updates."""

    def __init__(
        self,
        config: HeadConfig,
        data: TrainingData,
        target: Target,
        settings: TrainingSettings,
        seed: int,
        folder: Path,
        mark: str,
    ) -> None:
        self.settings, self.folder, self.mark = settings, folder, mark
        self.rank, self.world = join_processes()
        embedding = target.model.get_input_embeddings().weight
        device = embedding.device
        if self.world > 1 and device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.head = DraftHead(config, embedding.to(device), data.vocabulary.to(device)).to(device)
        self.head.lm_head.requires_grad_(settings.train_lm_head)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.data, self.held_out = (
            Conversations(
                data.store, config.layers, part, data.vocabulary, config.vocab_size, device
            )
            for part in (data.train, data.validation)
        )
        if settings.start == "target":
            start_from_target(self.head, target, seed)
            final = data.store.load(config.n_layers, self.data.rows)
            fit_start(self.head, *self.data.first_guesses(final, FIT_ROWS), seed)
        else:
            start_at_random(self.head, seed)
        if self.world > 1:
            for p in self.head.parameters():
                dist.broadcast(p.data, 0)
        self.batches = self.plan(seed)
        self.update, self.tokens, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.since = torch.zeros(settings.ttt_steps, 2)  # sums of reports since the last record
        self.since_updates = 0

    def plan(self, seed: int) -> list[list[int]]:
        """The batches of all updates, in order."""
        batches: list[list[int]] = []
        whole = math.ceil(self.settings.epochs)
        for epoch in range(whole):
            batches += self.data.plan(self.settings.batch_tokens, seed * 1009 + epoch)
        return batches[: max(1, round(len(batches) * self.settings.epochs / whole))]

    def validation_every(self) -> int:
        """Updates between validations: twelve in all, or fewer so that they cost a tenth."""
        # A validation is a forward pass, a third of an update's work for each token and step.
        tokens = (
            sum(self.held_out.answer_tokens) * self.settings.depth / self.settings.ttt_steps / 3
        )
        affordable = math.ceil(10 * tokens / self.settings.batch_tokens)
        return max(1, min(len(self.batches), max(affordable, math.ceil(len(self.batches) / 12))))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to zero."""
        total = len(self.batches)
        warm = max(1, round(total * self.settings.warmup))
        if self.update < warm:
            return self.settings.learning_rate * (self.update + 1) / warm
        share = (self.update - warm) / max(1, total - warm)
        return self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def run(self, say: Callable[[str], None]) -> None:
        """Train to the end of the plan and write ``training.json``."""
        self.resume()
        if self.update:
            say(f"continuing at update {self.update} of {len(self.batches)}")
        every = self.validation_every()
        started = saved = time.monotonic()
        before = self.seconds
        while self.update < len(self.batches):
            self.step()
            self.seconds = before + time.monotonic() - started
            done = self.update == len(self.batches)
            if done or self.update % every == 0:
                say(self.record())
            if self.rank == 0 and (done or time.monotonic() - saved > CHECKPOINT_SECONDS):
                self.checkpoint()
                saved = time.monotonic()
        if self.rank == 0:
            record = {
                "fingerprint": self.mark,
                "settings": asdict(self.settings),
                "history": self.history,
                "best": min(self.history, key=lambda r: r["loss"]),
                "seconds": round(self.seconds, 1),
            }
            text = json.dumps(record, indent=1) + "\n"
            write_atomically(self.folder / "training.json", text.encode())
            (self.folder / "checkpoint.safetensors").unlink()
        if self.world > 1:
            dist.barrier()

    def step(self) -> None:
        """One update."""
        chosen = self.batches[self.update]
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counts = self.data.trained_guesses(chosen, self.settings.ttt_steps)
        self.optimizer.zero_grad(set_to_none=False)
        report = torch.zeros_like(self.since)
        if mine := chosen[self.rank :: self.world]:
            batch = self.data.batch(mine, self.settings.ttt_steps)
            with autocast(self.head):
                loss, report = ttt_loss(self.head, batch, counts)
            loss.backward()
        report = self.gather(report.cpu())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        if not (report.isfinite().all() and norm.isfinite()):
            raise UserError(
                f"training stopped at update {self.update + 1} of {len(self.batches)}: the loss or "
                f"its gradient is not finite (loss by step {report[:, 0].tolist()}, gradient norm "
                f"{norm.item():.3g}, learning rate {rate:.2g}); lower learning_rate, or check the "
                "collected states for values that are not finite"
            )
        self.optimizer.step()
        self.update += 1
        self.tokens += sum(self.data.answer_tokens[c] for c in chosen)
        self.since += report
        self.since_updates += 1

    def gather(self, report: Tensor) -> Tensor:
        """Sum gradients and reports over all processes; means were already taken over all."""
        if self.world == 1:
            return report
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in self.parameters])
        for p, g in zip(self.parameters, parts, strict=True):
            p.grad.copy_(g.view_as(p))
        report = report.to(flat.device)
        dist.all_reduce(report)
        return report.cpu()

    def record(self) -> str:
        """Validate, remember the result, keep the weights if they are the best so far."""
        steps = self.settings.ttt_steps
        result = validate(self.head, self.held_out, max(self.settings.depth, steps), steps)
        weights = STEP_WEIGHT ** torch.arange(steps)
        means = self.since / self.since_updates
        record = {
            "update": self.update,
            "tokens": self.tokens,
            "learning_rate": self.learning_rate(),
            "train_loss": float((weights * means[:, 0]).sum()),
            "train_step_losses": means[:, 0].tolist(),
            "train_agreement": means[:, 1].tolist(),
            **asdict(result),
        }
        if not math.isfinite(result.loss):
            raise UserError(f"training stopped at update {self.update}: validation is not finite")
        if self.rank == 0 and all(result.loss < r["loss"] for r in self.history):
            self.head.save(self.folder)
        self.history.append(record)
        self.since.zero_()
        self.since_updates = 0
        pace = self.tokens / max(self.seconds, 1e-9)
        return (
            f"update {self.update}/{len(self.batches)}  loss {record['train_loss']:.3f} "
            f"(validation {result.loss:.3f})  estimated tau {result.tau:.2f}  "
            f"{pace:.0f} answer tokens/s"
        )

    def checkpoint(self) -> None:
        """Everything a later process needs to go on, in one file put in place at once."""
        tensors = {f"head.{k}": v for k, v in self.head.state_dict().items()}
        for i, p in enumerate(self.parameters):
            for key, value in self.optimizer.state[p].items():
                tensors[f"optimizer.{i}.{key}"] = value
        tensors["since"] = self.since
        place = {
            "fingerprint": self.mark,
            "update": self.update,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "since_updates": self.since_updates,
            "history": self.history,
        }
        data = save(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
            {"place": json.dumps(place)},
        )
        write_atomically(self.folder / "checkpoint.safetensors", data)

    def resume(self) -> None:
        """Go to where this same training was last saved, if it was."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            place = json.loads(file.metadata()["place"])
            if place.pop("fingerprint") != self.mark:
                return
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        self.head.load_state_dict(
            {k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")}
        )
        for i, p in enumerate(self.parameters):
            prefix = f"optimizer.{i}."
            self.optimizer.state[p] = {
                k.removeprefix(prefix): v.to(p.device)
                for k, v in tensors.items()
                if k.startswith(prefix)
            }
        self.since = tensors["since"]
        for name, value in place.items():
            setattr(self, name, value)
