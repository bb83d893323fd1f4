"""A run's corpus: parts that never overlap, from shipped answers or the target's new ones."""

from __future__ import annotations

import json

import pytest

from draftlayers import asking, corpus
from draftlayers.answers import Answer, load_answers, own_causes, prompt_number, save_answers
from draftlayers.corpus import enlarge, heldout_prompts, load_corpus, own_corpus
from draftlayers.project import UserError
from draftlayers.prompts import HELDOUT, TRAIN, VALIDATION, read_prompts
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.targets import tiny_target


def test_the_corpus_of_a_run_has_three_separate_parts(tiny, run):
    found, heldout = load_corpus(tiny, run), heldout_prompts(tiny, run)
    ids = [{c.id for c in part} for part in (found.train, found.validation, heldout)]
    assert all(ids) and not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert len(heldout) == run.spec.heldout_prompts
    assert all(2 <= len(c.answer_ids) <= run.spec.answer_tokens for c in found.train)
    assert load_corpus(tiny, run) == found


def test_each_part_reads_what_it_needs(tiny, tmp_path):
    """How many prompts are held out is no cause of what heads learn from, nor the other way."""
    learning, decoding = (Run(RunSpec.make("tiny", "smoke"), tmp_path) for _ in range(2))
    load_corpus(tiny, learning)
    heldout_prompts(tiny, decoding)
    assert "heldout_prompts" not in learning.reading.parameters
    assert set(decoding.reading.parameters) == {"heldout_prompts", "max_prompt_tokens"}
    for name in ("train", "validation"):
        assert f"data/prompts/{name}.jsonl" in learning.reading.files
    assert [name for name in decoding.reading.files] == ["data/prompts/heldout.jsonl"]


@pytest.fixture
def shipped(tiny, tmp_path, monkeypatch):
    """Answers that ship with the target, every fourth cut at its limit of 16 tokens."""
    path = tmp_path / "shipped.safetensors"
    answers = [
        Answer(
            p.id, prompt_number(tiny.render(p.turns)), 0.0, 16, 0, [5] * (16 if i % 4 == 0 else 9)
        )
        for i, p in enumerate([*read_prompts(TRAIN)[:40], *read_prompts(VALIDATION)[:8]])
    ]
    save_answers(path, answers, {"target": tiny.digest})
    monkeypatch.setattr(corpus, "shipped_answers", lambda target: path)
    return path


def made(tmp_path, **parameters):
    return Run(RunSpec.make("tiny", "smoke", **parameters), tmp_path / "runs")


def test_shipped_answers_are_used_as_they_are(tiny, tmp_path, shipped):
    said: list[str] = []
    run = made(tmp_path, answer_tokens=16)
    found = load_corpus(tiny, run, said.append)
    assert len(found.train) == 24 and len(found.validation) == 6 and not said
    assert not run.folder.exists()
    assert {len(c.answer_ids) for c in found.train} == {9, 16}


def test_longer_answers_are_written_where_shipped_ones_were_cut(tiny, tmp_path, shipped):
    found = load_corpus(tiny, made(tmp_path, answer_tokens=24))
    prompts = [p.id for p in [*read_prompts(TRAIN)[:40], *read_prompts(VALIDATION)]]
    for conversation in [*found.train, *found.validation]:
        if prompts.index(conversation.id) % 4:
            assert conversation.answer_ids == (5,) * 9
        else:
            assert conversation.answer_ids[:2] != (5, 5)


def test_answers_that_validate_are_greedy_and_share_no_prompt_with_the_others(tiny, tmp_path):
    run = made(tmp_path, train_conversations=9, validation_conversations=7)
    found = load_corpus(tiny, run)
    ids = [p.id for p in read_prompts(VALIDATION)]
    assert [c.id for c in found.validation] == ids[:7]
    written = {
        name: load_answers(run.path("corpus", f"{name}.safetensors"), own_causes(tiny))
        for name in ("answers", "validation")
    }
    assert {a.temperature for a in written["validation"]} == {0.0}
    assert {a.temperature for a in written["answers"]} == {0.0, 0.5}
    assert not {a.id for a in written["answers"]} & set(ids)


def test_answers_of_another_target_do_not_count(tiny, tmp_path, shipped):
    save_answers(shipped, [], {"target": "another"})
    found = load_corpus(tiny, made(tmp_path))
    assert all(c.answer_ids[:9] != (5,) * 9 for c in found.train)


