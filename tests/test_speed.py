"""Timing is fair and refuses a difference; summaries are the arithmetic they claim to be."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import PROMPT, Oracle, build, random_head
from scipy import stats

from draftlayers import speed
from draftlayers.decoding import Decoded, Draft, decode
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.project import PROJECT
from draftlayers.speed import (
    PLAIN,
    LossError,
    Timings,
    check_answer,
    difference,
    engine_methods,
    first_difference,
    has_experts,
    interval,
    prompt_speedups,
    speedup,
    summarise,
    time_methods,
)
from draftlayers.targets import tiny_target


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build("llama")


def synthetic(seconds: list[list[float]], tokens: list[int], accepted: int) -> list[list[Decoded]]:
    """Runs with given decoding times; each pass accepts the same number of guesses."""
    runs = []
    for times, n in zip(seconds, tokens, strict=True):
        passes = n // (accepted + 1)
        runs.append(
            [
                Decoded(
                    tokens=[1] * (n + 1),
                    produced=[accepted + 1] * passes,
                    accepted=[accepted] * passes,
                    offered=[accepted] * passes,
                    seconds={"prefill": 0.5, "total": 0.5 + t},
                )
                for t in times
            ]
        )
    return runs


def test_methods_take_turns_and_outputs_are_checked(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:], PROMPT[1:], PROMPT[2:]]
    drafters = {"a": HeadDrafter(random_head(engine), 3), "b": HeadDrafter(random_head(engine), 2)}
    order: list[str] = []

    def noted(name, run):
        def method(prompt, n):
            order.append(name)
            return run(prompt, n)

        return method

    methods = engine_methods(engine, drafters, len(PROMPT) + 8)
    methods = {name: noted(name, run) for name, run in methods.items()}
    said: list[str] = []
    timings = time_methods(engine.target, prompts, methods, 8, repeats=2, say=said.append)
    assert order[:3] == [PLAIN, "a", "b"]  # warm-up
    rounds = [tuple(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 10 and len(set(rounds[:3])) == 3  # each method comes first in turn
    assert all(sorted(r) == ["a", "b", PLAIN] for r in rounds)
    assert said[-1] == "decoded 10 of 10 prompts with 3 methods"
    for runs in timings.runs.values():
        assert [len(repeats) for repeats in runs] == [2] * 5
        for own, plain in zip(runs, timings.runs[PLAIN], strict=True):
            assert own[0].tokens == own[1].tokens == plain[0].tokens
    assert timings.differences == []
    table = summarise(timings, 50)
    assert table[PLAIN]["tau"] == table[PLAIN]["speedup"] == 1.0
    assert all(row["identical"] == 1 for row in table.values())


def test_a_slow_method_decodes_some_of_the_prompts(engine: Engine) -> None:
    prompts = [PROMPT[i:] for i in range(6)]
    head = random_head(engine)
    drafters = {"a": HeadDrafter(head, 2), "slow": HeadDrafter(head, 3)}
    methods = engine_methods(engine, drafters, len(PROMPT) + 6)
    timings = time_methods(engine.target, prompts, methods, 6, every={"slow": 4})
    assert [len(repeats) for repeats in timings.runs["slow"]] == [1, 0, 0, 0, 1, 0]
    assert timings.shared("slow", "a") == [0, 4] == timings.shared("slow")
    assert timings.shared("a", among=[1, 2]) == [1, 2]
    assert summarise(timings, 20)["slow"]["identical"] == 1.0
    assert speedup(timings, "slow", "a").value > 0


def test_room_is_made_before_anything_is_timed(engine: Engine) -> None:
    engine_methods(engine, {"a": HeadDrafter(random_head(engine), 5)}, 700)
    keys = engine.kv.capacity
    assert keys >= 700 + 2 * 6
    small = build("gpt2", n_positions=32)
    engine_methods(small, {}, 700)  # no more than there can be
    assert small.kv.capacity < 100


def test_a_method_that_changes_the_output_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(draft: Draft, best: list[int]) -> tuple[list[int], int]:
        path = list(range(len(draft.tokens)))
        return path, best[len(path)]

    monkeypatch.setattr("draftlayers.decoding.accept_greedy", gullible)
    methods = engine_methods(engine, {"head": HeadDrafter(random_head(engine), 2)}, 40)
    with pytest.raises(LossError, match="not lossless"):
        time_methods(engine.target, [PROMPT], methods, 8)


def test_plain_decoding_is_held_against_the_model_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is wrong in the same way for all methods would agree with itself."""
    answer = decode(engine, PROMPT, 8)
    check_answer(engine.target, PROMPT, answer)
    check_answer(engine.target, PROMPT, Decoded())
    own = engine.passes

    def wrong(tokens, positions, visible, kv, rows):
        logits, states = own(tokens, positions, visible, kv, rows)
        return logits.roll(1, -1), states

    wrong.session, wrong.trees = own.session, True
    monkeypatch.setattr(engine, "passes", wrong)
    methods = engine_methods(engine, {"head": HeadDrafter(random_head(engine), 2)}, 40)
    with pytest.raises(LossError, match="below the target's best"):
        time_methods(engine.target, [PROMPT], methods, 8)


