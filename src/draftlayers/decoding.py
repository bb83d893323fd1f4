"""Speculative decoding that changes nothing but the time it takes.

Used by chapter 07. One loop in the order of the papers: **draft** some tokens, **verify** them in
one target pass, **accept** the longest run the target agrees with, add the target's own **bonus**
token, and **keep** every cache in step with what was accepted (Leviathan et al. 2023; EAGLE-3,
arXiv:2503.01840). A chain of guesses and EAGLE-2's dynamic tree (arXiv:2406.16858) go through the
same verification; plain decoding is the loop with nothing drafted. Running the target belongs to
``engine``, guessing to ``drafting``, comparing times to ``speed``.

A *pass* is a target pass after the prompt has been read. The acceptance length τ is the number of
tokens produced per pass, the target's own token included, pooled over all passes; plain decoding
has τ = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from draftlayers.device import Stopwatch
from draftlayers.engine import Engine
from draftlayers.project import UserError

ROOT = -1  # the last accepted token, from which every draft grows


# --- What is decoded, and what came out --------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen.

    Attributes
    ----------
    temperature
        Divides the logits; 0 takes the likeliest token (greedy).
    top_k
        Only the k likeliest tokens; 0 keeps all.
    top_p
        Only the likeliest tokens whose probabilities first reach p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"top_k {self.top_k}, top_p {self.top_p}: expected top_k of 0 (all) or more and "
                "0 < top_p <= 1"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution ``[V]`` sampled from, of logits ``[V]``: temperature, top-k, then top-p."""
        # In double precision and from the largest down, so that no temperature is too small.
        scaled = (logits.double() - logits.max()) / self.temperature
        if 0 < self.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], -torch.inf)
        probabilities = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens
            probabilities = probabilities.index_fill(0, order[before >= self.top_p], 0.0)
            probabilities = probabilities / probabilities.sum()
        return probabilities.to(logits.dtype)


GREEDY = Sampling()


