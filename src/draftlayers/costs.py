"""A model of what speculation costs and gains, from parts that are timed apart from any prompt.

Used by chapter 07. ``measure_costs`` times a plain pass, a verify pass, a guess and the rest of a
step, so that ``predicted_speedup`` can be held against what the stopwatch said. ``Device`` does the
same arithmetic from bandwidth and FLOP/s alone. Timing whole answers is left to ``speed``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from draftlayers.decoding import GREEDY, Chance, decode
from draftlayers.device import now
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.packing import PackedLinear, fastest_rows

# --- Parts of a step ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of decoding, measured apart from the prompts they will explain.

    Attributes
    ----------
    passes
        A target pass over n tokens, by n; ``passes[1]`` is plain decoding's.
    draft_first
        The head's pass over what was accepted, and the first guess.
    draft_next
        Each further guess of a chain.
    rest
        Choosing tokens and keeping caches in step, in each pass of plain decoding (``rest[0]``)
        and of speculative decoding (``rest[1]``).
    """

    passes: dict[int, float]
    draft_first: float
    draft_next: float
    rest: tuple[float, float]

    @property
    def plain(self) -> float:
        """Seconds of a plain decoding step."""
        return self.passes[1] + self.rest[0]

    def verify(self, tokens: int) -> float:
        """Seconds of a pass over a number of tokens, between measured sizes on a line."""
        sizes = sorted(self.passes)
        if tokens <= sizes[0] or tokens >= sizes[-1]:
            return self.passes[min(max(tokens, sizes[0]), sizes[-1])]
        high = next(size for size in sizes if size >= tokens)
        low = max(size for size in sizes if size <= tokens)
        share = (tokens - low) / (high - low) if high > low else 0.0
        return (1 - share) * self.passes[low] + share * self.passes[high]

    def relative(self, depth: int, size: int | None = None) -> dict[str, float]:
        """Terms of the cost model in plain decoding steps: verify v, draft c a level, rest o.

        A draft of `depth` levels has `size` guesses, or one on each level if none is given.
        """
        drafting = self.draft_first + (depth - 1) * self.draft_next
        return {
            "v": self.verify((size or depth) + 1) / self.plain,
            "c": drafting / depth / self.plain,
            "o": self.rest[1] / self.plain,
        }


def predicted_speedup(tau: float, depth: int, costs: Costs, size: int | None = None) -> float:
    """Speedup τ / (v + γ·c + o) of a draft of `depth` γ levels with acceptance length τ.

    It is a chain, or a tree of `size` guesses.
    """
    terms = costs.relative(depth, size)
    return tau / (terms["v"] + depth * terms["c"] + terms["o"])


def expected_length(alpha: Sequence[float | None], depth: int) -> float:
    """τ of a chain of `depth` guesses from acceptance rates: 1 + α1 + α1·α2 + ...

    Places beyond the given rates, or without one, count as never accepted.
    """
    length, reached = 1.0, 1.0
    for rate in [*alpha[:depth]]:
        reached *= rate or 0.0
        length += reached
    return length


def measure_passes(
    engine: Engine, prompt: Sequence[int], sizes: Sequence[int], repeats: int = 15
) -> dict[int, float]:
    """Median seconds of target passes over different numbers of tokens, timed in turn.

    Parameters
    ----------
    prompt
        Context of the passes, cut to leave room for them; its tokens also serve as new ones.
    sizes
        Numbers of tokens.
    """
    prompt = prompt[: max(1, engine.limit - max(sizes))]
    tokens = torch.tensor([prompt[i % len(prompt)] for i in range(max(sizes))])
    tokens = tokens.to(engine.device)
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    with engine.session(len(prompt), new=max(sizes)):
        engine.prefill(prompt)
        for repeat in range(repeats + 1):
            for n, times in seconds.items():
                began = now(engine.device)
                engine.forward(tokens[:n])
                if repeat:  # the first round warms up
                    times.append(now(engine.device) - began)
                engine.keep([])
    return {n: statistics.median(times) for n, times in seconds.items()}


def free_draft_tokens(passes: Mapping[int, float], slack: float = 0.05) -> int:
    """How many drafted tokens a pass verifies for about the price of one.

    Parameters
    ----------
    passes
        From ``measure_passes``. A dear size does not speak against a larger one: kernels are made
        for some numbers of rows.
    slack
        How much dearer such a pass may be, as a share of a plain one; the last guess of a tree
        seldom wins more.
    """
    return max(n for n in passes if passes[n] <= (1 + slack) * passes[1]) - 1