def test_a_tie_by_rounding_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tolerance as large as the logits, any difference counts as a tie and is kept."""
    plain = decode(engine, PROMPT, 8)
    wrong = (plain.tokens[5] + 1) % 512
    other = Decoded(tokens=[*plain.tokens[:5], wrong, 3])
    with pytest.raises(LossError, match="differ at token 5"):
        first_difference(engine.target, PROMPT, plain, other)
    monkeypatch.setitem(speed.ROUNDING, torch.float32, 2.0)
    place, gap = first_difference(engine.target, PROMPT, plain, other)
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([PROMPT + plain.tokens[:5]])).logits[0, -1]
    assert place == 5
    assert gap == pytest.approx((logits.max() - logits[wrong]).item(), abs=1e-3)
    # A shorter output is never a matter of rounding.
    with pytest.raises(LossError, match="ends after 3"):
        first_difference(engine.target, PROMPT, plain, Decoded(tokens=plain.tokens[:3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_only_at_ties(dtype: torch.dtype) -> None:
    """Outputs may part where rounding decides; the share and the gaps are reported."""
    target = tiny_target()
    target.model.to(dtype)
    engine, rng = Engine(target), random.Random(0)
    engine.eos_ids = frozenset()
    prompts = [[rng.randrange(512) for _ in range(12)] for _ in range(12)]
    differences = []
    for i, prompt in enumerate(prompts):
        oracle = Oracle(prompt + decode(engine, prompt, 24).tokens, 4, 0.8)
        methods = engine_methods(engine, {f"oracle {i}": oracle}, 36)
        found = time_methods(target, [prompt], methods, 24)
        differences += found.differences
        share = summarise(found, 10)[f"oracle {i}"]["identical"]
        assert share == (0.0 if found.differences else 1.0)
    assert len(differences) < 12
    largest = 40.0  # logits of the tiny target stay below this
    assert all(0 <= d.gap < largest * speed.ROUNDING[dtype] for d in differences)


def test_experts_are_told_from_the_configuration() -> None:
    """Their differences in low precision are counted; in float32 the check is as strict."""
    sparse = tiny_target(architecture="mixtral", n_layers=2, num_local_experts=4)
    assert has_experts(sparse.config) and not has_experts(tiny_target(n_layers=2).config)
    logits = torch.tensor([1.0, -3.0])
    assert speed.rounding(sparse, logits) == pytest.approx(3e-4)
    sparse.model.to(torch.bfloat16)
    assert speed.rounding(sparse, logits) == float("inf")


def test_summary_by_hand() -> None:
    plain = synthetic([[4.0, 9.0, 5.0], [2.0, 2.0, 2.0]], [30, 12], accepted=0)
    fast = synthetic([[2.5, 2.0, 3.0], [1.0, 1.5, 1.5]], [30, 12], accepted=2)
    timings = Timings({PLAIN: plain, "fast": fast}, [])
    row = summarise(timings, 200)["fast"]
    # Medians over repeats, sums over prompts: 5 + 2 against 2.5 + 1.5 seconds.
    assert row["speedup"] == pytest.approx(7 / 4)
    assert row["speedup_with_prompt"] == pytest.approx((7 + 1) / (4 + 1))
    assert row["tokens_per_second"] == pytest.approx(42 / 4)
    assert row["tau"] == 3 and row["alpha"] == [1.0, 1.0]
    low, high = row["speedup_interval"]
    assert (low, high) == (pytest.approx(2 / 1.5), pytest.approx(5 / 2.5))
    assert prompt_speedups(timings, "fast").tolist() == pytest.approx([2.0, 2 / 1.5])
    one = summarise(timings, 50, prompts=[1])["fast"]
    assert one["speedup"] == pytest.approx(2 / 1.5)


def test_whole_answers_by_hand() -> None:
    """Other decoders tell no phases: every token counts, and the time of the prompt, too."""
    plain = synthetic([[4.0], [2.0]], [30, 12], accepted=0)
    told = [[Decoded(tokens=[1] * 31, seconds={"prefill": 0.0, "total": 9.0})], []]
    timings = Timings({PLAIN: plain, "other": told}, [])
    # Only the first prompt counts: 31 tokens in 4.5 seconds against 9.
    assert speedup(timings, PLAIN, "other", whole=True, replicates=20) == pytest.approx((2, 2, 2))


def test_paired_difference_by_hand() -> None:
    """τ of 3 against 2 on every prompt: without spread, whatever the prompts' lengths."""
    seconds = [[4.0], [9.0], [2.0]]
    longer, shorter = (synthetic(seconds, [30, 12, 6], accepted=n) for n in (2, 1))
    halved = synthetic([[t / 2 for t in times] for times in seconds], [30, 12, 6], accepted=2)
    timings = Timings({PLAIN: shorter, "default": shorter, "same": longer, "fast": halved}, [])
    found = difference(timings, "fast", "default", 200)
    assert found["tau"] == (1.0, 1.0, 1.0)
    assert found["speed"] == pytest.approx((2.0, 2.0, 2.0))
    assert difference(timings, "same", "default", 200)["speed"] == (1.0, 1.0, 1.0)
    assert difference(timings, "default", "fast", 200)["tau"].value == -1.0


