"""What a draft head learns from: answers, states and the target's distributions, in batches.

Used by chapter 06. The target never runs here: its hidden states and its next-token distributions
come from a ``StateStore``, so one collection serves every layer set, and all heads of a study see
the same data in the same order. ``Examples`` knows the positions of a store for one layer set and
lays them out as a ``Batch``, for which it reads the states; what is done with a batch belongs to
``ttt``, the order of updates to ``training``.

A target with fewer tokens than a store keeps of each distribution leaves fillers there, which have
no probability and weigh nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlayers.project import UserError
from draftlayers.store import StateStore

TOP = 64  # most probable next tokens that are kept of each of the target's distributions
BLOCK = 8192  # rows whose distributions are read at once


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
        Tokens wanted. Fewer are returned when fewer have a probability in the distributions.

    Returns
    -------
    Tensor
        int64 ``[D]``, ascending; ties go to the lower id.
    """
    return _most_expected(_expected_times([(top_ids, top_logprobs)]), size)


def _expected_times(distributions: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """How often distributions ``[n, M]`` expect each token, float64 ``[highest id + 1]``."""
    expected = torch.zeros(0, dtype=torch.float64)
    for ids, log_p in distributions:
        ids, p = ids.flatten().long(), log_p.flatten().double().exp()
        if len(ids):
            more = max(0, int(ids.max()) + 1 - len(expected))
            expected = F.pad(expected, (0, more)).index_add(0, ids, p)
    return expected


def _most_expected(expected: Tensor, size: int) -> Tensor:
    """The tokens of the highest numbers, ascending; none that is never expected."""
    ids = (expected > 0).nonzero()[:, 0]  # which leaves out the fillers of short distributions
    order = expected[ids].sort(descending=True, stable=True).indices[:size]
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
        answers = answer_rows(store, train).nonzero()[:, 0]
        expected = _expected_times(store.distributions(part) for part in answers.split(BLOCK))
        return cls(store, train, held_out, _most_expected(expected, draft_vocab))


def answer_rows(store: StateStore, conversations: Tensor) -> Tensor:
    """Which rows ``[n]`` of a store predict a token of the answers of these conversations."""
    return store.meta["answer"] & torch.isin(store.meta["sequence"], conversations)


def truncation_error(logits: Tensor, vocabulary: Tensor, m: int) -> dict[str, float]:
    """What is lost by keeping only the m most probable tokens of the target's distribution.

    Parameters
    ----------
    logits
        The target's logits ``[n, V]``.
    vocabulary
        Draft vocabulary, int64 ``[D]``.
    m
        Tokens kept before the distribution is restricted to the draft vocabulary; of a target
        with fewer, all.

    Returns
    -------
    dict
        Means over positions: ``rest``, the probability outside the top m; ``total_variation``
        between the training targets with and without the cut, both renormalised on the draft
        vocabulary; ``top_changed``, the share of positions whose most probable draft token
        changes.
    """
    p = logits.double().softmax(-1)
    top = p.topk(min(m, p.shape[-1]), dim=-1)
    cut = torch.zeros_like(p).scatter(-1, top.indices, top.values)
    inside, whole = cut[:, vocabulary], p[:, vocabulary]
    some = inside.sum(-1) > 0
    inside, whole = inside[some], whole[some]
    inside, whole = (x / x.sum(-1, keepdim=True) for x in (inside, whole))
    return {
        "rest": (1 - top.values.sum(-1)).clamp(min=0).mean().item(),
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
    in_answer, loss_mask
        bool ``[S, A]``: the guess is an answer token; it also counts in the loss (the target's
        first choice is in the draft vocabulary).
    labels
        int ``[S, A]``: row in the tables below of the distribution the guess should match.
    draft_ids, probabilities
        Tables ``[R, M]``: the target's distribution on the draft vocabulary, renormalised.
    top1
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
    in_answer: Tensor
    loss_mask: Tensor
    labels: Tensor
    draft_ids: Tensor
    probabilities: Tensor
    top1: Tensor
    starts: list[tuple[int, int, int]]


class Examples:
    """The positions of a store as training data for one layer set.

    A few numbers are held of each position. States (2·K·d bytes a position: 3 KB for three layers
    of a 135-million-parameter model, 24 KB for an eight-billion one) and distributions are read
    when a batch is laid out, so that the memory taken is that of a batch, however many answers
    there are.

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
        self.rows = rows = torch.isin(store.meta["sequence"], sequences).nonzero()[:, 0]
        _, lengths = store.meta["sequence"][rows].unique_consecutive(return_counts=True)
        self.first, self.length = (lengths.cumsum(0) - lengths).tolist(), lengths.tolist()
        self.answer, self.token = store.meta["answer"][rows], store.meta["token"][rows].long()
        self.trainable = self.answer.clone()  # and the target's first choice can be drafted
        for place in self.answer.nonzero()[:, 0].split(BLOCK):
            first_choice = store.distributions(rows[place])[0][:, 0].long()
            self.trainable[place] = self.draft_of[first_choice] >= 0
        self.answer_tokens = [
            int(self.answer[f : f + n].sum()) for f, n in zip(self.first, self.length, strict=True)
        ]
        if not sum(self.answer_tokens):
            raise UserError(
                "no answer tokens among the conversations to train on; give some that have answers"
            )

    def __len__(self) -> int:
        return len(self.first)

    def epoch_batches(self, batch_tokens: int, seed: int) -> list[list[int]]:
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

    def states(self, places: Tensor) -> Tensor:
        """States ``[n, K*d]`` of the input layers at some places, in bfloat16."""
        return torch.cat(tuple(self.store.gather(self.rows[places], self.layers)), -1)

    def first_guesses(self, boundary: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """What step 0 reads, and the state it should guess, at evenly spaced answer positions.

        Parameters
        ----------
        boundary
            Of the state that is guessed: N.
        limit
            Positions wanted, at most.

        Returns
        -------
        tuple
            States ``[m, K*d]`` at positions p, tokens ``[m]`` and states of the boundary ``[m, d]``
            at p + 1.
        """
        begins = torch.zeros(len(self.answer), dtype=torch.bool)
        begins[self.first] = True
        place = (self.answer[1:] & ~begins[1:]).nonzero()[:, 0]
        if len(place) > limit:
            place = place[torch.linspace(0, len(place) - 1, limit).long()]
        final = self.store.load(boundary, self.rows[place + 1])
        return self.states(place), self.token[place + 1], final

    def loss_counts(self, chosen: Sequence[int], steps: int) -> list[int]:
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
        top_ids, top_logprobs = self.store.distributions(self.rows[labelled])
        draft_ids = self.draft_of[top_ids.long()]
        p = top_logprobs.float().exp() * (draft_ids >= 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)

        def there(part: Tensor) -> Tensor:
            return part.to(self.device, non_blocking=True)

        return Batch(
            states=there(self.states(row)).float(),
            tokens=there(self.token[row + 1]),
            positions=there(position),
            active=there(act),
            ahead_tokens=there(self.token[place]),
            key_slots=there(grid_slots(counts, t_max)),
            query_slots=there(grid_slots(queries, q_max)),
            mask=there(mask),
            in_answer=there(self.answer[place] & reach),
            loss_mask=there(self.trainable[place] & reach),
            labels=there(labels),
            draft_ids=there(draft_ids.clamp(min=0)),
            probabilities=there(p),
            top1=there(draft_ids[:, 0]),
            starts=starts,
        )


def grid_slots(lengths: Sequence[int], width: int) -> Tensor:
    """Flat places, in a grid with rows of `width`, of sequences laid one to a row."""
    return torch.cat([torch.arange(n) + i * width for i, n in enumerate(lengths)])


def to_grid(x: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Rows ``[n, ...]`` put at their slots of a grid ``[*shape, ...]`` of zeros."""
    grid = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
    filled: Tensor = grid.index_copy(0, slots, x).unflatten(0, shape)
    return filled


def from_grid(x: Tensor, slots: Tensor) -> Tensor:
    """Rows ``[n, n_kv, group, c]`` back from a grid ``[B, n_kv, group, Q, c]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)[slots]