def measure_costs(
    engine: Engine,
    drafters: Mapping[str, HeadDrafter],
    prompt: Sequence[int],
    passes: Mapping[int, float],
    repeats: int = 15,
) -> dict[str, Costs]:
    """Time the drafting of chains in turn, and what is left of a decoding step, after a prompt.

    Parameters
    ----------
    drafters
        Chains by name; their depth says how long a draft is timed.
    prompt
        Two tokens or more.
    passes
        From ``measure_passes``.
    """
    drafts: dict[tuple[str, int], list[float]] = {}
    inputs: dict[str, tuple[list[int], torch.Tensor]] = {}
    with torch.no_grad(), ExitStack() as sessions:
        for name, drafter in drafters.items():
            sessions.enter_context(drafter.session(len(prompt) + drafter.depth))
            with engine.session(len(prompt), drafter.boundaries):
                logits, states = engine.prefill(prompt)
            assert states is not None  # a head reads at least one boundary
            after = [*prompt[1:], int(logits.argmax())]
            drafter.observe(after, states)
            inputs[name] = after[-2:], states[-2:]
            drafts |= {(name, depth): [] for depth in (1, drafter.depth)}
        for repeat in range(repeats + 1):
            for (name, depth), times in drafts.items():
                drafter = drafters[name]
                drafter.cache.truncate(len(prompt) - 2)
                began = now(engine.device)
                drafter.observe(*inputs[name])
                drafter.propose(depth, GREEDY, Chance(0))
                if repeat:  # the first round warms up
                    times.append(now(engine.device) - began)
    median = {key: statistics.median(times) for key, times in drafts.items()}
    rests: dict[str | None, list[float]] = {name: [] for name in (None, *drafters)}  # None: plain
    for _ in range(3):
        for who, times in rests.items():
            run = decode(engine, prompt, 8, drafters[who] if who else None)
            times.append(run.seconds["accept"] / max(1, run.passes))
    rest = {who: statistics.median(times) for who, times in rests.items()}
    return {
        name: Costs(
            passes=dict(passes),
            draft_first=median[name, 1],
            draft_next=max(0.0, median[name, drafter.depth] - median[name, 1])
            / max(1, drafter.depth - 1),
            rest=(rest[None], rest[name]),
        )
        for name, drafter in drafters.items()
    }


# --- Other devices -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A device as the roofline model sees it.

    Attributes
    ----------
    bandwidth
        Bytes read from memory per second.
    flops
        Floating-point operations per second of matrix products.
    overhead
        Seconds that every pass costs whatever it computes.
    """

    bandwidth: float
    flops: float
    overhead: float = 0.0

    def pass_seconds(self, parameters: int, bytes_per_parameter: int, tokens: int) -> float:
        """A pass reads every weight once and computes two operations a weight and token.

        Whichever takes longer counts (Williams et al. 2009). Attention is left out: at contexts
        of a few hundred tokens it is small beside the weights.
        """
        reading = parameters * bytes_per_parameter / self.bandwidth
        return max(reading, 2 * parameters * tokens / self.flops) + self.overhead

    def costs(self, target: tuple[int, int], head: tuple[int, int], depth: int) -> Costs:
        """Costs of decoding here, with a head that is read once for every guess.

        Parameters
        ----------
        target, head
            Parameters that a pass multiplies by, and bytes of each.
        depth
            Guesses of a chain.
        """
        guess = self.pass_seconds(*head, 1)
        passes = {n: self.pass_seconds(*target, n) for n in range(1, depth + 2)}
        return Costs(passes=passes, draft_first=guess, draft_next=guess, rest=(0.0, 0.0))


def weights_read(module: torch.nn.Module) -> int:
    """Parameters that a pass multiplies by: all weight matrices of linear layers, tied or not."""
    return sum(
        m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear | Conv1D)
    )


def probe_device(engine: Engine, rounds: int = 3) -> Device:
    """Bandwidth and FLOP/s of the engine's device in the engine's precision, as best of rounds."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=engine.device, dtype=engine.target.dtype)

    weight, row, square = random(24576, 1024), random(1, 1024), random(1536, 1536)
    if engine.packed:
        linear = torch.nn.Linear(1024, len(weight), bias=False)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        product: Callable[[torch.Tensor], torch.Tensor] = PackedLinear(
            [linear], fastest_rows(weight)
        )
    else:

        def product(x: torch.Tensor) -> torch.Tensor:
            return x @ weight.T

    works: dict[str, Callable[[], torch.Tensor]] = {
        "read": lambda: product(row),
        "multiply": lambda: square @ square,
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            work()
            began = now(engine.device)
            work()
            best[name] = min(best[name], now(engine.device) - began)
    return Device(
        bandwidth=weight.numel() * weight.element_size() / best["read"],
        flops=2 * 1536**3 / best["multiply"],
    )