def test_pairing_narrows_the_interval() -> None:
    """Prompts differ far more than methods do; the prompts' share cancels in pairs."""
    rng = random.Random(0)
    seconds = [[rng.uniform(1, 9)] for _ in range(20)]
    tokens = [6 * rng.randrange(1, 9) for _ in seconds]
    base = synthetic(seconds, tokens, accepted=0)
    other = synthetic([[0.8 * s[0] + rng.uniform(0, 0.1)] for s in seconds], tokens, accepted=1)
    timings = Timings({PLAIN: base, "other": other}, [])
    found = difference(timings, "other", PLAIN, 500)["speed"]
    assert found.low <= found.value <= found.high
    assert found.high - found.low < 0.05


def test_answers_that_end_at_once_speed_nothing_up() -> None:
    empty = [[Decoded(tokens=[2], stop="eos", seconds={"prefill": 0.1, "total": 0.1})]]
    table = summarise(Timings({PLAIN: empty, "head": empty}, []), 20)
    assert table["head"]["speedup"] == table["head"]["tau"] == 1.0
    assert np.isfinite(table["head"]["tokens_per_second"])


def test_interval_against_scipy() -> None:
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.gamma(2.0, size=60))
    found = interval(lambda i: values[i].mean().item(), 60, 4000)
    expected = stats.bootstrap(
        (values.numpy(),), np.mean, n_resamples=4000, method="percentile", rng=rng
    ).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), rel=0.03)


def test_the_benchmark_of_decoding_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    benchmark = importlib.import_module("decoding")
    result = tmp_path / "decoding.json"
    benchmark.main(
        str(result), model="tiny", dtype=None, head=None, prompts=2, tokens=8, depth=3, repeats=1
    )
    found = json.loads(result.read_text())
    assert set(found["identical"].values()) == {1.0}
    for name in ("verify6_over_decode", "plain_over_hf", "spec_over_plain", "chain_over_plain"):
        assert 0.01 < found[name] < 100
    for name in ("plain_over_hf", "spec_over_plain", "chain_over_plain"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high
    assert found["startup_seconds"]["first_answer"].keys() == found["tokens_per_second"].keys()
    assert found["setting"]["head"].startswith("untrained") and found["device"]
