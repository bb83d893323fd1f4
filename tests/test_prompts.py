"""Prompt files are read as they come, and a broken one names its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftlayers.project import PROJECT, UserError
from draftlayers.prompts import HELDOUT, TRAIN, VALIDATION, Prompt, read_prompts

KINDS = {"conversation", "translation", "summarization", "qa", "math", "rag", "code"}


def test_shipped_prompts_cover_all_kinds_and_do_not_overlap():
    train, *apart = (read_prompts(path) for path in (TRAIN, VALIDATION, HELDOUT))
    assert len(train) >= 400 and all(len(part) >= 60 for part in apart)
    assert all({p.kind for p in part} == KINDS for part in (train, *apart))
    texts = [" ".join(p.turns[0].lower().split()) for part in (train, *apart) for p in part]
    assert len(set(texts)) == len(texts)
    for part in (train, apart[0]):  # every prefix is balanced
        assert len({p.kind for p in part[:7]}) == 7


def test_prompts_that_judge_share_no_wording_with_what_is_learned_from():
    """No more than a fifth of the runs of five words of either of two prompts."""
    parts = [read_prompts(path) for path in (TRAIN, VALIDATION, HELDOUT)]
    runs = [{p.id: five_words(p.turns[0]) for p in part} for part in parts]
    for mine, others in ((runs[1], runs[0]), (runs[2], runs[0]), (runs[1], runs[2])):
        for name, found in mine.items():
            if len(found) < 6:  # a short question has few words, all of them common
                continue
            alike = max(others, key=lambda other: len(found & others[other]))
            shared = len(found & others[alike])
            assert shared <= 0.2 * min(len(found), len(others[alike])) or shared <= 1, (name, alike)


def five_words(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


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
        ('{"id": 1, "kind": "qa", "turns": ["x"]}\n' * 2, "line 2: the id '1' .* first in line 1"),
        (
            '{"id": "1", "kind": "qa", "turns": ["x"]}\n{"id": 1, "kind": "qa", "turns": ["y"]}',
            "twice",
        ),
        ("", "holds no prompts"),
        ("\ufeff \r\n\n", "holds no prompts"),
        ("[]", "holds no prompts"),
        ('{"id": 1, "kind": "qa", "turns": []}', "line 1: turns must be a list of strings"),
        ('{"id": 1, "kind": "qa", "turns": [""]}', "line 1: turn 1 is empty"),
        ('{"id": 1, "kind": "qa", "turns": ["x", " \\n\\t\u2003"]}', "line 1: turn 2 is empty"),
        ('{"id": 1, "kind": "qa", "turns": ["x", 5]}', "turn 2 is 5"),
        ('{"id": 1, "kind": "qa", "turns": ["x", null]}', "turn 2 is None"),
        ('{"kind": "qa", "turns": ["x"]}', "line 1: the id must be a text or a number, got None"),
        ('{"id": 1, "turns": ["x"]}', "line 1: the kind must be"),
        ('{"id": true, "kind": "qa", "turns": ["x"]}', "the id must be"),
        ('{"id": [1], "kind": "qa", "turns": ["x"]}', "the id must be"),
        ('{"id": " ", "kind": "qa", "turns": ["x"]}', "the id is empty"),
        ('{"id": NaN, "kind": "qa", "turns": ["x"]}', "the id is nan"),
        ('{"id": 1e999, "kind": "qa", "turns": ["x"]}', "the id is inf"),
        ('{"id": 1, "kind": "qa", "turns": ["\\ud800"]}', r"turn 1 holds \\ud800"),
        ('{"id": 1, "kind": "qa", "turns": ["x\0"]}', "line 1: a NUL byte"),
        ("\0" * 512, "line 1: a NUL byte"),
        ('\n\n{"id": 1, "kind": "qa", "turns": ["x"]} {}', "line 3: more than one JSON value"),
        ('{"id": 1,\n"kind": "qa", "turns": ["x"]}', "line 1: this is not JSON"),
        ("5", "line 1: expected an object"),
        ('{"data": []}', "line 1: expected an object"),
        ('[{"id": 1, "kind": "qa", "turns": ["x"]},\n\n {"id": 2}]', "line 3: expected an object"),
        ('[{"id": 1, "kind": "qa", "turns": ["x"]},\n]', "line 2: this is not JSON"),
        ('[{"id": 1, "kind": "qa", "turns": ["x"]}\n', "line 2: the array .* has no end"),
        ('[{"id": 1, "kind": "qa", "turns": ["x"]}\n{}]', "line 2: the array .* without a comma"),
        ('[{"id": 1, "kind": "qa", "turns": ["x"]}]\n\n{}', "follows the end of the array"),
        ('[{"id": 1,\n "kind": qa}]', "line 2: this is not JSON .* at character 10"),
        ('{"messages": "x"}', "line 1: messages must be a list"),
        ('{"messages": []}', "line 1: nothing in messages is said by the user"),
        ('{"messages": ["x"]}', "message 1 of messages is no object with role and content"),
        ('{"messages": [{"role": "user"}]}', "message 1 of messages is no object"),
        ('{"messages": [{"role": "usr", "content": "x"}]}', "is from 'usr', who is not known"),
        ('{"messages": [{"role": 3, "content": "x"}]}', "is from 3, who is not known"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "turn 1 is "),
        ('{"id": "a", "conversations": [{"from": "gpt", "value": "x"}]}', "said by the user"),
        ('{"id": "a", "conversations": [{"role": "user", "content": "x"}]}', "from and value"),
        ('{"id": 1, "kind": ' + "[" * 5000 + "]" * 5000 + ', "turns": ["x"]}', "line 1: lists or"),
        ('{"id": ' + "1" * 5000 + ', "kind": "qa", "turns": ["x"]}', "line 1"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_a_broken_prompt_file_names_the_line(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_prompts(path)
    said = str(error.value)
    assert str(path) in said and len(said) < len(str(path)) + 300 and len(said.splitlines()) == 1


SHAREGPT = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": ""},
        {"from": "human", "value": "two"},
    ],
}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None},
        {"role": "User", "content": "two"},
    ]
}


def test_conversations_give_what_the_user_says(tmp_path):
    """Ids and kinds that are missing become the number of the line, or of the object, and chat."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n" + json.dumps(SHAREGPT) + "\n" + json.dumps(MESSAGES))
    said = ("one", "two")
    assert read_prompts(path) == [Prompt("QWJhYvA_0", "chat", said), Prompt("4", "chat", said)]
    path.write_text(json.dumps([SHAREGPT, MESSAGES, {**MESSAGES, "kind": "qa"}], indent=2))
    assert read_prompts(path) == [
        Prompt("QWJhYvA_0", "chat", said), Prompt("2", "chat", said), Prompt("3", "qa", said),
    ]  # fmt: skip


