"""Timing is fair and refuses a difference; the cost model is the arithmetic it claims to be."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from test_decoding import PROMPT, Oracle, build, random_head

from draftlayers import speed
from draftlayers.decoding import Decoded, Draft, HeadDrafter, acceptance_rates, decode
from draftlayers.engine import Engine
from draftlayers.spec import PROJECT
from draftlayers.speed import (
    PLAIN,
    Costs,
    Device,
    LossError,
    Measured,
    compare,
    expected_length,
    free_guesses,
    interval,
    measure,
    measure_costs,
    measure_passes,
    predicted_speedup,
    probe_device,
    prompt_speedups,
    weights_read,
)
from draftlayers.targets import tiny_target

COSTS = Costs(
    passes={1: 1.0, 2: 1.1, 4: 1.3, 8: 2.1}, draft_first=0.2, draft_next=0.1, rest=(0.1, 0.05)
)


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
                    drafted=[accepted] * passes,
                    seconds={"prefill": 0.5, "total": 0.5 + t},
                )
                for t in times
            ]
        )
    return runs


def test_measure_takes_turns_and_checks_outputs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:]]
    order = []
    drafters = {"a": HeadDrafter(random_head(engine), 3), "b": HeadDrafter(random_head(engine), 2)}

    def noted(engine, prompt, n, drafter=None, *rest):
        order.append(next((k for k, v in drafters.items() if v is drafter), PLAIN))
        return decode(engine, prompt, n, drafter, *rest)

    monkeypatch.setattr(speed, "decode", noted)
    said: list[str] = []
    measured = measure(engine, prompts, drafters, 8, repeats=2, say=said.append)
    assert order[:3] == [PLAIN, "a", "b"]  # warm-up
    rounds = [tuple(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 6 and len(set(rounds[:3])) == 3  # each method comes first in turn
    assert all(sorted(r) == ["a", "b", PLAIN] for r in rounds)
    assert said[-1] == "decoded 6 of 6 prompts with 3 methods"
    for runs in measured.runs.values():
        assert [len(repeats) for repeats in runs] == [2, 2, 2]
        for own, plain in zip(runs, measured.runs[PLAIN], strict=True):
            assert own[0].tokens == own[1].tokens == plain[0].tokens
    assert measured.differences == []
    table = compare(measured, 50)
    assert table[PLAIN]["tau"] == table[PLAIN]["speedup"] == 1.0
    assert all(row["identical"] == 1 for row in table.values())


def test_a_method_that_changes_the_output_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(draft: Draft, best: list[int]) -> tuple[list[int], int]:
        path = list(range(len(draft.tokens)))
        return path, best[len(path)]

    monkeypatch.setattr("draftlayers.decoding.accept_greedy", gullible)
    with pytest.raises(LossError, match="not lossless"):
        measure(engine, [PROMPT], {"head": HeadDrafter(random_head(engine), 2)}, 8)


def test_a_tie_by_rounding_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tolerance as large as the logits, any difference counts as a tie and is kept."""
    monkeypatch.setitem(speed.ROUNDING, torch.float32, 2.0)
    plain = decode(engine, PROMPT, 8)
    other = Decoded(tokens=[*plain.tokens[:5], (plain.tokens[5] + 1) % 512, 3])
    place, gap = speed.first_difference(engine, PROMPT, plain, other)
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([PROMPT + plain.tokens[:5]])).logits[0, -1]
    assert place == 5
    assert gap == pytest.approx(
        (logits.topk(2).values @ torch.tensor([1.0, -1.0])).item(), abs=1e-3
    )
    # A shorter output is never a matter of rounding.
    with pytest.raises(LossError):
        speed.first_difference(engine, PROMPT, plain, Decoded(tokens=plain.tokens[:3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_only_at_ties(dtype: torch.dtype) -> None:
    """Outputs may part where rounding decides; the share and the gaps are reported."""
    target = tiny_target()
    target.model.to(dtype)
    engine, rng = Engine(target), random.Random(0)
    engine.eos_ids = frozenset()
    prompts = [[rng.randrange(512) for _ in range(12)] for _ in range(12)]
    drafters = {}
    for i, prompt in enumerate(prompts):
        drafters[f"oracle {i}"] = Oracle(prompt + decode(engine, prompt, 24).tokens, 4, 0.8)
    differences = []
    for i, (name, oracle) in enumerate(drafters.items()):
        found = measure(engine, [prompts[i]], {name: oracle}, 24)
        differences += found.differences
        share = compare(found, 10)[name]["identical"]
        assert share == (0.0 if found.differences else 1.0)
    assert len(differences) < 12
    largest = 40.0  # logits of the tiny target stay below this
    assert all(0 <= d.gap < largest * speed.ROUNDING[dtype] for d in differences)


def test_compare_by_hand() -> None:
    plain = synthetic([[4.0, 9.0, 5.0], [2.0, 2.0, 2.0]], [30, 12], accepted=0)
    fast = synthetic([[2.5, 2.0, 3.0], [1.0, 1.5, 1.5]], [30, 12], accepted=2)
    measured = Measured({PLAIN: plain, "fast": fast}, [])
    row = compare(measured, 200)["fast"]
    # Medians over repeats, sums over prompts: 5 + 2 against 2.5 + 1.5 seconds.
    assert row["speedup"] == pytest.approx(7 / 4)
    assert row["speedup_with_prompt"] == pytest.approx((7 + 1) / (4 + 1))
    assert row["tokens_per_second"] == pytest.approx(42 / 4)
    assert row["tau"] == 3 and row["alpha"] == [1.0, 1.0]
    low, high = row["speedup_interval"]
    assert (low, high) == (pytest.approx(2 / 1.5), pytest.approx(5 / 2.5))
    assert prompt_speedups(measured, "fast").tolist() == pytest.approx([2.0, 2 / 1.5])
    one = compare(measured, 50, prompts=[1])["fast"]
    assert one["speedup"] == pytest.approx(2 / 1.5)


def test_answers_that_end_at_once_speed_nothing_up() -> None:
    empty = [[Decoded(tokens=[2], stop="eos", seconds={"prefill": 0.1, "total": 0.1})]]
    table = compare(Measured({PLAIN: empty, "head": empty}, []), 20)
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


def test_cost_model_by_hand() -> None:
    assert COSTS.plain == pytest.approx(1.1)
    assert COSTS.verify(1) == 1.0 and COSTS.verify(3) == pytest.approx(1.2)
    assert COSTS.verify(6) == pytest.approx(1.7) and COSTS.verify(20) == 2.1
    # Depth 3: verify 4 tokens (1.3), draft 0.2 + 2 * 0.1, rest 0.05, in units of 1.1.
    assert predicted_speedup(2.5, 3, COSTS) == pytest.approx(2.5 * 1.1 / (1.3 + 0.4 + 0.05))
    terms = COSTS.relative(3)
    assert terms["v"] + 3 * terms["c"] + terms["o"] == pytest.approx(1.75 / 1.1)


def test_expected_length_is_what_chains_give() -> None:
    """Guesses accepted with probability α_j after one another, many passes."""
    alpha, rng = [0.8, 0.5, 0.9, 0.4], random.Random(0)
    accepted = []
    for _ in range(40000):
        n = 0
        while n < 4 and rng.random() < alpha[n]:
            n += 1
        accepted.append(n)
    for depth in range(1, 5):
        mean = sum(min(n, depth) for n in accepted) / len(accepted) + 1
        assert expected_length(alpha, depth) == pytest.approx(mean, rel=0.02)
    run = Decoded(accepted=accepted, offered=[4] * len(accepted))
    assert acceptance_rates([run]) == pytest.approx(alpha, abs=0.02)
    assert expected_length([0.5, None], 2) == 1.5
    assert expected_length([], 3) == 1.0


def test_costs_are_measured(engine: Engine) -> None:
    drafters = {"head": HeadDrafter(random_head(engine), 4)}
    passes = measure_passes(engine, PROMPT, (1, 5), repeats=3)
    costs = measure_costs(engine, drafters, PROMPT, passes, repeats=3)["head"]
    assert costs.passes == passes and all(seconds > 0 for seconds in passes.values())
    assert costs.draft_first > 0 and costs.draft_next >= 0 and min(costs.rest) > 0
    # Nothing is left behind: decoding goes on as before.
    oracle = Oracle(PROMPT + decode(engine, PROMPT, 12).tokens, 3, 1.0)
    assert decode(engine, PROMPT, 12, drafters["head"]).tokens == oracle.sequence[len(PROMPT) :]


def test_free_guesses_by_hand() -> None:
    assert free_guesses(COSTS.passes, slack=0.1) == 1  # 1.1 for two tokens, 1.3 for four
    assert free_guesses(COSTS.passes) == 0
    assert free_guesses(COSTS.passes, slack=0.3) == 3
    assert free_guesses(COSTS.passes, slack=0.0) == 0
    assert free_guesses(COSTS.passes, slack=9.0) == 7
    assert free_guesses({1: 1.0, 3: 1.5, 4: 1.05, 8: 2.0}) == 3  # rows in fours are cheap


def test_roofline_by_hand() -> None:
    device = Device(bandwidth=100.0, flops=4000.0, overhead=0.25)
    # 50 parameters of 4 bytes: 2 s to read; 2 * 50 operations a token, 0.025 s each.
    assert device.pass_seconds(50, 4, 1) == 2.25
    assert device.pass_seconds(50, 4, 80) == pytest.approx(2.25)
    assert device.pass_seconds(50, 4, 160) == pytest.approx(4.25)
    costs = device.costs((50, 4), (10, 2), depth=3)
    assert costs.passes == {n: 2.25 for n in (1, 2, 3, 4)}
    assert predicted_speedup(2.0, 3, costs) == pytest.approx(2 * 2.25 / (2.25 + 3 * 0.45))


def test_weights_read_counts_products(engine: Engine) -> None:
    config = engine.target.config
    d, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    layer = 2 * d * d + 2 * d * kv + 3 * d * config.intermediate_size
    expected = config.num_hidden_layers * layer + config.vocab_size * d  # the tied output matrix
    assert weights_read(engine.target.model) == expected


def test_the_device_is_probed(engine: Engine) -> None:
    device = probe_device(engine, rounds=1)
    assert 1e8 < device.bandwidth < 1e14 and 1e8 < device.flops < 1e16


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