def test_too_few_conversations_are_refused(tiny, tmp_path):
    few = r"only 0 conversations to learn from and 0 to validate on .* raise max_prompt_tokens"
    with pytest.raises(UserError, match=few):
        load_corpus(tiny, made(tmp_path, max_prompt_tokens=8))


def test_held_out_prompts_that_are_all_too_long_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"none .* at most 8 tokens .* the shortest has \d+"):
        heldout_prompts(tiny, made(tmp_path, max_prompt_tokens=8))


def test_too_few_prompts_of_ones_own_are_refused(tiny, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"id": 1, "kind": "sum", "turns": ["What is 1 plus 1?"]}')
    with pytest.raises(UserError, match=r"only 0 .* and 1 to validate .* give more prompts"):
        load_corpus(tiny, made(tmp_path, prompts=str(path)))


def test_own_prompts_take_the_place_of_ours(tiny, tmp_path, shipped):
    """Though their ids are those of shipped answers; what is held out stays out."""
    heldout = read_prompts(HELDOUT)[3].turns[0]
    texts = [heldout, *(f"What is {i} plus {i}?" for i in range(12))]
    ids = [p.id for p in read_prompts(TRAIN)]
    rows = [{"id": ids[i], "kind": "sum", "turns": [text]} for i, text in enumerate(texts)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []
    run = made(tmp_path, prompts=str(path))
    found = load_corpus(tiny, run, said.append)
    assert [c.id for c in [*found.train, *found.validation]] == ids[1:13]
    assert "1 of your prompts" in said[0] and str(path) in run.reading.files
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match="is one that is held out"):
        load_corpus(tiny, made(tmp_path, prompts=str(path)))


def test_a_target_that_asks_itself_learns_from_that_first(tiny, tmp_path, shipped, monkeypatch):
    monkeypatch.setattr(asking, "ROUND", 6)
    monkeypatch.setattr(corpus, "ROUND", 6)
    monkeypatch.setattr(asking, "_text", lambda target, words, ids: f"{words} {ids}")
    monkeypatch.setattr(asking, "LIMIT", 8)
    run = made(tmp_path)
    asked, answers = enlarge(tiny, run, 150)
    assert sum(len(a.tokens) for a in answers) >= 150 and asked.rounds > 1
    assert {a.id for a in answers} <= {p.id for p in asked.prompts}
    found = load_corpus(tiny, run)
    ids = [c.id for c in found.train]
    told = {a.id for a in answers if len(a.tokens) > 1}
    assert ids[: len(told)] == [p.id for p in asked.prompts if p.id in told]
    assert all(c.id.startswith("validation-") for c in found.validation)
    said: list[str] = []
    assert enlarge(tiny, run, 100, say=said.append) == (asked, answers) and not said
    # Another target's questions do not count.
    other = tiny_target(seed=1)
    assert not any(c.id.startswith("asked") for c in load_corpus(other, run).train)


def test_a_corpus_that_ships_is_learned_from_and_added_to(tiny, tmp_path, shipped, monkeypatch):
    monkeypatch.setattr(asking, "ROUND", 6)
    monkeypatch.setattr(corpus, "ROUND", 6)
    monkeypatch.setattr(asking, "_text", lambda target, words, ids: f"{words} {ids}")
    monkeypatch.setattr(asking, "LIMIT", 8)
    monkeypatch.setattr(corpus, "DATA", tmp_path)
    author = made(tmp_path)
    asked, answers = enlarge(tiny, author, 60)
    (tmp_path / "corpus").mkdir()
    own_corpus(author)[0].parent.rename(tmp_path / "corpus" / "tiny")
    reader = Run(RunSpec.make("tiny", "smoke"), tmp_path / "another")
    found = load_corpus(tiny, reader)
    told = {a.id for a in answers if len(a.tokens) > 1}
    assert [c.id for c in found.train if c.id in told] == [c.id for c in found.train[: len(told)]]
    assert "corpus/tiny/asked.json" in " ".join(reader.reading.files)
    said: list[str] = []
    assert enlarge(tiny, reader, 60, say=said.append) == (asked, answers) and not said
    more, _ = enlarge(tiny, reader, 150)
    assert more.prompts[: len(asked.prompts)] == asked.prompts and more.rounds > asked.rounds
