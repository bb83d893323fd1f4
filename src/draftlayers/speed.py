"""Fair timing of decoding methods, and a model of what speculation costs and gains.

Used by chapter 07. ``measure`` lets several methods decode the same prompts on the same engine,
checks that they say the same, and only then lets their times count; ``compare`` turns the runs
into acceptance and speed with intervals. ``measure_costs`` times the parts (a plain pass, a verify
pass, a draft step, the rest) apart from any prompt, so that ``predicted_speedup`` can be held
against what was measured. ``Device`` does the same arithmetic from bandwidth and FLOP/s alone.
Decoding itself belongs to ``decoding``.

Speed here is decoding speed: tokens after the first, over the time after the prompt was read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from draftlayers.decoding import (
    GREEDY,
    Chance,
    Decoded,
    Drafter,
    HeadDrafter,
    acceptance_length,
    acceptance_rates,
    decode,
)
from draftlayers.engine import Engine, PackedLinear, fastest_rows

PLAIN = "plain"
# Two logits closer than this share of the largest logit may change places by rounding alone,
# because a pass over several tokens sums in another order than a pass over one.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class LossError(RuntimeError):
    """A method that must change nothing changed the output."""


# --- Measuring ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a method's output first differs from plain decoding, at a tie up to rounding.

    ``gap`` is the target's distance between its two best logits there.
    """

    prompt: int
    method: str
    place: int
    gap: float


@dataclass
class Measured:
    """Runs of all methods, ``runs[method][prompt][repeat]``, and differences by rounding."""

    runs: dict[str, list[list[Decoded]]]
    differences: list[Difference]


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    methods: Mapping[str, Drafter | None],
    max_new_tokens: int,
    repeats: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Decode every prompt greedily with every method, in an order that favours none.

    All methods run on the same engine. Each decodes the first prompt once unmeasured; then the
    order rotates from prompt to prompt and repeat to repeat. Outputs are compared with plain
    decoding's before a time counts.

    Parameters
    ----------
    methods
        Drafters by name; ``plain`` (None) is added when it is not among them.
    repeats
        Times each method decodes each prompt.
    say
        Is told how far things are.

    Raises
    ------
    LossError
        When an output differs where the target's two best logits are not tied up to rounding.
    """
    methods = {PLAIN: None, **methods}
    names = list(methods)
    guesses = max(drafter.size if drafter else 0 for drafter in methods.values())
    engine.reserve(max(map(len, prompts)) + max_new_tokens, new=1 + guesses)
    for name in names:
        decode(engine, prompts[0], min(max_new_tokens, 12), methods[name])
    runs: dict[str, list[list[Decoded]]] = {name: [[] for _ in prompts] for name in names}
    differences = []
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            shift = (i + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                runs[name][i].append(decode(engine, prompt, max_new_tokens, methods[name]))
            for name in names[1:]:
                found = first_difference(engine, prompt, runs[PLAIN][i][-1], runs[name][i][-1])
                if found and repeat == 0:
                    differences.append(Difference(i, name, *found))
            done, total = repeat * len(prompts) + i + 1, repeats * len(prompts)
            if done * 5 // total > (done - 1) * 5 // total:
                say(f"decoded {done} of {total} prompts with {len(names)} methods")
    return Measured(runs, differences)


def first_difference(
    engine: Engine, prompt: Sequence[int], plain: Decoded, other: Decoded
) -> tuple[int, float] | None:
    """Place of the first different token and the gap of the two best logits there, or None.

    Raises
    ------
    LossError
        When that gap is more than rounding.
    """
    if plain.tokens == other.tokens:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    before = [*prompt, *plain.tokens[:place]]
    with engine.session(len(before)):
        logits, _ = engine.prefill(before)
    first, second = logits.topk(2).values.tolist()
    gap, allowed = first - second, ROUNDING[engine.target.dtype] * logits.abs().max().item()
    if gap > allowed or place == shorter:
        raise LossError(
            f"the outputs differ at token {place}, where the target's best logit leads by "
            f"{gap:.3g} (up to {allowed:.2g} could be rounding): decoding was not lossless"
        )
    return place, gap


# --- Comparing ---------------------------------------------------------------------------------


def decode_seconds(runs: Sequence[Sequence[Decoded]], with_prompt: bool = False) -> torch.Tensor:
    """Median seconds ``[P]`` of each prompt's repeats, reading the prompt left out or counted."""
    skip = 0.0 if with_prompt else 1.0
    return torch.tensor(
        [
            statistics.median(r.seconds["total"] - skip * r.seconds["prefill"] for r in repeats)
            for repeats in runs
        ],
        dtype=torch.float64,
    )