def test_a_missing_id_that_another_object_has_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({**MESSAGES, "id": 2}) + "\n" + json.dumps(MESSAGES))
    with pytest.raises(UserError, match="line 2: the id '2' appears twice, first in line 1"):
        read_prompts(path)


def test_a_line_of_a_megabyte_is_read_and_is_not_repeated_in_an_error(tmp_path):
    path, long = tmp_path / "p.jsonl", "word " * 200_000
    path.write_text(json.dumps({"id": long, "kind": 7, "turns": [long, "é" * 10**6]}))
    (prompt,) = read_prompts(path)
    assert prompt == Prompt(long, "7", (long, "é" * 10**6))
    path.write_text((json.dumps({"id": long, "kind": "x", "turns": [long]}) + "\n") * 2)
    with pytest.raises(UserError, match=r"line 2: the id .* appears twice") as error:
        read_prompts(path)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_the_line_of_what_is_not_utf_8_is_named(tmp_path, end):
    path = tmp_path / "p.jsonl"
    good = '{"id": 1, "kind": "qa", "turns": ["é\u2028"]}'.encode()
    path.write_bytes(b"\xef\xbb\xbf" + end.join([good, b"", b'{"id": "\xe9"}', good]))
    with pytest.raises(UserError, match="line 3: this is not UTF-8"):
        read_prompts(path)


def test_what_cannot_be_opened_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl", str(tmp_path / "a\0b")):
        with pytest.raises(UserError, match=r"there is no (prompt )?file"):
            read_prompts(path)


def test_what_other_programs_write_is_read(tmp_path):
    """A byte-order mark, the line ends of Windows, and separators that are no line ends in JSON."""
    path = tmp_path / "p.jsonl"
    rows = [
        {"id": i, "kind": "qa", "turns": [f"a{mark}b"]} for i, mark in enumerate("\u2028\u0085x")
    ]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\r\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [p.turns[0] for p in read_prompts(path)] == [row["turns"][0] for row in rows]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_is_named(tmp_path, encoding):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"id": 1, "kind": "qa", "turns": ["é"]}'.encode(encoding))
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(path)
