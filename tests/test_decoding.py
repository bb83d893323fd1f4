"""Decoding is lossless: greedy token for token, sampling in distribution."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from oracle import ARCHITECTURES, PROMPT, Oracle, build, greedy_reference, random_head
from scipy.stats import chi2
from transformers.generation import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftlayers.decoding import (
    ROOT,
    Chance,
    Decoded,
    Draft,
    Sampling,
    accept_greedy,
    accept_sampled,
    acceptance_length,
    acceptance_rates,
    decode,
)
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.project import UserError
from draftlayers.start import start_at_random, start_from_target
from draftlayers.targets import tiny_target


@pytest.fixture(scope="module")
def llama() -> Engine:
    return build("llama")


# --- Greedy decoding ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_hugging_face(name: str) -> None:
    engine = build(name)
    expected = greedy_reference(engine, PROMPT, 40)
    assert decode(engine, PROMPT, 40).tokens == expected
    head = random_head(engine)
    for drafter in (
        HeadDrafter(head, depth=4),
        HeadDrafter(head, depth=4, confidence=0.02),
        HeadDrafter(head, depth=4, top_k=3, total=10),
        Oracle(PROMPT + expected, depth=5, right=0.8),
        Oracle(PROMPT + expected, depth=4, right=0.9, width=3),
    ):
        run = decode(engine, PROMPT, 40, drafter)
        assert run.tokens == expected
        assert sum(run.produced) == 39
        if isinstance(drafter, Oracle):
            assert acceptance_length([run]) > 2
        else:
            assert acceptance_length([run]) < 1.5


def test_perfect_guesses_are_all_accepted(llama: Engine) -> None:
    expected = greedy_reference(llama, PROMPT, 25)
    run = decode(llama, PROMPT, 25, Oracle(PROMPT + expected, depth=3, right=1.0))
    assert run.tokens == expected
    assert run.produced == [4] * 6  # 1 from the prompt, then 6 passes of 3 guesses and a bonus
    assert run.accepted == run.offered == [draft.depth for draft in run.drafts] == [3] * 6
    assert run.paths == [[0, 1, 2]] * 6
    assert acceptance_rates([run]) == [1.0, 1.0, 1.0]


def test_many_prompts_by_many_drafters() -> None:
    """160 prompts of 1 to 40 tokens; every drafter must give what plain decoding gives."""
    rng = random.Random(3)
    llama = build("llama", n_layers=2)
    head = random_head(llama, layers=(1,), start=start_from_target)
    drafters = [HeadDrafter(head, depth=3), HeadDrafter(head, depth=3, top_k=2, total=5)]
    taus = []
    for i in range(160):
        prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 41))]
        plain = decode(llama, prompt, 6)
        oracle = Oracle(prompt + plain.tokens, 3, 0.7, width=1 + i % 2, seed=i)
        for drafter in (*drafters[i % 4 : i % 4 + 1], oracle):
            run = decode(llama, prompt, 6, drafter)
            assert run.tokens == plain.tokens, f"prompt {i} with {type(drafter).__name__}"
        taus.append(acceptance_length([run]))
    assert sum(taus) / len(taus) > 1.8


@pytest.mark.parametrize("width", [1, 3])
def test_end_token_anywhere_in_a_run(llama: Engine, width: int) -> None:
    expected = greedy_reference(llama, PROMPT, 14)
    for place in range(14):
        llama.eos_ids = frozenset({expected[place]})
        wanted = expected[: expected.index(expected[place]) + 1]
        try:
            run = decode(llama, PROMPT, 30, Oracle(PROMPT + expected, 5, 1.0, width))
        finally:
            llama.eos_ids = frozenset()
        assert run.tokens == wanted and run.stop == "eos"
        assert sum(run.produced) == len(wanted) - 1
        assert all(a <= o for a, o in zip(run.accepted, run.offered, strict=True))
        # What lies behind an end token was neither accepted nor rejected.
        assert all(rate in (1.0, None) for rate in acceptance_rates([run]))


@pytest.mark.parametrize("width", [1, 2])
def test_stops_exactly_at_the_length_limit(llama: Engine, width: int) -> None:
    expected = greedy_reference(llama, PROMPT, 16)
    for n in range(14):
        run = decode(llama, PROMPT, n, Oracle(PROMPT + expected, 4, 1.0, width))
        assert run.tokens == expected[:n]
        assert run.stop == "length"
    assert decode(llama, PROMPT, 0).passes == decode(llama, PROMPT, 1).passes == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_context_limit(name: str) -> None:
    size = {"n_positions": 32} if name == "gpt2" else {"max_position_embeddings": 32}
    engine = build(name, **size)
    plain = decode(engine, PROMPT, 100)
    assert len(plain.tokens) == 32 - len(PROMPT) and plain.stop == "context"
    assert plain.tokens == greedy_reference(engine, PROMPT, 32 - len(PROMPT))
    head = random_head(engine)
    for drafter in (
        HeadDrafter(head, 5),
        HeadDrafter(head, 5, top_k=4, total=20),
        Oracle(PROMPT + plain.tokens + [1] * 9, 5, 1.0),
    ):
        run = decode(engine, PROMPT, 100, drafter)
        assert run.tokens == plain.tokens and run.stop == "context"


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_prompt_of_one_token_and_longer_than_a_chunk(name: str, monkeypatch) -> None:
    engine = build(name)
    head = random_head(engine)
    for prompt in ([9], PROMPT * 4):
        expected = greedy_reference(engine, prompt, 12)
        for chunk in (256, 16):
            monkeypatch.setattr("draftlayers.engine.PREFILL", chunk)
            for drafter in (None, HeadDrafter(head, 3), HeadDrafter(head, 3, top_k=2)):
                assert decode(engine, prompt, 12, drafter).tokens == expected


def test_bad_requests_are_explained(llama: Engine) -> None:
    for prompt in ([], [1] * 1024):
        with pytest.raises(UserError, match=r"expected 1 to 1023"):
            decode(llama, prompt, 5)
    for wrong in ({"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(UserError, match="expected"):
            Sampling(**wrong)


# --- Sampling ----------------------------------------------------------------------------------


class Replay:
    """A source of chance that follows given decisions and notes the alternatives it passed by."""

    def __init__(self, decisions: list[int]):
        self.decisions, self.made, self.weight = decisions, [], 1.0
        self.alternatives: list[list[int]] = []

    def _decide(self, probabilities: list[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if len(self.made) < len(self.decisions):
            choice = self.decisions[len(self.made)]
        else:
            choice = possible[0]
            self.alternatives += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.weight *= probabilities[choice]
        return choice

    def accepts(self, probability: float) -> bool:
        return self._decide([probability, 1 - probability]) == 0

    def draw(self, probabilities: torch.Tensor) -> int:
        return self._decide(probabilities.tolist())


def distribution(procedure: Callable[[Replay], tuple]) -> Counter:
    """Exact distribution of a procedure's result, by going through all its decisions."""
    found: Counter = Counter()
    waiting: list[list[int]] = [[]]
    while waiting:
        chance = Replay(waiting.pop())
        found[procedure(chance)] += chance.weight
        waiting += chance.alternatives
    return found


