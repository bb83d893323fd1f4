"""Answers are kept while they stay what they would be."""

from __future__ import annotations

import pytest

from draftlayers import answers
from draftlayers.answers import answer_prompts, load_answers, own_causes, temperature_of
from draftlayers.prompts import TRAIN, Prompt, read_prompts
from draftlayers.writing import Writer


def test_a_killed_run_goes_on_and_ends_at_the_same_answers(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "GROUP", 4)
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
    # In low precision near ties are broken by what is written beside.
    monkeypatch.setattr(answers, "fast_twin", lambda target: target)
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

    class Spy(Writer):
        def write(self, requests):
            written.extend(requests)
            return super().write(requests)

    monkeypatch.setattr(answers, "Writer", Spy)
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
