"""Fair timing of decoding methods, and what the times say.

Used by chapter 07. ``time_methods`` lets several methods decode the same prompts, checks that they
say the same and that it is what the target says, and only then lets their times count.
``summarise`` turns the runs into acceptance and speed with intervals over prompts; ``difference``
compares two methods pair by pair. Decoding itself belongs to ``decoding``; explaining the times to
``costs``.

Speed here is decoding speed: tokens after the first, over the time after the prompt was read; or
that of whole answers, where it says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftlayers.decoding import Decoded, Drafter, acceptance_length, acceptance_rates, decode
from draftlayers.engine import Engine
from draftlayers.targets import Target

PLAIN = "plain"
# Two logits closer than this share of the largest logit may change places by rounding alone,
# because a pass over several tokens sums in another order than a pass over one.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}

Method = Callable[[Sequence[int], int], Decoded]
"""Decodes a prompt greedily: ``run(prompt, max_new_tokens)``."""


class LossError(RuntimeError):
    """A method that must change nothing changed the output."""


# --- Timing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a method's output first differs from plain decoding, at a tie up to rounding.

    ``gap`` is how far the method's token lies below the target's best there, in logits.
    """

    prompt: int
    method: str
    place: int
    gap: float


@dataclass
class Timings:
    """Runs of all methods, ``runs[method][prompt][repeat]``, and differences by rounding.

    A method has no repeats of a prompt that it was not given.
    """

    runs: dict[str, list[list[Decoded]]]
    differences: list[Difference]

    def shared(self, *methods: str, among: Sequence[int] | None = None) -> list[int]:
        """Indices of the prompts that all these methods decoded, of those asked for."""
        asked = range(len(self.runs[methods[0]])) if among is None else among
        return [i for i in asked if all(self.runs[method][i] for method in methods)]


def engine_methods(
    engine: Engine, drafters: Mapping[str, Drafter], capacity: int
) -> dict[str, Method]:
    """Decoding on one engine, plainly and with each drafter, as methods to be timed.

    Parameters
    ----------
    drafters
        By name.
    capacity
        Tokens of the longest prompt and its answer. Room is made now, so that no method has to
        make it while it is timed.
    """

    def method(drafter: Drafter | None) -> Method:
        return lambda prompt, max_new_tokens: decode(engine, prompt, max_new_tokens, drafter)

    largest = max((drafter.size for drafter in drafters.values()), default=0)
    engine.reserve(min(capacity, engine.limit), new=1 + largest)
    return {PLAIN: method(None)} | {name: method(drafter) for name, drafter in drafters.items()}