class ToyEngine:
    """A target on four tokens whose distribution depends on the last two, in float64."""

    device, limit = torch.device("cpu"), 1000

    def __init__(self, seed: int, eos_ids=frozenset()):
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(4, 4, 4, generator=generator, dtype=torch.float64)
        self.eos_ids, self.tokens = eos_ids, []

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]

    @contextmanager
    def session(self, capacity: int, boundaries=(), new: int = 1) -> Iterator[None]:
        self.tokens = []
        yield

    def prefill(self, prompt):
        self.tokens = list(prompt)
        return self.logits(self.tokens), None

    def forward(self, tokens, depths=None, sees=None):
        n = len(tokens)
        sees = torch.ones(n, n).tril().bool() if sees is None else sees
        self.paths = [tokens[row].tolist() for row in sees]
        return torch.stack([self.logits(self.tokens + path) for path in self.paths]), None

    def keep(self, rows) -> None:
        self.tokens += self.paths[rows[-1]]


class ToyDrafter:
    """Guesses from a table of its own: a sampled chain, or a tree of its likeliest tokens.

    A chain ends early when its guesses together were unlikely.
    """

    boundaries = ()

    def __init__(self, engine: ToyEngine, depth: int, width: int, seed: int, confidence: float):
        self.engine, self.depth, self.width, self.confidence = engine, depth, width, confidence
        self.own, self.size = ToyEngine(seed), 100

    def session(self, capacity: int):
        return nullcontext()

    def observe(self, tokens, states) -> None:
        self.last = tokens[-1]

    def propose(self, depth: int, sampling: Sampling, chance) -> Draft:
        tokens, parents, proposed = [], [], []
        level, reached = [(ROOT, [*self.engine.tokens, self.last])], 1.0
        for _ in range(min(depth, self.depth)):
            if self.width == 1 and reached < self.confidence:
                break
            grown = []
            for parent, path in level:
                q = sampling.probabilities(self.own.logits(path))
                chosen = [chance.draw(q)] if self.width == 1 else q.topk(self.width).indices
                for token in map(int, chosen):
                    grown.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(parent)
                    proposed.append(q)
                    reached *= q[token].item()
            level = grown
        return Draft(tokens, parents, proposed if self.width == 1 else None)


