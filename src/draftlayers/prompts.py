"""Prompts, one user request each, and the conversations that begin with them.

Used by chapters 01 and 06 for conversations, and by chapter 07 for what is decoded; ``asking``
makes more prompts. How answers come about is left to ``answers``.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlayers.project import DATA, UserError

# What heads learn from, what picks the best of their weights, and what is decoded with them.
TRAIN, VALIDATION, HELDOUT = (
    DATA / "prompts" / f"{name}.jsonl" for name in ("train", "validation", "heldout")
)
# Who speaks in files of conversations. Any other name is refused: were it the user's, a turn would
# be lost without a word.
USERS = frozenset({"human", "user"})
OTHERS = frozenset(
    {"gpt", "chatgpt", "bing", "bard", "assistant", "model", "system", "developer", "tool",
     "function", "function_call", "function_response", "observation"}
)  # fmt: skip
_BLANK = " \t\n"  # what may stand between JSON values once the ends of lines are plain
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Prompt:
    """One user request; ``turns`` beyond the first follow up on the target's answer."""

    id: str
    kind: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """A prompt and the target's own answer, in token ids."""

    id: str
    kind: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer, one after the other."""
        return [*self.prompt_ids, *self.answer_ids]


@dataclass(frozen=True)
class Corpus:
    """What the heads of a run learn from and are validated on; the parts share no prompt."""

    train: list[Conversation]
    validation: list[Conversation]


def read_prompts(path: Path | str) -> list[Prompt]:
    """Read prompts from JSON lines, or from one JSON array of the same objects.

    Four shapes of an object are known and may be mixed:

    - ours: ``id, kind, turns``;
    - Spec-Bench's (Xia et al., 2024): ``question_id, category, turns``;
    - ShareGPT's: ``conversations``, a list of ``{"from": "human", "value": text}``;
    - plain messages: ``messages``, a list of ``{"role": "user", "content": text}``.

    Of the last two only what the user says becomes a prompt: the target answers itself, and
    system messages are left out. A missing id is there the number of the line (in an array, of
    the object), and a missing kind is ``chat``.

    Raises
    ------
    UserError
        When the file is missing, is not UTF-8 or holds no prompt, when an object has none of
        these shapes or a turn without text, or when an id appears twice. Names file and line.
    """
    path = Path(path)
    if not path.is_file():
        there = "no file of prompts, but something else" if path.exists() else "no prompt file"
        raise UserError(f"there is {there}: {path}")
    try:
        data = path.read_bytes()
    except OSError as err:
        raise UserError(f"the prompt file {path} cannot be read ({err.strerror})") from None
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    try:
        for line, number, row in _rows(_text(data)):
            prompt = _prompt(row, number, line)
            if prompt.id in lines:
                first = lines[prompt.id]
                raise _wrong(
                    line, f"the id {_shown(prompt.id)} appears twice, first in line {first}"
                )
            lines[prompt.id] = line
            prompts.append(prompt)
    except UserError as err:
        raise UserError(f"{path}, {err}") from None
    if not prompts:
        raise UserError(f"the prompt file {path} holds no prompts")
    return prompts


def _wrong(line: int, what: str) -> UserError:
    return UserError(f"line {line}: {what}")


def _shown(value: Any) -> str:
    """A value of the file on one line, not longer than can be read."""
    return reprlib.repr(value)


def _text(data: bytes) -> str:
    """The text of a file, without a byte-order mark and with plain ends of lines.

    JSON allows the line separators of Unicode inside a string, so they end no line.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = 1 + len(re.findall(rb"\r\n|\r|\n", data[: err.start]))
        raise _wrong(line, "this is not UTF-8 text; save the file in that encoding") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if (place := text.find("\0")) >= 0:
        line = 1 + text.count("\n", 0, place)
        raise _wrong(line, "a NUL byte, so the file is damaged, or not UTF-8 but another encoding")
    return text


