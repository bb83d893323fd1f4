"""The cost model is the arithmetic it claims to be, on parts that are really timed."""

from __future__ import annotations

import random

import pytest
from oracle import PROMPT, Oracle, build, random_head

from draftlayers.costs import (
    Costs,
    Device,
    expected_length,
    free_draft_tokens,
    measure_costs,
    measure_passes,
    predicted_speedup,
    probe_device,
    weights_read,
)
from draftlayers.decoding import Decoded, acceptance_rates, decode
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine

COSTS = Costs(
    passes={1: 1.0, 2: 1.1, 4: 1.3, 8: 2.1}, draft_first=0.2, draft_next=0.1, rest=(0.1, 0.05)
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build("llama")


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


def test_free_draft_tokens_by_hand() -> None:
    assert free_draft_tokens(COSTS.passes, slack=0.1) == 1  # 1.1 for two tokens, 1.3 for four
    assert free_draft_tokens(COSTS.passes) == 0
    assert free_draft_tokens(COSTS.passes, slack=0.3) == 3
    assert free_draft_tokens(COSTS.passes, slack=0.0) == 0
    assert free_draft_tokens(COSTS.passes, slack=9.0) == 7
    assert free_draft_tokens({1: 1.0, 3: 1.5, 4: 1.05, 8: 2.0}) == 3  # rows in fours are cheap


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


def test_drafters_that_share_a_head_are_timed_together(engine: Engine) -> None:
    """Their sessions are nested, and each has packed the same weights."""
    head = random_head(engine)
    drafters = {"short": HeadDrafter(head, 2), "long": HeadDrafter(head, 4)}
    passes = measure_passes(engine, PROMPT, (1, 5), repeats=1)
    costs = measure_costs(engine, drafters, PROMPT, passes, repeats=1)
    assert costs.keys() == drafters.keys()
    assert not any("forward" in vars(m) for m in head.modules())


def test_passes_are_timed_within_the_context() -> None:
    """Learned positions end there."""
    engine = build("gpt2", n_positions=32)
    passes = measure_passes(engine, (PROMPT * 3)[:31], (1, 16), repeats=1)
    assert passes.keys() == {1, 16}
