"""Answers are the target's own, whatever the batch, and are kept while they stay what they were."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from draftlayers import answers
from draftlayers.answers import (
    answer_prompts,
    generate_answers,
    load_answers,
    own_causes,
    temperature_of,
)
from draftlayers.prompts import TRAIN, Prompt, read_prompts


def _reference(target, prompt, count):
    """Greedy continuation without batch, cache or padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = target.model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt) :]


def test_batched_greedy_answers_equal_single_ones(any_target):
    prompts = [[7, 8, 9], [100], [20, 30, 40, 50, 60, 70, 80], [5] * 4, [250, 251]]
    batches = generate_answers(any_target, prompts, 12, [0.0] * 5, streams=3)
    found = {i: answer for batch in batches for i, answer in batch}
    for i, prompt in enumerate(prompts):
        assert found[i] == _reference(any_target, prompt, 12)


def test_streams_that_end_leave_the_others_alone(tiny, monkeypatch):
    """Treat a token that comes early in one answer as the end of an answer."""
    prompts = [[7, 8, 9], [100], [20, 30, 40, 50], [250, 251]]
    free = [_reference(tiny, prompt, 10) for prompt in prompts]
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset({free[0][3]}))
    expected = [_reference(tiny, prompt, 10) for prompt in prompts]
    batches = generate_answers(tiny, prompts, 10, [0.0] * 4)
    assert [answer for batch in batches for _, answer in batch] == expected
    assert len(expected[0]) <= 4


def test_sampling_follows_the_distribution():
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(4000, 6)
    generators = [torch.Generator().manual_seed(i) for i in range(4000)]
    drawn = answers._sample(logits, torch.full((4000,), 0.5), generators)
    p = torch.softmax(logits[0].double() / 0.5, -1)
    expected = 4000 * p
    statistic = ((drawn.bincount(minlength=6) - expected) ** 2 / expected).sum().item()
    assert statistic < chi2.isf(1e-4, df=5)  # fails by chance once in ten thousand seeds


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(tiny):
    def sampled(prompts, seed):
        batches = generate_answers(tiny, prompts, 8, [1.0] * len(prompts), seed=seed)
        return [answer for batch in batches for _, answer in batch]

    three = sampled([[7, 8, 9], [100], [20, 30]], 1)
    assert sampled([[100]], 1) == three[1:2]
    assert sampled([[7, 8, 9], [100], [20, 30]], 2) != three


def test_a_killed_run_goes_on_and_ends_at_the_same_answers(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "STREAMS", 4)
    prompts = read_prompts(TRAIN)[:10]
    whole = answer_prompts(tiny, prompts, 6, 500, tmp_path / "whole.safetensors")

    def killed(text):
        if text.startswith("answered 4"):
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(tiny, prompts, 6, 500, path, say=killed)
    assert len(load_answers(path, own_causes(tiny))) == 4
    resumed = answer_prompts(tiny, prompts, 6, 500, path)
    assert {a.temperature for a in whole} == {0.0, answers.SAMPLE_TEMPERATURE}
    assert {a.id: a for a in resumed} == {a.id: a for a in whole}


def test_most_answers_are_greedy():
    temperatures = [temperature_of(i) for i in range(42)]
    assert temperatures.count(0.0) == 28


LIMIT = 12


@pytest.mark.parametrize(
    ("cause", "kept"),
    [
        ({}, "all"),
        ({"limit": 6}, "all"),  # a shorter answer is the beginning of a longer one
        ({"limit": 24}, "ended"),
        ({"seed": 1}, "greedy"),
        ({"first": "Something else?"}, "others"),
        ({"more": 2}, "all"),
    ],
)
def test_answers_are_kept_one_by_one(tiny, tmp_path, monkeypatch, cause, kept):
    """What each change leaves of seven answers, of which the third and the sixth are sampled."""
    path, prompts = tmp_path / "a.safetensors", read_prompts(TRAIN)
    free = answer_prompts(tiny, prompts[:7], LIMIT, 500, tmp_path / "free.safetensors")
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset({free[0].tokens[3]}))
    before = answer_prompts(tiny, prompts[:7], LIMIT, 500, path)
    keeps = {
        "all": {a.id for a in before},
        "ended": {a.id for a in before if len(a.tokens) < LIMIT},
        "greedy": {a.id for a in before if a.temperature == 0},
        "others": {p.id for p in prompts[1:7]},
    }
    assert 0 < len(keeps["ended"]) < 7 and len(keeps["greedy"]) == 5
    asked = prompts[: 7 + cause.get("more", 0)]
    if "first" in cause:
        asked = [Prompt(asked[0].id, asked[0].kind, (cause["first"],)), *asked[1:]]
    options = cause.get("limit", LIMIT), 500
    written = []
    inner = answers.generate_answers

    def spy(target, ids, *more):
        written.extend(ids)
        return inner(target, ids, *more)

    monkeypatch.setattr(answers, "generate_answers", spy)
    after = answer_prompts(tiny, asked, *options, path, cause.get("seed", 0))
    assert len(written) == len(asked) - len(keeps[kept])
    fresh = answer_prompts(tiny, asked, *options, tmp_path / "b.safetensors", cause.get("seed", 0))
    cut = [{a.id: a.tokens[: options[0]] for a in some} for some in (after, fresh)]
    assert cut[0] == cut[1]


def test_a_damaged_file_of_answers_is_written_again(tiny, tmp_path):
    path, prompts = tmp_path / "a.safetensors", read_prompts(TRAIN)[:3]
    whole = answer_prompts(tiny, prompts, 4, 500, path)
    for size in (0, 7, path.stat().st_size - 10):
        path.write_bytes(path.read_bytes()[:size])
        assert load_answers(path, own_causes(tiny)) == []
        assert answer_prompts(tiny, prompts, 4, 500, path) == whole