def _rows(text: str) -> Iterator[tuple[int, int, Any]]:
    """Line, number and value of what the file holds: a value a line, or the elements of an array.

    On lines of their own values are numbered as the lines are.
    """
    place = _after_blank(text, 0)
    if not text.startswith("[", place):
        for line, one in enumerate(text.split("\n"), 1):
            if not one.strip(_BLANK):
                continue
            row, end = _decode(one, _after_blank(one, 0), line)
            if one[end:].strip(_BLANK):
                raise _wrong(line, f"more than one JSON value, the second at character {end + 1}")
            yield line, line, row
        return
    line, number, sign = 1 + text.count("\n", 0, place), 0, "["
    while sign != "]":
        start = _after_blank(text, place + 1)
        line, place = line + text.count("\n", place, start), start
        if sign == "[" and text.startswith("]", place):
            break
        row, end = _decode(text, place, line)
        number += 1
        yield line, number, row
        end = _after_blank(text, end)
        line, place = line + text.count("\n", place, end), end
        sign = text[place : place + 1]
        if sign not in (",", "]"):
            raise _wrong(line, "the array of objects goes on without a comma, or has no end")
    if text[place + 1 :].strip(_BLANK):
        raise _wrong(line, "something follows the end of the array")


def _after_blank(text: str, place: int) -> int:
    """The first place from here on that is not blank."""
    while text[place : place + 1] in (" ", "\t", "\n"):
        place += 1
    return place


def _decode(text: str, place: int, line: int) -> tuple[Any, int]:
    """The JSON value that begins at a place of a text, and where it ends."""
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as err:
        line += text.count("\n", place, err.pos)
        at = err.pos - text.rfind("\n", 0, err.pos)
        raise _wrong(line, f"this is not JSON ({err.msg} at character {at})") from None
    except RecursionError:
        raise _wrong(line, "lists or objects are nested too deeply to be read") from None
    except ValueError:
        raise _wrong(line, "a number has too many digits to be read") from None


def _prompt(row: Any, number: int, line: int) -> Prompt:
    """The prompt that an object of the file stands for."""
    if not isinstance(row, dict) or not {"turns", "conversations", "messages"} & row.keys():
        raise _wrong(
            line,
            "expected an object with id, kind and turns (Spec-Bench: question_id, category and "
            f"turns), with conversations, or with messages, got {_shown(row)}",
        )
    identity, kind = row.get("id", row.get("question_id")), row.get("kind", row.get("category"))
    if "turns" in row:
        turns = row["turns"]
    else:
        identity = number if identity is None else identity
        kind = "chat" if kind is None else kind
        if "conversations" in row:
            turns = _said(row["conversations"], "conversations", "from", "value", line)
        else:
            turns = _said(row["messages"], "messages", "role", "content", line)
    if not isinstance(turns, list) or not turns:
        raise _wrong(line, f"turns must be a list of strings, at least one, got {_shown(turns)}")
    for place, turn in enumerate(turns, 1):
        if not isinstance(turn, str):
            raise _wrong(
                line, f"turns must be a list of strings, but turn {place} is {_shown(turn)}"
            )
        if not turn.strip():
            raise _wrong(line, f"turn {place} is empty")
        _check_text(turn, f"turn {place}", line)
    return Prompt(_label(identity, "id", line), _label(kind, "kind", line), tuple(turns))


def _said(messages: Any, key: str, who: str, what: str, line: int) -> list[Any]:
    """What the user says in a list of messages."""
    if not isinstance(messages, list):
        raise _wrong(line, f"{key} must be a list of messages, got {_shown(messages)}")
    found = []
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {who, what} <= message.keys():
            raise _wrong(line, f"message {place} of {key} is no object with {who} and {what}")
        if not isinstance(message[who], str) or message[who].lower() not in USERS | OTHERS:
            raise _wrong(
                line,
                f"message {place} of {key} is from {_shown(message[who])}, who is not known; the "
                f"user is called {' or '.join(sorted(USERS))}",
            )
        if message[who].lower() in USERS:
            found.append(message[what])
    if not found:
        raise _wrong(line, f"nothing in {key} is said by the user")
    return found


def _label(value: Any, what: str, line: int) -> str:
    """An id or a kind: a text, or a number as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(line, f"the {what} must be a text or a number, got {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(line, f"the {what} is {value}, which is no number")
    if not str(value).strip():
        raise _wrong(line, f"the {what} is empty")
    _check_text(str(value), f"the {what}", line)
    return str(value)


def _check_text(text: str, what: str, line: int) -> None:
    """Refuse what JSON can write and no text can hold: half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        half = ascii(text[err.start])[1:-1]
        raise _wrong(line, f"{what} holds {half}, half of a character and no text") from None


def balanced(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in an order whose every prefix is balanced over kinds."""
    rounds: Counter[str] = Counter()
    placed = []
    for prompt in prompts:
        placed.append((rounds[prompt.kind], prompt))
        rounds[prompt.kind] += 1
    return [prompt for _, prompt in sorted(placed, key=lambda pair: pair[0])]
