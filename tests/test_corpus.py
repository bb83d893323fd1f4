"""Answers are the target's own, whatever the batch; parts of the corpus never overlap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2

from draftlayers import corpus
from draftlayers.corpus import (
    answer_prompts,
    generate_answers,
    load_answers,
    load_corpus,
    read_prompts,
    temperature_of,
)
from draftlayers.spec import DATA, PROJECT, UserError

TRAIN, HELDOUT = DATA / "prompts" / "train.jsonl", DATA / "prompts" / "heldout.jsonl"
KINDS = {"conversation", "translation", "summarization", "qa", "math", "rag", "code"}


def test_shipped_prompts_cover_all_kinds_and_do_not_overlap():
    train, heldout = read_prompts(TRAIN), read_prompts(HELDOUT)
    assert len(train) >= 400 and len(heldout) >= 60
    assert {p.kind for p in train} == {p.kind for p in heldout} == KINDS
    assert {p.kind for p in train[:7]} == KINDS  # every prefix is balanced
    texts = [" ".join(p.turns[0].lower().split()) for p in train + heldout]
    assert len(set(texts)) == len(texts)


def test_spec_bench_questions_are_read(tmp_path):
    rows = [{"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []}]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (prompt,) = read_prompts(path)
    assert (prompt.id, prompt.kind, prompt.turns) == ("81", "writing", ("a", "b"))


def test_the_real_spec_bench_file_is_read_where_it_is_at_hand():
    path = Path(PROJECT.parent / "shared" / "data" / "spec_bench_question.jsonl")
    if not path.exists():
        pytest.skip("Spec-Bench's questions are not beside the project")
    assert len(read_prompts(path)) == 480


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": 1, "kind": "qa"}', "line 1"),
        ('{"id": 1, "kind": "qa", "turns": "no list"}', "list of strings"),
        ('{"id": 1, "kind": "qa", "turns": ["x"]}\nnot json', "line 2"),
        ('{"id": 1, "kind": "qa", "turns": ["x"]}\n' * 2, "appears twice"),
    ],
)
def test_a_broken_prompt_file_names_the_line(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_prompts(path)


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
    answers = {i: answer for batch in batches for i, answer in batch}
    for i, prompt in enumerate(prompts):
        assert answers[i] == _reference(any_target, prompt, 12)


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
    drawn = corpus._sample(logits, torch.full((4000,), 0.5), generators)
    p = torch.softmax(logits[0].double() / 0.5, -1)
    expected = 4000 * p
    statistic = ((drawn.bincount(minlength=6) - expected) ** 2 / expected).sum().item()
    assert statistic < chi2.isf(1e-4, df=5)  # fails by chance once in ten thousand seeds


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(tiny):
    def answers(prompts, seed):
        batches = generate_answers(tiny, prompts, 8, [1.0] * len(prompts), seed=seed)
        return [answer for batch in batches for _, answer in batch]

    three = answers([[7, 8, 9], [100], [20, 30]], 1)
    assert answers([[100]], 1) == three[1:2]
    assert answers([[7, 8, 9], [100], [20, 30]], 2) != three


def test_a_killed_run_goes_on_and_ends_at_the_same_answers(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "STREAMS", 4)
    prompts = read_prompts(TRAIN)[:10]
    whole = answer_prompts(tiny, prompts, 6, 500, tmp_path / "whole.safetensors")

    def killed(text):
        if text.startswith("answered 4"):
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(tiny, prompts, 6, 500, path, say=killed)
    assert len(load_answers(path, tiny.identity).ids) == 4
    resumed = answer_prompts(tiny, prompts, 6, 500, path)
    assert sorted(resumed.ids) == sorted(whole.ids)
    assert any(whole.temperature) and not all(whole.temperature)
    pairs = [dict(zip(a.ids, a.tokens, strict=True)) for a in (whole, resumed)]
    assert pairs[0] == pairs[1]


def test_answers_of_another_target_or_prompt_are_not_used(tiny, tmp_path):
    path = tmp_path / "a.safetensors"
    prompts = read_prompts(TRAIN)[:3]
    answer_prompts(tiny, prompts, 4, 500, path)
    assert load_answers(path, "another target") is None
    changed = [corpus.Prompt(prompts[0].id, prompts[0].kind, ("Something else?",)), *prompts[1:]]
    said: list[str] = []
    answers = answer_prompts(tiny, changed, 4, 500, path, say=said.append)
    assert len(said) == 1 and sorted(answers.ids) == sorted(p.id for p in prompts)


def test_most_answers_are_greedy():
    temperatures = [temperature_of(i) for i in range(42)]
    assert temperatures.count(0.0) == 28


def test_the_corpus_of_a_run_has_three_separate_parts(tiny, run):
    found = load_corpus(tiny, run)
    ids = [{c.id for c in part} for part in (found.train, found.validation, found.heldout)]
    assert all(ids) and not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert len(found.heldout) == run.spec.heldout_prompts
    assert all(2 <= len(c.answer_ids) <= run.spec.answer_tokens for c in found.train)
    again = load_corpus(tiny, run)
    assert again == found