class Chance:
    """The random decisions of sampling, from one seeded generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def accepts(self, probability: float) -> bool:
        """True with the given probability."""
        return torch.rand((), generator=self.generator, dtype=torch.float64).item() < probability

    def draw(self, probabilities: Tensor) -> int:
        """An index drawn from a distribution ``[V]``."""
        return int(torch.multinomial(probabilities.cpu(), 1, generator=self.generator))


@dataclass
class Decoded:
    """What one decoding run produced, and the counts behind τ and the acceptance rates.

    Attributes
    ----------
    tokens
        The new tokens, at most as many as asked for; the last is an end token if ``stop`` says so.
    produced
        Tokens produced by each pass. The first token comes from reading the prompt, so these
        sum to ``len(tokens) - 1``.
    accepted
        Drafted tokens accepted in each pass.
    offered
        Length of the longest run that could have been accepted in each pass: the draft's depth,
        or the place of an accepted end token, behind which nothing is decided.
    drafts
        What was guessed, and verified, in each pass.
    paths
        The guesses of each pass that the target agreed with, from the root down.
    stop
        ``"eos"``, ``"length"`` (as many tokens as asked for) or ``"context"`` (the model's limit).
    seconds
        Wall time of ``prefill``, ``draft``, ``verify``, ``accept`` (choosing, and keeping caches
        in step), and their ``total``.
    """

    tokens: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    stop: str = "length"
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Target passes after the prompt."""
        return len(self.produced)


def acceptance_length(runs: Sequence[Decoded]) -> float:
    """τ: tokens produced per target pass, pooled over all passes of all runs.

    1.0 where there was no pass at all.
    """
    passes = sum(run.passes for run in runs)
    return sum(sum(run.produced) for run in runs) / passes if passes else 1.0


def acceptance_rates(runs: Sequence[Decoded]) -> list[float | None]:
    """α_1, α_2, ...: share of guesses at place j accepted, of those reached and offered.

    None where no guess at that place was ever decided.
    """
    pairs = [pair for run in runs for pair in zip(run.accepted, run.offered, strict=True)]
    rates = []
    for j in range(1, max((offered for _, offered in pairs), default=0) + 1):
        decided = [accepted >= j for accepted, offered in pairs if min(accepted + 1, offered) >= j]
        rates.append(sum(decided) / len(decided) if decided else None)
    return rates


# --- The algorithm -----------------------------------------------------------------------------


def decode(
    engine: Engine,
    prompt: Sequence[int],
    max_new_tokens: int,
    drafter: Drafter | None = None,
    sampling: Sampling = GREEDY,
    chance: Chance | None = None,
) -> Decoded:
    """Decode a prompt; the drafter changes how long it takes, not what comes out.

    Greedy output is the target's own greedy output. Sampled output follows the target's own
    distribution exactly.

    Parameters
    ----------
    engine
        Runs the target.
    prompt
        Token ids, at least one.
    max_new_tokens
        Stop after this many tokens at the latest.
    drafter
        Guesses tokens; None decodes plainly.
    sampling, chance
        How tokens are chosen, and the random decisions when not greedy (default: seed 0).

    Raises
    ------
    UserError
        When the prompt is empty or leaves no room in the model's context, or the drafter's trees
        cannot be verified by this engine.
    """
    prompt = list(prompt)
    if not 0 < len(prompt) < engine.limit:
        raise UserError(
            f"prompt of {len(prompt)} tokens: expected 1 to {engine.limit - 1}, so that "
            f"{engine.bound} leaves room for an answer"
        )
    if getattr(drafter, "forks", False):
        engine.check_trees()
    out, clock, chance = Decoded(), Stopwatch(engine.device), chance or Chance(0)
    limit = min(max_new_tokens, engine.limit - len(prompt))
    if limit < 1:
        out.seconds = clock.seconds()
        return out
    capacity = len(prompt) + limit
    if drafter:
        passes = engine.session(capacity, drafter.boundaries, new=1 + drafter.size)
        drafting = drafter.session(capacity)
    else:
        passes, drafting = engine.session(capacity), nullcontext()
    with passes, drafting:
        logits, states = engine.prefill(prompt)
        token = choose(logits, sampling, chance)
        out.tokens.append(token)
        clock.mark("prefill")
        new, room = [token], limit - 1
        seen = prompt[1:] + new  # the token after each of the states
        while room and token not in engine.eos_ids:
            draft = NOTHING
            # The target adds a token of its own, so the last place needs no guess.
            if drafter and room > 1:
                drafter.observe(seen, states)
                draft = drafter.propose(room - 1, sampling, chance)
            clock.mark("draft")

            tokens = torch.tensor([token, *draft.tokens], device=engine.device)
            logits, states = engine.forward(tokens, *draft.shape(engine.device))
            clock.mark("verify")

            path, bonus = verify(draft, logits, sampling, chance)
            engine.keep([0] + [node + 1 for node in path])
            if states is not None:
                states = states[[0] + [node + 1 for node in path]]
            new = until_end([draft.tokens[node] for node in path] + [bonus], engine.eos_ids)
            out.tokens += new
            out.produced.append(len(new))
            out.accepted.append(min(len(path), len(new)))
            out.offered.append(len(new) if len(new) <= len(path) else draft.depth)
            out.drafts.append(replace(draft, proposed=None))
            out.paths.append(path)
            room, token, seen = room - len(new), new[-1], new
            clock.mark("accept")
    if token in engine.eos_ids:
        out.stop = "eos"
    elif limit < max_new_tokens:
        out.stop = "context"
    out.seconds = clock.seconds()
    return out


def choose(logits: Tensor, sampling: Sampling, chance: Chance) -> int:
    """The target's next token from its logits ``[V]``."""
    if sampling.greedy:
        return int(logits.argmax())
    return chance.draw(sampling.probabilities(logits))


def until_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, that one included."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens


# --- Drafts and their verification -------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """Guessed tokens as a tree under the last accepted token; a chain is a tree without forks.

    Attributes
    ----------
    tokens
        The guesses; siblings are distinct, and a parent comes before its children.
    parents
        Index of each guess's parent, ``ROOT`` for the first level.
    proposed
        For guesses that were *sampled*, the distribution ``[V]`` each was drawn from. None for
        guesses chosen without chance.
    scores
        For a tree, the log-probability that its drafter gives to each guess and all above it
        together.
    """

    tokens: list[int]
    parents: list[int]
    proposed: list[Tensor] | None = None
    scores: list[float] | None = None

    @property
    def depths(self) -> list[int]:
        """Level of each guess, 1 for those under the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Levels of the tree; 0 when nothing was guessed."""
        return max(self.depths, default=0)

    def children(self, node: int) -> list[int]:
        """The guesses right under a node, in their order."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def shape(self, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Depths ``[n+1]`` and who sees whom ``[n+1, n+1]``, the root first, for ``Engine``."""
        if self.parents == list(range(-1, len(self.parents) - 1)):
            return None, None  # a chain, which is what the engine assumes
        sees = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            sees[i + 1] |= sees[parent + 1]
        return torch.tensor([0, *self.depths], device=device), sees.to(device)


NOTHING = Draft([], [])


def verify(
    draft: Draft, logits: Tensor, sampling: Sampling, chance: Chance
) -> tuple[list[int], int]:
    """Accepted path through a draft, and the target's token after it.

    Parameters
    ----------
    draft
        n guesses.
    logits
        The target's ``[n+1, V]``: after the root, then after each guess.

    Returns
    -------
    path
        Accepted guesses from the root down.
    bonus
        The target's own next token.
    """
    if sampling.greedy:
        return accept_greedy(draft, logits.argmax(-1).tolist())
    return accept_sampled(draft, lambda node: sampling.probabilities(logits[node + 1]), chance)


def accept_greedy(draft: Draft, best: Sequence[int]) -> tuple[list[int], int]:
    """Follow the guesses that equal the target's likeliest token; `best` is root first."""
    node, path = ROOT, []
    while match := [c for c in draft.children(node) if draft.tokens[c] == best[node + 1]]:
        node = match[0]
        path.append(node)
    return path, best[node + 1]


def accept_sampled(
    draft: Draft, target: Callable[[int], Tensor], chance: Chance
) -> tuple[list[int], int]:
    """Accept guesses so that the tokens follow the target's distribution exactly.

    At each node the children are tried in turn. A guess x drawn from q is accepted with
    probability min(1, p(x)/q(x)); after a rejection p becomes the normalised max(0, p - q)
    (Leviathan et al. 2023, Theorem 1). A guess made without chance has q(x) = 1: it is accepted
    with probability p(x), and after a rejection x is struck out (EAGLE-2's rule for trees).

    Parameters
    ----------
    draft
        The guesses.
    target
        The target's distribution ``[V]`` after a node, asked only where the path leads.
    chance
        Makes the decisions.
    """
    node, path = ROOT, []
    while True:
        p = target(node)
        for child in draft.children(node):
            x = draft.tokens[child]
            if draft.proposed is None:
                accepted = chance.accepts(p[x].item())
                rest = p.index_fill(0, torch.tensor([x], device=p.device), 0.0)
            else:
                q = draft.proposed[child]
                accepted = chance.accepts(min(1.0, (p[x] / q[x]).item()))
                rest = (p - q).clamp_(min=0)
            mass = rest.sum()
            if accepted or mass <= 0:  # no mass: only rounding kept the probability below one
                node = child
                path.append(child)
                break
            p = rest / mass
        else:
            return path, chance.draw(p)


class Drafter(Protocol):
    """What ``decode`` needs from something that guesses tokens."""

    boundaries: tuple[int, ...]
    """Boundaries of the target it wants to see, ascending."""
    size: int
    """Tokens it guesses at most in one draft."""
    # One whose drafts fork has a true ``forks``, so that an engine without trees refuses it early.

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """Start an empty sequence of at most `capacity` tokens."""

    def observe(self, tokens: Sequence[int], states: Tensor | None) -> None:
        """Take in accepted tokens: the target's states ``[m, K*d]``, and the token after each."""

    def propose(self, depth: int, sampling: Sampling, chance: Chance) -> Draft:
        """Guess at most `depth` tokens ahead of what was observed."""
