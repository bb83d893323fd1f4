"""Drafts with an EAGLE-3 head: a chain of guesses, or EAGLE-2's dynamic tree.

Used by chapter 07. ``HeadDrafter`` keeps the head's cache in step with what was accepted and turns
its distributions into drafts (EAGLE-3, arXiv:2503.01840; EAGLE-2, arXiv:2406.16858). The head's
arithmetic belongs to ``head``; checking and accepting guesses to ``decoding``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from draftlayers.decoding import ROOT, Chance, Draft, Sampling
from draftlayers.device import multiplies_bfloat16
from draftlayers.head import DraftHead
from draftlayers.packing import PackedLinears, packs
from draftlayers.project import UserError


class HeadDrafter:
    """Drafts with an EAGLE-3 head: a chain, or EAGLE-2's dynamic tree.

    In a chain under sampling, guesses are drawn from the head's distribution with the target's
    temperature, top-k and top-p; a tree's guesses are always the head's likeliest.

    Parameters
    ----------
    head
        The trained head.
    depth
        Levels of the draft, γ.
    top_k
        Children of a node, and nodes expanded at each level; 1 drafts a chain.
    total
        Guesses kept in a tree, those of highest probability; default `depth` times `top_k`.
    confidence
        A chain ends early when the head gives its guesses so far a joint probability below this:
        a further guess costs time and would hardly be reached. 0 always drafts the full depth.
    precision
        That of the head's products on a CPU. Guesses need not be exact, so the default is
        bfloat16 where the processor multiplies it, and float32 elsewhere.

    Attributes
    ----------
    size
        Tokens of a draft at most.
    forks
        Whether drafts are trees.
    precision
        In which the head's products are done.
    """

    def __init__(
        self,
        head: DraftHead,
        depth: int,
        top_k: int = 1,
        total: int | None = None,
        confidence: float = 0.0,
        precision: torch.dtype | None = None,
    ):
        if depth < 1 or top_k < 1 or (total is not None and total < 1):
            raise UserError(
                f"draft of depth {depth}, top-k {top_k}, total {total}: expected 1 or more each"
            )
        if top_k > head.config.draft_vocab_size:
            raise UserError(
                f"top-k of {top_k}: the head can propose {head.config.draft_vocab_size} tokens"
            )
        if not 0 <= confidence < 1 or (confidence and top_k > 1):
            raise UserError(
                f"confidence of {confidence}: expected 0 or more and below 1, in a chain (top-k 1)"
            )
        self.head, self.depth, self.top_k, self.confidence = head, depth, top_k, confidence
        self.size, self.forks = (depth, False) if top_k == 1 else (total or depth * top_k, True)
        self.boundaries = head.config.layers
        weight = head.fc.weight
        if not packs(weight):
            self.precision, self.linears = weight.dtype, None
        else:
            self.precision = precision or (
                torch.bfloat16 if multiplies_bfloat16() else weight.dtype
            )
            self.linears = PackedLinears(head, self.precision)
        self.cache = head.new_cache(1)
        self.hidden = weight.new_zeros(1, 1, head.config.d_model)

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        """Start an empty sequence of at most `capacity` accepted tokens."""
        needed = capacity + self.depth * self.top_k
        if needed > self.cache.capacity:
            self.cache = self.head.new_cache(1 << (needed - 1).bit_length())
        self.cache.truncate(0)
        with self.linears.installed() if self.linears else nullcontext():
            yield

    def observe(self, tokens: Sequence[int], states: Tensor | None) -> None:
        """Take in accepted tokens: the target's states ``[m, K*d]``, and the token after each."""
        assert states is not None  # a head reads at least one boundary
        first, device = self.cache.length, self.hidden.device
        hidden = self.head.fuse(states.to(device, self.hidden.dtype))[None]
        positions = torch.arange(first, first + len(tokens), device=device)
        after = torch.tensor([tokens], device=device)
        self.hidden = self.head(hidden, after, positions, self.cache)[:, -1:]

    def propose(self, depth: int, sampling: Sampling, chance: Chance) -> Draft:
        """Guess at most `depth` levels ahead of what was observed; the cache forgets them again."""
        depth, observed = min(depth, self.depth), self.cache.length
        drafted = self._tree(depth) if self.top_k > 1 else self._chain(depth, sampling, chance)
        # What the head computed from its own guesses gives way to states of the target.
        self.cache.truncate(observed)
        return drafted

    def _chain(self, depth: int, sampling: Sampling, chance: Chance) -> Draft:
        head, hidden, place = self.head, self.hidden, self.cache.length
        tokens: list[int] = []
        proposed: list[Tensor] = []
        reached = 1.0
        while len(tokens) < depth:
            logits = head.logits(hidden)[0, 0].float()
            if sampling.greedy:
                q = logits.softmax(-1) if self.confidence else logits
                draft_id = q.argmax()
            else:
                q = sampling.probabilities(logits)
                draft_id = torch.tensor(chance.draw(q), device=logits.device)
                proposed.append(q.new_zeros(head.config.vocab_size))
                proposed[-1][head.vocabulary] = q
            token = head.to_target(draft_id)
            tokens.append(int(token))
            # Whether to go on is decided before the next guess is drawn, never by that guess:
            # dropping a guess for what it is would bias sampled output.
            reached *= q[draft_id].item() if self.confidence else 1.0
            if len(tokens) == depth or reached < self.confidence:
                break
            position = torch.tensor([place + len(tokens) - 1], device=hidden.device)
            hidden = head(head.again(hidden), token.view(1, 1), position, self.cache)
        chain = list(range(-1, len(tokens) - 1))
        return Draft(tokens, chain, None if sampling.greedy else proposed)

    def _tree(self, depth: int) -> Draft:
        """EAGLE-2: grow by joint probability level by level, then keep the best of all."""
        head, cache, k, observed = self.head, self.cache, self.top_k, self.cache.length
        device = self.hidden.device

        def children(hidden: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            """Tokens and joint log-probabilities ``[m*k]`` of the k best after m nodes."""
            logp = head.logits(hidden)[0].float().log_softmax(-1)
            best = logp.topk(k)
            return head.to_target(best.indices).flatten(), (scores[:, None] + best.values).flatten()

        tokens, scores = children(self.hidden, torch.zeros(1, device=device))
        parents = torch.full((k,), ROOT, device=device)
        hidden = self.hidden.expand(1, k, -1)
        frontier = torch.arange(k, device=device)  # nodes to expand, all on one level
        sees = torch.zeros(k, 0, dtype=torch.bool, device=device)  # drafted entries, by ancestry
        for level in range(depth - 1):
            # A node sees what was observed, the entries of its ancestors, and itself.
            sees = torch.cat((sees, torch.eye(k, dtype=torch.bool, device=device)), dim=1)
            mask = torch.cat((sees.new_ones(k, observed), sees), dim=1)
            position = torch.full((1, k), observed + level, device=device)
            outputs = head(head.again(hidden), tokens[None, frontier], position, cache, mask)
            new_tokens, new_scores = children(outputs, scores[frontier])
            best = new_scores.topk(k).indices
            frontier_before = frontier
            frontier = len(tokens) + best
            tokens, scores = torch.cat((tokens, new_tokens)), torch.cat((scores, new_scores))
            parents = torch.cat((parents, frontier_before.repeat_interleave(k)))
            hidden, sees = outputs[:, best // k], sees[best // k]
        # A child is never likelier than its parent; among equals the stable sort keeps the parent
        # first. So the best guesses form a tree.
        kept = scores.sort(descending=True, stable=True).indices[: self.size].sort().values
        place = {node: i for i, node in enumerate(kept.tolist())} | {ROOT: ROOT}
        return Draft(
            tokens[kept].tolist(),
            [place[p] for p in parents[kept].tolist()],
            scores=scores[kept].tolist(),
        )