def decoded_tokens(runs: Sequence[Sequence[Decoded]]) -> torch.Tensor:
    """Tokens ``[P]`` that passes produced (all but the first of each answer)."""
    return torch.tensor([float(sum(r[0].produced)) for r in runs], dtype=torch.float64)


def interval(
    statistic: Callable[[torch.Tensor], float], n: int, replicates: int, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval (95 percent) of a statistic of `n` prompts.

    Parameters
    ----------
    statistic
        Function of indices ``[n]``; prompts are drawn with replacement, so a statistic that
        compares two methods is paired.
    """
    generator = torch.Generator().manual_seed(seed)
    values = sorted(
        statistic(torch.randint(n, (n,), generator=generator)) for _ in range(replicates)
    )
    return values[int(0.025 * (replicates - 1))], values[round(0.975 * (replicates - 1))]


def compare(
    measured: Measured, replicates: int = 1000, prompts: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Acceptance and speed of each method with 95 percent bootstrap intervals over prompts.

    Parameters
    ----------
    measured
        From ``measure``.
    replicates
        Bootstrap replicates.
    prompts
        Indices to look at, for example those of one kind; default all.

    Returns
    -------
    dict
        For each method ``tau`` (pooled over passes, the target's own token included),
        ``alpha`` (acceptance rate by place), ``tokens_per_second``, ``speedup`` over plain
        decoding, ``speedup_with_prompt`` (reading the prompt counted), ``identical`` (share of
        prompts), each of τ and speedup with ``_interval``.
    """
    chosen = list(range(len(measured.runs[PLAIN])) if prompts is None else prompts)
    n = len(chosen)
    plain = [measured.runs[PLAIN][i] for i in chosen]
    table = {}
    for name, all_runs in measured.runs.items():
        runs = [all_runs[i] for i in chosen]
        firsts = [repeats[0] for repeats in runs]
        tokens, passes = decoded_tokens(runs), torch.tensor([float(r.passes) for r in firsts])
        seconds = decode_seconds(runs)
        ratio = _speedup(plain, runs, with_prompt=False)
        whole = torch.arange(n)
        different = {d.prompt for d in measured.differences if d.method == name}

        def tau(index: torch.Tensor, tokens=tokens, passes=passes) -> float:
            return (
                (tokens[index].sum() / passes[index].sum()).item() if passes[index].any() else 1.0
            )

        table[name] = {
            "tau": acceptance_length(firsts),
            "tau_interval": interval(tau, n, replicates),
            "alpha": acceptance_rates(firsts),
            "tokens_per_second": (tokens.sum() / seconds.sum()).item() if tokens.any() else 0.0,
            "speedup": ratio(whole),
            "speedup_interval": interval(ratio, n, replicates),
            "speedup_with_prompt": _speedup(plain, runs, with_prompt=True)(whole),
            "identical": 1 - len(different & set(chosen)) / n,
        }
    return table


def _speedup(
    plain: Sequence[Sequence[Decoded]], other: Sequence[Sequence[Decoded]], with_prompt: bool
) -> Callable[[torch.Tensor], float]:
    """Ratio of speeds (tokens over seconds, pooled over prompts) as a function of indices.

    1 where no token was left to speed up, because every answer ended with its first.
    """
    (n1, s1), (n2, s2) = (
        (decoded_tokens(runs), decode_seconds(runs, with_prompt)) for runs in (plain, other)
    )

    def ratio(i: torch.Tensor) -> float:
        if not n1[i].any() or not n2[i].any():
            return 1.0
        return ((n2[i].sum() / s2[i].sum()) / (n1[i].sum() / s1[i].sum())).item()

    return ratio


def prompt_speedups(measured: Measured, method: str) -> torch.Tensor:
    """Speedup ``[P]`` of a method on each prompt."""
    plain, other = measured.runs[PLAIN], measured.runs[method]
    ratio = _speedup(plain, other, with_prompt=False)
    return torch.tensor([ratio(torch.tensor([i])) for i in range(len(plain))])


# --- The cost model ----------------------------------------------------------------------------


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

    def relative(self, depth: int) -> dict[str, float]:
        """Terms of the cost model in plain decoding steps: verify v, draft c per guess, rest o."""
        drafting = self.draft_first + (depth - 1) * self.draft_next
        return {
            "v": self.verify(depth + 1) / self.plain,
            "c": drafting / depth / self.plain,
            "o": self.rest[1] / self.plain,
        }


def predicted_speedup(tau: float, depth: int, costs: Costs) -> float:
    """Speedup τ / (v + γ·c + o) of a chain of `depth` γ guesses with acceptance length τ."""
    terms = costs.relative(depth)
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
        Context of the passes; its tokens also serve as new tokens.
    sizes
        Numbers of tokens.
    """
    tokens = torch.tensor([prompt[i % len(prompt)] for i in range(max(sizes))])
    tokens = tokens.to(engine.device)
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    with engine.session(len(prompt), new=max(sizes)):
        engine.prefill(prompt)
        for repeat in range(repeats + 1):
            for n, times in seconds.items():
                began = now(engine)
                engine.forward(tokens[:n])
                if repeat:  # the first round warms up
                    times.append(now(engine) - began)
                engine.keep([])
    return {n: statistics.median(times) for n, times in seconds.items()}


def free_guesses(passes: Mapping[int, float], slack: float = 0.05) -> int:
    """How many guesses a pass verifies for about the price of one token.

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
            after = [*prompt[1:], int(logits.argmax())]
            drafter.observe(after, states)
            inputs[name] = after[-2:], states[-2:]
            drafts |= {(name, depth): [] for depth in (1, drafter.depth)}
        for repeat in range(repeats + 1):
            for (name, depth), times in drafts.items():
                drafter = drafters[name]
                drafter.cache.truncate(len(prompt) - 2)
                began = now(engine)
                drafter.observe(*inputs[name])
                drafter.propose(depth, GREEDY, Chance(0))
                if repeat:  # the first round warms up
                    times.append(now(engine) - began)
    median = {key: statistics.median(times) for key, times in drafts.items()}
    rests: dict[str, list[float]] = {PLAIN: [], **{name: [] for name in drafters}}
    for _ in range(3):
        for name, times in rests.items():
            run = decode(engine, prompt, 8, drafters.get(name))
            times.append(run.seconds["accept"] / max(1, run.passes))
    rest = {name: statistics.median(times) for name, times in rests.items()}
    return {
        name: Costs(
            passes=dict(passes),
            draft_first=median[name, 1],
            draft_next=max(0.0, median[name, drafter.depth] - median[name, 1])
            / max(1, drafter.depth - 1),
            rest=(rest[PLAIN], rest[name]),
        )
        for name, drafter in drafters.items()
    }


def now(engine: Engine) -> float:
    """Seconds on a clock that waits for the engine's device."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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
    options = {"device": engine.device, "dtype": engine.target.dtype}
    weight, row = torch.randn(24576, 1024, **options), torch.randn(1, 1024, **options)
    square = torch.randn(1536, 1536, **options)
    if engine.packed:
        linear = torch.nn.Linear(1024, len(weight), bias=False)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        product = PackedLinear([linear], fastest_rows(weight))
    else:

        def product(x: torch.Tensor) -> torch.Tensor:
            return x @ weight.T

    best = {"read": float("inf"), "multiply": float("inf")}
    for _ in range(rounds):
        for name, work in (("read", lambda: product(row)), ("multiply", lambda: square @ square)):
            work()
            began = now(engine)
            work()
            best[name] = min(best[name], now(engine) - began)
    return Device(
        bandwidth=weight.numel() * weight.element_size() / best["read"],
        flops=2 * 1536**3 / best["multiply"],
    )
