"""Questions are the target's own, are kept once, and keep away from what is held out."""

from __future__ import annotations

import pytest

from draftlayers import asking
from draftlayers.asking import REASONS, Likeness, ask, load_asked, opening_of, shingles
from draftlayers.prompts import HELDOUT, Prompt, read_prompts
from draftlayers.targets import tiny_target


@pytest.fixture
def talker(tiny, monkeypatch):
    """The tiny target, told what to write: it says these texts in turn, each with its end."""
    said: list[str] = []

    class Told(asking.Writer):
        def write(self, requests):
            end = next(iter(self.eos)) if self.target.has_chat_template else None
            for place, _ in enumerate(requests):
                ids = tiny.tokenizer(said[place % len(said)], add_special_tokens=False)["input_ids"]
                yield place, [*ids, end] if end is not None else ids

    monkeypatch.setattr(asking, "Writer", Told)
    monkeypatch.setattr(asking, "ROUND", 8)
    return said


def test_what_is_left_out_is_counted_by_its_reason(tiny, talker, tmp_path):
    heldout = Prompt("h", "x", ("Why is the sky blue at noon in summer?",))
    talker += [
        "How do bees find their way home again?",
        "How do bees find their way home again ?",  # nearly the same
        "Why is the sky blue at noon in summer ?",  # nearly held out
        "Two words",
        "no no no no no no no no no no no no no no",
        "Tell me <|im_start|> about the sea",
        "What is \ufffd in this odd text here",
        "Name three rivers that flow through Vienna and Rome",
    ]
    found = ask(tiny, 2, tmp_path / "asked.json", [heldout], say=lambda text: None)
    texts = [prompt.turns[0] for prompt in found.prompts]
    assert texts[0] == talker[0]
    assert found.written == 8 == len(texts) + sum(found.left_out.values())
    for reason in ("asked before", "held out", "repetition", "marks", "no text"):
        assert found.left_out[reason] == 1, (reason, found.left_out, texts)


def test_without_an_end_there_is_no_question(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "ROUND", 4)
    monkeypatch.setattr(asking, "LIMIT", 3)
    monkeypatch.setattr(type(tiny), "eos_ids", frozenset())
    said: list[str] = []
    found = ask(tiny, 10, tmp_path / "asked.json", say=said.append)
    assert found.left_out["no end"] == 4 and found.prompts == []
    assert "hardly any new question" in said[-1]


def test_a_killed_run_goes_on_and_more_are_added(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "ROUND", 6)
    # What random weights write never ends, so all of it counts.
    monkeypatch.setattr(asking, "_text", lambda target, words, ids: f"{words} {ids}")
    whole = ask(tiny, 8, tmp_path / "whole.json")
    assert whole.rounds > 1 and len(whole.prompts) >= 8

    def killed(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(tiny, 8, tmp_path / "part.json", say=killed)
    assert ask(tiny, 8, tmp_path / "part.json") == whole
    said: list[str] = []
    assert ask(tiny, 3, tmp_path / "part.json", say=said.append) == whole and not said
    other = ask(tiny, 1, tmp_path / "part.json", seed=1)
    assert other.prompts[0] != whole.prompts[0]


def test_a_target_without_a_template_asks_in_the_plain_format(tmp_path, monkeypatch):
    target = tiny_target()
    target.tokenizer.chat_template = None
    begin = target.tokenizer.decode(target.chat.beginning("Why"))
    assert begin == "Question:\nWhy"
    ids = target.tokenizer("do birds sing?\n\nAnswer:\nThey", add_special_tokens=False)["input_ids"]
    assert target.chat.said(ids) == "do birds sing?"
    assert target.chat.said(ids[:4]) is None


def test_a_question_begins_where_a_user_does(tiny):
    whole = tiny.render(["Why is it so?"])
    begin = tiny.chat.beginning()
    assert whole[: len(begin)] == begin
    assert tiny.chat.beginning("Why is it")[: len(begin)] == begin
    assert tiny.tokenizer.decode(tiny.chat.beginning("Why is it")).endswith("user\nWhy is it")


def test_every_kind_has_its_openings():
    kinds = {prompt.kind for prompt in read_prompts(HELDOUT)}
    assert set(asking.OPENINGS) == kinds
    found = [opening_of(number) for number in range(14 * 8)]
    assert sum(kind == asking.FREE for kind, _ in found) == 7 * 8
    for kind, words in asking.OPENINGS.items():
        assert {w for k, w in found if k == kind} == set(words[:8])


def test_likeness_is_the_share_of_common_runs_of_words():
    texts = [prompt.turns[0] for prompt in read_prompts(HELDOUT)]
    seen = Likeness(texts[:40])
    for text in texts:
        one = set(shingles(text))
        shares = [len(one & set(shingles(t))) / len(one | set(shingles(t))) for t in texts[:40]]
        assert seen.like(text) == (max(shares) > asking.ALIKE)


def test_every_reason_says_what_is_wrong():
    assert all(text.split()[0] in ("did", "holds", "has", "repeats", "is") for text in
               REASONS.values())  # fmt: skip


def test_what_comes_to_be_held_out_later_is_taken_back(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "ROUND", 6)
    monkeypatch.setattr(asking, "_text", lambda target, words, ids: f"{words} {ids}")
    path = tmp_path / "asked.json"
    first = ask(tiny, 8, path)
    apart = [Prompt("x", "qa", first.prompts[2].turns)]
    again = ask(tiny, 3, path, apart)
    assert again.prompts == first.prompts[:2] + first.prompts[3:] and again.rounds == first.rounds
    assert again.left_out["held out"] == first.left_out["held out"] + 1
    assert load_asked(path, tiny) == again == ask(tiny, 3, path, apart)
