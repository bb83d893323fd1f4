"""The training-time test: how a head meets its own outputs while it learns, and what that costs it.

Used by ``training`` in chapter 06, on the batches of ``examples``. What a head is worth in real
decoding is measured in ``decoding``; ``validate`` estimates it from the same answers.

In the training-time test (arXiv:2503.01840, Section 3.2; ``eagle/traineagle3/cnets.py``) step 0
reads the target's states. Step i reads the head's own state of step i-1 at the same index and the
next token of the text, and its attention sees the true context up to that index plus its own
chain. In a picture, for queries at indices 0..3 at step 2 (``x`` may be seen, one column block per
step)::

    step 0   step 1   step 2
    x . . .  x . . .  x . . .
    x x . .  . x . .  . x . .
    x x x .  . . x .  . . x .
    x x x x  . . . x  . . . x

Only indices whose guesses are answer tokens are computed beyond the keys and values of the last
layer, which is exact and saves most of the work on prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlayers.device import multiplies_bfloat16
from draftlayers.examples import Batch, Examples, from_grid, to_grid
from draftlayers.head import DraftHead

STEP_WEIGHT = 0.8  # weight of step i is this to the power i, as in EAGLE-3's code
VALIDATION_TOKENS = 1024  # answer tokens of a batch of validation, about


@dataclass(frozen=True)
class _Grid:
    """Which rows attend together: their places in a grid, and what each sees of the text."""

    slots: Tensor  # [n]
    mask: Tensor  # [B, Q, T]


def training_time_test(head: DraftHead, batch: Batch, steps: int) -> Iterator[Tensor]:
    """The head's states ``[A, d]`` at the active indices, one step after the other.

    The states are those before the final norm: pass them to ``head.logits``.
    """
    n_sequences, _, n_keys = batch.mask.shape
    head.ensure_positions(n_keys + steps)
    layers = head.transformer

    def embed(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, head.embedding).float()

    active = _Grid(batch.query_slots, batch.mask)
    causal = torch.ones(n_keys, n_keys, dtype=torch.bool, device=batch.mask.device).tril()
    everywhere = _Grid(batch.key_slots, causal.expand(n_sequences, -1, -1))
    hidden = head.fuse(batch.states).float()  # mixed precision leaves the residual stream exact
    embedded = embed(batch.tokens)
    rotary = head.cos[batch.positions], head.sin[batch.positions]
    texts: list[tuple[Tensor, Tensor]] = []  # of each layer, keys and values of the true context
    chains: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]  # and those of later steps
    for layer in layers:
        mixed = layer.mix(embedded, hidden)
        keys, values = (
            to_grid(x, batch.key_slots, (n_sequences, n_keys)).transpose(1, 2)
            for x in layer.self_attn.keys_values(mixed, rotary)
        )
        texts.append((keys, values))
        who = everywhere
        if layer is layers[-1]:  # nothing further reads what is not active
            hidden, mixed, who = hidden[batch.active], mixed[batch.active], active
            rotary = rotary[0][batch.active], rotary[1][batch.active]
        queries = layer.self_attn.queries(mixed, rotary)
        hidden = layer.finish(hidden, attend(queries, keys, values, [], who))
    yield hidden
    position = batch.positions[batch.active]
    for i in range(1, steps):
        rotary = head.cos[position + i], head.sin[position + i]
        hidden, embedded = head.again(hidden), embed(batch.ahead_tokens[i])
        for layer, (keys, values), chain in zip(layers, texts, chains, strict=True):
            mixed = layer.mix(embedded, hidden)
            chain.append(layer.self_attn.keys_values(mixed, rotary))
            queries = layer.self_attn.queries(mixed, rotary)
            hidden = layer.finish(hidden, attend(queries, keys, values, chain, active))
        yield hidden


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    who: _Grid,
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
    who
        Where queries lie, and which keys of step 0 each sees.

    Returns
    -------
    Tensor
        ``[A, n_heads * head_dim]``.
    """
    n_sequences, n_queries, n_keys = who.mask.shape
    n_kv, head_dim = keys.shape[1], keys.shape[-1]
    # [A, n_kv, group, head_dim]: the queries that share a key-value head lie together.
    queries = (queries * head_dim**-0.5).unflatten(1, (n_kv, -1))
    grid = to_grid(queries, who.slots, (n_sequences, n_queries)).permute(0, 2, 3, 1, 4)
    scores = grid.flatten(2, 3) @ keys.transpose(-1, -2)
    scores = scores.unflatten(2, (-1, n_queries)).masked_fill(~who.mask[:, None, None], -math.inf)
    if chain:
        own = torch.stack([(queries * k.unsqueeze(2)).sum(-1) for k, _ in chain], -1)
        own = to_grid(own, who.slots, (n_sequences, n_queries)).permute(0, 2, 3, 1, 4)
        scores = torch.cat((scores, own), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    context = weights[..., :n_keys].flatten(2, 3) @ values
    out = from_grid(context.unflatten(2, (-1, n_queries)), who.slots)
    if chain:
        shares = from_grid(weights[..., n_keys:], who.slots)
        for j, (_, v) in enumerate(chain):
            out = out + shares[..., j, None] * v.unsqueeze(2)
    return out.flatten(1)


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross-entropy with sparse target distributions.

    The gradient, softmax minus target, is made in place of the logits, so a step never holds
    more than one ``[rows, D]`` matrix. It can be asked for once.
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
        return gradient.mul_(grad), None, None


def soft_cross_entropy(logits: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """Summed cross-entropy of logits ``[n, D]`` with targets ``p`` ``[n, M]`` on tokens ``ids``.

    Each row of `p` sums to one. `logits` is overwritten and must not be used afterwards.
    """
    apply: Callable[..., Tensor] = SoftCrossEntropy.apply
    return apply(logits, ids, p)


def sharpened(p: Tensor, power: float) -> Tensor:
    """Distributions ``[..., M]`` raised to a power and normalised again.

    >>> sharpened(torch.tensor([0.8, 0.2, 0.0]), 2.0)
    tensor([0.9412, 0.0588, 0.0000])
    """
    if power == 1:
        return p
    p = p**power
    return p / p.sum(-1, keepdim=True).clamp(min=1e-30)


def ttt_loss(
    head: DraftHead, batch: Batch, counts: Sequence[int], sharpen: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Loss of a batch: soft cross-entropy of each step, weighted by 0.8^i and summed.

    Parameters
    ----------
    head, batch
        What is trained, and on what.
    counts
        Guesses of each step in the whole update (of all processes), which each step's mean is
        taken over; its length is the number of steps.
    sharpen
        Power of the target's distributions.

    Returns
    -------
    tuple
        The loss, and ``[S, 2]``: each step's own mean cross-entropy and share of guesses that
        are the target's first choice, without gradient.
    """
    total = batch.states.new_zeros(())
    report = []
    for i, hidden in enumerate(training_time_test(head, batch, len(counts))):
        chosen = batch.loss_mask[i].nonzero()[:, 0]
        label = batch.labels[i, chosen]
        logits = head.logits(hidden[chosen])
        # argmax takes four times as long as max on a CPU in bfloat16
        hits = (logits.max(-1).indices == batch.top1[label]).sum()
        n = max(counts[i], 1)
        aim = sharpened(batch.probabilities[label], sharpen)
        loss = soft_cross_entropy(logits, batch.draft_ids[label], aim) / n
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
        Per step: share of guesses that are the target's first choice, over all positions.
    acceptance
        Per place in the chain: α_j, counted where greedy decoding would start a chain, None where
        no chain came so far. Of the passes that add at least j tokens it is the share that adds
        more, so that ``tau`` is 1 + α_1 + α_1 α_2 + ... to the last digit: a guess that the end of
        the answer leaves no room for counts as not accepted. (``decoding.acceptance_rates`` leaves
        such guesses out, at most one chain in each answer.)
    tau
        Estimated acceptance length, the target's own token included: tokens for each pass of
        ``walk``. It is exact for greedy answers and near it for answers drawn at low temperature.
    """

    loss: float
    agreement: list[float]
    acceptance: list[float | None]
    tau: float


def walk(runs: Sequence[int]) -> list[int]:
    """Tokens that each pass of greedy decoding adds to an answer whose first token is there.

    A pass adds the guesses that are right up to the first wrong one, and the target's own token
    behind them. The last pass adds what is missing: the target's token has no place left when the
    end was guessed, be it an end token or the most tokens allowed.

    Parameters
    ----------
    runs
        For each further token of the answer: how many guesses of a chain that starts in front of
        it are right, one after the other.

    >>> walk([1, 0, 2, 0, 0]), walk([0, 2, 1])
    ([2, 3], [1, 2])
    """
    added: list[int] = []
    while (place := sum(added)) < len(runs):
        added.append(min(runs[place] + 1, len(runs) - place))
    return added


@torch.no_grad()
def validate(
    head: DraftHead,
    data: Examples,
    depth: int,
    loss_steps: int,
    sharpen: float = 1.0,
) -> Validation:
    """Run the training-time test without learning, over all conversations of `data`.

    Parameters
    ----------
    depth
        Guesses in the chain that is judged.
    loss_steps
        Steps that the loss counts.
    sharpen
        Power of the target's distributions in the loss.
    """
    steps = max(depth, loss_steps)
    loss, trained, hits, guesses = (torch.zeros(steps) for _ in range(4))
    added: list[int] = []
    for chosen in data.epoch_batches(VALIDATION_TOKENS, seed=0):
        batch = data.batch(chosen, steps)
        agree = torch.zeros_like(batch.in_answer)
        for i, hidden in enumerate(training_time_test(head, batch, steps)):
            asked = batch.in_answer[i].nonzero()[:, 0]
            label = batch.labels[i, asked]
            logits = head.logits(hidden[asked])
            agree[i, asked] = logits.argmax(-1) == batch.top1[label]
            keep = batch.loss_mask[i, asked]
            label = label[keep]
            aim = sharpened(batch.probabilities[label], sharpen)
            loss[i] += soft_cross_entropy(logits[keep], batch.draft_ids[label], aim).cpu()
            trained[i] += len(label)
        hits += agree.sum(1).cpu()
        guesses += batch.in_answer.sum(1).cpu()
        runs = agree[:depth].cumprod(0).sum(0).tolist()
        for _, end, opening in batch.starts:
            added += walk(runs[opening:end])
    weights = STEP_WEIGHT ** torch.arange(steps)
    by_step = weights * loss / trained.clamp(min=1)
    longer = [sum(tokens > j for tokens in added) for j in range(depth + 1)]
    return Validation(
        loss=float(by_step[:loss_steps].sum()),
        agreement=(hits / guesses.clamp(min=1)).tolist(),
        acceptance=[n / before if before else None for before, n in itertools.pairwise(longer)],
        tau=sum(added) / len(added) if added else 1.0,
    )


def precision(device: torch.device) -> torch.dtype:
    """That of a training's products: bfloat16 where the device multiplies it natively."""
    fast = device.type == "cuda" or multiplies_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Products in the device's ``precision`` inside the ``with`` block; all else stays float32."""
    mixed = precision(device) is torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)