@pytest.mark.parametrize("width, confidence", [(1, 0.0), (1, 0.3), (2, 0.0), (3, 0.0)])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.7)],
    ids=str,
)
def test_sampling_is_exact_by_enumeration(
    width: int, confidence: float, sampling: Sampling
) -> None:
    """Over every random decision, three tokens come out with the target's own probabilities."""
    n = 3
    for seed, eos_ids in ((0, frozenset()), (1, frozenset({2}))):
        engine = ToyEngine(seed, eos_ids)
        drafter = ToyDrafter(engine, 2, width, seed + 100, confidence)
        found = distribution(
            lambda chance, e=engine, d=drafter: tuple(
                decode(e, [1, 3], n, d, sampling, chance).tokens
            )
        )
        expected: Counter = Counter()

        def spread(tokens: list[int], weight: float, engine=engine, expected=expected) -> None:
            if len(tokens) == n or (tokens and tokens[-1] in engine.eos_ids):
                expected[tuple(tokens)] += weight
                return
            p = sampling.probabilities(engine.logits([1, 3, *tokens])).tolist()
            for token, probability in enumerate(p):
                if probability:
                    spread([*tokens, token], weight * probability)

        spread([], 1.0)
        assert found.keys() == expected.keys()
        for tokens, weight in expected.items():
            assert found[tokens] == pytest.approx(weight, abs=1e-12)


def test_greedy_is_the_limit_of_sampling() -> None:
    """With all mass on one token, both rules accept the same path."""
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randrange(1, 8)
        parents = [rng.randrange(-1, i) for i in range(n)]
        tokens = [0] * n
        for node in range(-1, n):
            children = [i for i in range(n) if parents[i] == node]
            for child, token in zip(children, rng.sample(range(8), len(children)), strict=True):
                tokens[child] = token
        best = [rng.randrange(8) for _ in range(n + 1)]
        one_hot = torch.eye(8)[best]
        draft = Draft(tokens, parents)
        found = accept_sampled(draft, lambda node, p=one_hot: p[node + 1], Chance(0))
        assert found == accept_greedy(draft, best)


@pytest.mark.parametrize("options", [{}, {"confidence": 0.3}, {"top_k": 3, "total": 6}], ids=str)
def test_sampling_on_a_model_by_chi_square(options: dict) -> None:
    """Three sampled tokens of a tiny model against their exact probabilities.

    The test refuses a correct implementation with probability 1e-4; the seed is fixed.
    """
    engine = build("llama", n_layers=2)
    sampling, runs = Sampling(1.2, top_k=3, top_p=0.95), 400
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, weight in expected.items():
            with torch.no_grad():
                logits = engine.target.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            for token, p in enumerate(sampling.probabilities(logits).tolist()):
                if p > 0:
                    longer[*tokens, token] = weight * p
        expected = longer
    # A draft vocabulary of tokens that can follow, so that random guesses are often right.
    vocabulary = torch.tensor(sorted({tokens[1] for tokens in expected}))
    head = random_head(engine, (1,), start_at_random, vocabulary)
    drafter = HeadDrafter(head, depth=2, **options)
    chance, found, accepted = Chance(11), Counter(), 0
    for _ in range(runs):
        run = decode(engine, PROMPT, 4, drafter, sampling, chance)
        found[tuple(run.tokens[:3])] += 1
        accepted += sum(run.accepted)
    assert set(found) <= set(expected)
    rare = [tokens for tokens, p in expected.items() if runs * p < 5]
    cells = [(found[tokens], p) for tokens, p in expected.items() if tokens not in rare]
    if rare:
        cells.append((sum(found[x] for x in rare), sum(expected[x] for x in rare)))
    statistic = sum((count - runs * p) ** 2 / (runs * p) for count, p in cells)
    assert statistic < chi2.ppf(1 - 1e-4, len(cells) - 1)
    assert accepted > runs / 10  # otherwise nothing but plain sampling was tested