def time_methods(
    target: Target,
    prompts: Sequence[Sequence[int]],
    methods: Mapping[str, Method],
    max_new_tokens: int,
    repeats: int = 1,
    every: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Timings:
    """Decode every prompt greedily with every method, in an order that favours none.

    Each method decodes the first prompt once unmeasured; then the order rotates from prompt to
    prompt and repeat to repeat. Outputs are compared before a time counts: plain decoding's with
    the target's own forward pass, which shares no code with decoding, and all others with it.

    Parameters
    ----------
    target
        What all methods decode with.
    methods
        By name, ``plain`` among them.
    repeats
        Times each method decodes each prompt.
    every
        For methods that are too slow to decode every prompt: 4 gives one each fourth prompt.
    say
        Is told how far things are.

    Raises
    ------
    LossError
        When an output is not the target's own greedy answer, rounding aside.
    """
    names, every = list(methods), every or {}
    for run in methods.values():
        run(prompts[0], min(max_new_tokens, 12))
    timings = Timings({name: [[] for _ in prompts] for name in names}, [])
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            shift = (i + repeat) % len(names)
            turns = [n for n in names[shift:] + names[:shift] if i % every.get(n, 1) == 0]
            for name in turns:
                timings.runs[name][i].append(methods[name](prompt, max_new_tokens))
            plain = timings.runs[PLAIN][i][0]
            if repeat == 0:
                check_answer(target, prompt, plain)
            for name in turns:
                found = first_difference(target, prompt, plain, timings.runs[name][i][-1])
                if found and repeat == 0:
                    timings.differences.append(Difference(i, name, *found))
            done, total = repeat * len(prompts) + i + 1, repeats * len(prompts)
            if done * 5 // total > (done - 1) * 5 // total:
                say(f"decoded {done} of {total} prompts with {len(names)} methods")
    return timings


def check_answer(target: Target, prompt: Sequence[int], answer: Decoded) -> None:
    """Compare an answer with the target's likeliest tokens, read in one forward pass.

    Raises
    ------
    LossError
        When a token lies further below the likeliest than rounding explains.
    """
    if not answer.tokens:
        return
    logits = own_logits(target, [*prompt, *answer.tokens[:-1]], len(answer.tokens))
    chosen = torch.tensor(answer.tokens, device=logits.device)[:, None]
    gaps = (logits.max(-1).values - logits.gather(1, chosen)[:, 0]).tolist()
    for place, (gap, row) in enumerate(zip(gaps, logits, strict=True)):
        if gap > rounding(target, row):
            raise LossError(
                f"plain decoding's token {place} lies {gap:.3g} below the target's best logit "
                f"({rounding(target, row):.2g} could be rounding): decoding was not lossless"
            )


def first_difference(
    target: Target, prompt: Sequence[int], plain: Decoded, other: Decoded
) -> tuple[int, float] | None:
    """Place of the first different token, and how far the other's lies below the best; or None.

    Raises
    ------
    LossError
        When that is more than rounding explains.
    """
    if plain.tokens == other.tokens:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if place == shorter:
        raise LossError(f"an output ends after {place} tokens, and plain decoding's does not")
    logits = own_logits(target, [*prompt, *plain.tokens[:place]], 1)[0]
    gap, allowed = (logits.max() - logits[other.tokens[place]]).item(), rounding(target, logits)
    if gap > allowed:
        raise LossError(
            f"the outputs differ at token {place}, where the other one lies {gap:.3g} below the "
            f"target's best logit ({allowed:.2g} could be rounding): decoding was not lossless"
        )
    return place, gap


@torch.no_grad()
def own_logits(target: Target, tokens: Sequence[int], rows: int) -> Tensor:
    """Logits ``[rows, V]`` after the last tokens, by the model's own forward pass, in float32."""
    ids = torch.tensor([tokens], device=target.device)
    logits: Tensor = target.model(input_ids=ids, use_cache=False).logits
    return logits[0, -rows:].float()


def rounding(target: Target, logits: Tensor) -> float:
    """How far a token may lie below the best of logits ``[V]`` and yet be chosen, by rounding.

    In low precision rounding may also send a token to other experts, which moves its logits by
    any amount. So differences of a mixture of experts are counted there, but none is refused.
    """
    if target.dtype in (torch.bfloat16, torch.float16) and has_experts(target.config):
        return float("inf")
    return ROUNDING[target.dtype] * logits.abs().max().item()


def has_experts(config: Any) -> bool:
    """Whether a router chooses among experts, by any setting that counts them."""
    return any(
        "experts" in name and isinstance(value, int) and value > 1
        for name, value in config.to_dict().items()
    )


# --- Comparing ---------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A statistic of all prompts and its 95 percent percentile bootstrap interval."""

    value: float
    low: float
    high: float


def estimate(statistic: Callable[[Tensor], float], n: int, replicates: int) -> Estimate:
    """A statistic of `n` prompts, a function of their indices ``[m]``, with its ``interval``."""
    return Estimate(statistic(torch.arange(n)), *interval(statistic, n, replicates))


def interval(statistic: Callable[[Tensor], float], n: int, replicates: int) -> tuple[float, float]:
    """Percentile bootstrap interval (95 percent) of a statistic of `n` prompts.

    Parameters
    ----------
    statistic
        Function of indices ``[n]``; prompts are drawn with replacement, so a statistic that
        compares two methods is paired.
    """
    generator = torch.Generator().manual_seed(0)
    values = sorted(
        statistic(torch.randint(n, (n,), generator=generator)) for _ in range(replicates)
    )
    return values[int(0.025 * (replicates - 1))], values[round(0.975 * (replicates - 1))]


def decode_seconds(runs: Sequence[Sequence[Decoded]], whole: bool = False) -> Tensor:
    """Median seconds ``[P]`` of each prompt's repeats, reading the prompt left out or counted."""
    skip = 0.0 if whole else 1.0
    return torch.tensor(
        [
            statistics.median(r.seconds["total"] - skip * r.seconds["prefill"] for r in repeats)
            for repeats in runs
        ],
        dtype=torch.float64,
    )


def decoded_tokens(runs: Sequence[Sequence[Decoded]], whole: bool = False) -> Tensor:
    """Tokens ``[P]`` of each answer: those that passes produced (all but the first), or all."""
    counts = [len(r[0].tokens) if whole else sum(r[0].produced) for r in runs]
    return torch.tensor(counts, dtype=torch.float64)


def speed(runs: Sequence[Sequence[Decoded]], whole: bool = False) -> Callable[[Tensor], float]:
    """Tokens per second, pooled over prompts, as a function of their indices ``[m]``.

    `runs` holds the repeats of each prompt. 0 where no prompt has a token to count.
    """
    tokens, seconds = decoded_tokens(runs, whole), decode_seconds(runs, whole)
    return lambda i: (tokens[i].sum() / seconds[i].sum()).item() if tokens[i].any() else 0.0


def ratio(
    runs: Sequence[Sequence[Decoded]], base: Sequence[Sequence[Decoded]], whole: bool = False
) -> Callable[[Tensor], float]:
    """Ratio of speeds on the same prompts as a function of their indices ``[m]``.

    1 where no token was left to speed up, because every answer ended with its first.
    """
    fast, slow = speed(runs, whole), speed(base, whole)

    def statistic(i: Tensor) -> float:
        above, below = fast(i), slow(i)
        return above / below if above and below else 1.0

    return statistic


def pooled_length(runs: Sequence[Sequence[Decoded]]) -> Callable[[Tensor], float]:
    """Acceptance length τ, pooled over passes, as a function of indices ``[m]`` of prompts.

    1 where there was no pass at all.
    """
    tokens = decoded_tokens(runs)
    passes = torch.tensor([float(repeats[0].passes) for repeats in runs])
    return lambda i: (tokens[i].sum() / passes[i].sum()).item() if passes[i].any() else 1.0


def speedup(
    timings: Timings,
    method: str,
    base: str = PLAIN,
    whole: bool = False,
    replicates: int = 1000,
    prompts: Sequence[int] | None = None,
) -> Estimate:
    """Speed of a method over another's, on the prompts that both decoded.

    Parameters
    ----------
    whole
        Count whole answers, the time for reading the prompt included.
    replicates
        Bootstrap replicates; pairs of runs of one prompt stay together.
    prompts
        Indices to look at; default all.
    """
    chosen = timings.shared(method, base, among=prompts)
    runs, others = ([timings.runs[name][i] for i in chosen] for name in (method, base))
    return estimate(ratio(runs, others, whole), len(chosen), replicates)


def difference(
    timings: Timings, method: str, base: str, replicates: int = 1000
) -> dict[str, Estimate]:
    """How two methods differ on the same prompts, with paired intervals.

    Returns
    -------
    dict
        ``tau``, the acceptance length of `method` minus that of `base`, and ``speed``, the ratio
        of their speeds.
    """
    chosen = timings.shared(method, base)
    own, other = (pooled_length([timings.runs[name][i] for i in chosen]) for name in (method, base))
    return {
        "tau": estimate(lambda i: own(i) - other(i), len(chosen), replicates),
        "speed": speedup(timings, method, base, replicates=replicates),
    }


def summarise(
    timings: Timings, replicates: int = 1000, prompts: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Acceptance and speed of each method with 95 percent bootstrap intervals over prompts.

    Parameters
    ----------
    timings
        From ``time_methods``.
    replicates
        Bootstrap replicates.
    prompts
        Indices to look at, for example those of one kind; default all.

    Returns
    -------
    dict
        For each method ``tau`` (pooled over passes, the target's own token included),
        ``alpha`` (acceptance rate by place), ``tokens_per_second``, ``speedup`` over plain
        decoding, ``speedup_with_prompt`` (whole answers, reading the prompt counted),
        ``identical`` (share of prompts), each of τ and speedup with ``_interval``.
    """
    summary = {}
    for name, all_runs in timings.runs.items():
        chosen = timings.shared(name, among=prompts)
        runs = [all_runs[i] for i in chosen]
        firsts = [repeats[0] for repeats in runs]
        faster = speedup(timings, name, replicates=replicates, prompts=chosen)
        different = {d.prompt for d in timings.differences if d.method == name}
        summary[name] = {
            "tau": acceptance_length(firsts),
            "tau_interval": interval(pooled_length(runs), len(chosen), replicates),
            "alpha": acceptance_rates(firsts),
            "tokens_per_second": speed(runs)(torch.arange(len(chosen))),
            "speedup": faster.value,
            "speedup_interval": (faster.low, faster.high),
            "speedup_with_prompt": speedup(
                timings, name, whole=True, replicates=1, prompts=chosen
            ).value,
            "identical": 1 - len(different & set(chosen)) / len(chosen),
        }
    return summary


def prompt_speedups(timings: Timings, method: str) -> Tensor:
    """Speedup ``[P]`` of a method over plain decoding on each prompt."""
    statistic = ratio(timings.runs[method], timings.runs[PLAIN])
    return torch.tensor([statistic(torch.tensor([i])) for i in range(len(timings.runs[PLAIN]))])
