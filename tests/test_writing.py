"""Texts written side by side are those that the target writes alone."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from draftlayers import writing
from draftlayers.contexts import cached_limit
from draftlayers.targets import tiny_target
from draftlayers.writing import Request, Writer, draw, fast_twin, precision

PROMPTS = [[7, 8, 9], [100], [20, 30, 40, 50, 60, 70, 80], [5] * 4, [250, 251], [9] * 40, [3, 1]]


def alone(target, prompt, count):
    """Greedy continuation without batch, cache or padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = target.model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt) :]


def write(target, requests, **options):
    return dict(Writer(target, **options).write(requests))


@pytest.mark.parametrize("packed", [True, False])
def test_texts_side_by_side_equal_single_ones(any_target, packed, monkeypatch):
    """Streams end at different times, and others enter beside those that go on."""
    monkeypatch.setattr(writing, "ENTER_TOGETHER", 1)
    limits = [12, 3, 9, 1, 12, 5, 12]
    requests = [Request(p, n) for p, n in zip(PROMPTS, limits, strict=True)]
    found = write(any_target, requests, streams=3, packed=packed)
    for i, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        assert found[i] == alone(any_target, prompt, limit), i


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8}),
        ("bloom", {}),
        ("gpt_neo", {}),
    ],
)
def test_windows_and_positions_of_their_own(architecture, settings, monkeypatch):
    monkeypatch.setattr(writing, "ENTER_TOGETHER", 1)
    if architecture == "gpt_neo":
        settings = {"attention_types": [[["global", "local"], 4]], "window_size": 8,
                    "num_layers": 8, "num_heads": 4}  # fmt: skip
    target = tiny_target(architecture=architecture, **settings)
    found = write(target, [Request(p, 14) for p in PROMPTS], streams=3)
    for i, prompt in enumerate(PROMPTS):
        assert found[i] == alone(target, prompt, 14), i


def test_columns_that_nobody_needs_are_dropped_and_long_prompts_find_room(tiny, monkeypatch):
    monkeypatch.setattr(writing, "ENTER_TOGETHER", 1)
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 6, 4, 90, 7, 3, 5, 8, 120, 2]
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset())
    found = write(tiny, [Request(p, 70 if i % 2 else 25) for i, p in enumerate(prompts)], streams=2)
    for i, prompt in enumerate(prompts):
        assert found[i] == alone(tiny, prompt, 70 if i % 2 else 25), i


def test_a_text_ends_at_an_end_token_at_its_own_end_and_at_the_context(tiny, monkeypatch):
    free = [alone(tiny, prompt, 10) for prompt in PROMPTS[:3]]
    found = write(tiny, [Request(PROMPTS[0], 10, ended=lambda tokens: len(tokens) == 4)])
    assert found == {0: free[0][:4]}
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset({free[0][3]}))
    found = write(tiny, [Request(prompt, 10) for prompt in PROMPTS[:3]])
    assert [found[i] for i in range(3)] == [alone(tiny, prompt, 10) for prompt in PROMPTS[:3]]
    assert len(found[0]) <= 4
    limit, _ = cached_limit(tiny.config, tiny.context_limit)
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset())
    assert len(write(tiny, [Request([5] * (limit - 3), 10)])[0]) == 3


def test_sampling_follows_the_distribution():
    """In a vocabulary of several blocks, with most of the mass on few tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((1, 700), -9.0)
    likely = torch.tensor([0, 100, 255, 256, 300, 699])
    logits[0, likely] = torch.randn(6, generator=generator)
    uniform = torch.rand(4000, generator=generator, dtype=torch.float64)
    drawn = draw(logits.expand(4000, -1), [0.5] * 4000, uniform)
    p = torch.softmax(logits[0].double() / 0.5, -1)
    expected = 4000 * torch.cat([p[likely], (1 - p[likely].sum())[None]])
    counts = drawn.bincount(minlength=700)
    counts = torch.cat([counts[likely], (4000 - counts[likely].sum())[None]])
    keep = expected > 1
    statistic = ((counts - expected) ** 2 / expected)[keep].sum().item()
    assert statistic < chi2.isf(1e-4, df=int(keep.sum()) - 1)  # fails once in ten thousand seeds
    # Against adding up all of the vocabulary in double precision.
    mass = p.cumsum(0)
    assert (drawn == torch.searchsorted(mass, uniform * mass[-1], right=True)).float().mean() > 0.99


def test_a_sampled_text_depends_on_its_seed_and_not_on_its_neighbours(tiny):
    def sampled(prompts, seed):
        return write(tiny, [Request(p, 8, 1.0, seed + p[0]) for p in prompts])

    three = sampled(PROMPTS[:3], 1)
    assert sampled(PROMPTS[1:2], 1)[0] == three[1]
    assert sampled(PROMPTS[:3], 2) != three


def test_the_twin_that_writes_is_the_same_target_in_another_precision(tiny):
    twin = fast_twin(tiny)
    assert twin.dtype == precision(tiny) and twin.digest == tiny.digest
    assert tiny.dtype == torch.float32 and twin.vocab_size == tiny.vocab_size