@pytest.mark.parametrize("seed", range(5))
def test_sampling_equals_hugging_face(seed: int) -> None:
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed)).double()
    for temperature, top_k, top_p in [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.5, 0, 0.6), (0.9, 9, 0.8)]:
        expected = TemperatureLogitsWarper(temperature)(None, logits[None])
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        found = Sampling(temperature, top_k, top_p).probabilities(logits)
        torch.testing.assert_close(found, expected[0].softmax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_tiny_temperatures_are_greedy(llama: Engine, temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, -torch.inf, 2.999, 3.0])
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=2, top_p=0.9)):
        assert sampling.probabilities(logits).tolist() == [0, 0.5, 0, 0, 0.5]
    drafter = HeadDrafter(random_head(llama), depth=3)
    run = decode(llama, PROMPT, 12, drafter, Sampling(temperature))
    assert run.tokens == decode(llama, PROMPT, 12).tokens


def test_sampling_is_reproducible(llama: Engine) -> None:
    drafter = HeadDrafter(random_head(llama), depth=3)
    sampling = Sampling(1.0, top_k=20)
    a, b, c = (decode(llama, PROMPT, 20, drafter, sampling, Chance(s)).tokens for s in (1, 1, 2))
    assert a == b != c


# --- Counts ------------------------------------------------------------------------------------


def test_counts() -> None:
    runs = [
        Decoded(produced=[1, 3, 2], accepted=[0, 2, 1], offered=[2, 2, 2]),
        Decoded(produced=[2, 1], accepted=[2, 0], offered=[2, 0]),
    ]
    assert acceptance_length(runs) == 9 / 5
    assert acceptance_rates(runs) == [3 / 4, 2 / 3]
    assert acceptance_length([Decoded()]) == 1.0
    assert acceptance_rates([Decoded()]) == []


# --- The default target's real weights ---------------------------------------------------------


@pytest.mark.slow
def test_real_target_on_480_prompts() -> None:
    """Token-identical to plain decoding in float32 on Spec-Bench's questions, or on ours.

    Takes half an hour on one core; ``DRAFTLAYERS_DECODE_PROMPTS`` limits the prompts.
    """
    from draftlayers.project import DATA, PROJECT
    from draftlayers.prompts import balanced, read_prompts
    from draftlayers.targets import load_target

    spec_bench = PROJECT.parent / "shared" / "data" / "spec_bench_question.jsonl"
    paths = [spec_bench] if spec_bench.exists() else sorted((DATA / "prompts").glob("*.jsonl"))
    prompts = balanced([prompt for path in paths for prompt in read_prompts(path)])[:480]
    assert len(prompts) == 480
    prompts = prompts[: int(os.environ.get("DRAFTLAYERS_DECODE_PROMPTS", 480))]
    target = load_target("smollm2-135m", "cpu", torch.float32)
    engine = Engine(target)
    config = HeadConfig.for_target(target, (2, 15, 27), 4000)
    head = DraftHead(
        config, target.model.get_input_embeddings().weight, torch.arange(4000) * 2 + 5
    ).eval()
    start_from_target(head, target, 0)
    head.requires_grad_(False)
    drafters = [HeadDrafter(head, 4), HeadDrafter(head, 4, top_k=3, total=8)]
    taus = []
    for i, prompt in enumerate(prompts):
        ids = target.render(prompt.turns)[-320:]
        plain = decode(engine, ids, 24)
        chain, tree = (Oracle(ids + plain.tokens, 5, 0.8, width, seed=i) for width in (1, 2))
        for drafter in (chain, tree, *(drafters if i % 8 == 0 else ())):
            run = decode(engine, ids, 24, drafter)
            assert run.tokens == plain.tokens, prompt.id
            if drafter is tree:
                taus.append(acceptance_length([run]))
        if i % 40 == 39:
            print(f"{i + 1} of {len(prompts)} prompts identical", flush=True)
    assert sum(taus) / len(taus) > 2  # long runs were accepted, not only single tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_cuda_graphs_equal_hugging_face(name: str) -> None:
    target = tiny_target(architecture=name, **ARCHITECTURES[name])
    target.model.to("cuda")
    engine = Engine(target)
    engine.eos_ids = frozenset()
    assert "CUDA graphs" in engine.way
    ids = torch.tensor([PROMPT], device="cuda")
    out = target.model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
    expected = out[0, len(PROMPT) :].tolist()
    head = random_head(engine).to("cuda")
    for drafter in (
        None,
        HeadDrafter(head, depth=4),
        HeadDrafter(head, depth=4, top_k=3, total=10),
        Oracle(PROMPT + expected, depth=5, right=0.8),
        Oracle(PROMPT + expected, depth=4, right=0.9, width=3),
    ):
        run = decode(engine, PROMPT, 40, drafter)
        assert run.tokens == expected
        assert run.seconds["verify"] > 0


def test_default_prompts_exist() -> None:
    """The slow test falls back to the prompts that ship with the project."""
    assert (Path(__file__).parents[1] / "data" / "prompts").exists()
