"""How a prompt is written for a target: in its chat template, or plainly where it has none.

Used by ``targets`` in every chapter, and by ``capabilities`` before any weights are loaded. It
knows the tokenizer only: what a template asks for, what the tokenizer adds to a text by itself, and
which token ends a turn. Which prompts there are is left to ``prompts``.
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from draftlayers.project import UserError, first_line

PLAIN_FORMAT = "Question:\n{turn}\n\nAnswer:\n"
# What a system message says, in templates that refuse to do without one.
SYSTEM = "You are a helpful assistant."

# What a date can be asked for (``strftime``), each with GNU's "-" for no zero in front, too.
_LETTERS = "aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
_DIRECTIVES = [f"%{flag}{letter}" for letter in _LETTERS for flag in ("-", "")]
# Where a question ends in the plain format.
_PLAIN_END = PLAIN_FORMAT.partition("{turn}")[2].rstrip()
_QUESTION, _ANSWER = "a question", "an answer"  # to see what a template makes of them


# How a template wants messages: what a system message first says, texts as lists of parts, a date.
Manner = tuple[str | None, bool, bool]


class Chat:
    """The prompt format of one tokenizer.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    day
        The date, as yyyy-mm-dd, that a chat template may print.
    """

    def __init__(self, tokenizer: Any, day: str):
        self.tokenizer, self.day = tokenizer, day
        self._manners: dict[str, Manner] = {}

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, turn: str) -> list[int]:
        """Token ids of a user's turn up to where the answer begins.

        A begin token that the tokenizer adds to every text stands there once, whether or not the
        template writes it; an end token that it adds is left out.

        Raises
        ------
        UserError
            When the chat template cannot write a user's message.
        """
        if not self.has_template:
            return self.added[0] + self._ids(PLAIN_FORMAT.format(turn=turn))
        written = self._write(turn, add_generation_prompt=True, return_dict=True)
        return self._begun(list(written["input_ids"]))

    def beginning(self, words: str = "") -> list[int]:
        """Token ids of a prompt up to where the user begins to speak, and of first words of the
        user's.

        Raises
        ------
        UserError
            When the chat template cannot write a user's message.
        """
        if not self.has_template:
            return self.added[0] + self._ids(PLAIN_FORMAT.partition("{turn}")[0] + words)
        written = self._write(_QUESTION, tokenize=False)
        return self._begun(self._ids(written.partition(_QUESTION)[0] + words))

    def said(self, ids: Sequence[int]) -> str | None:
        """The user's words in what a model wrote after ``beginning``, or None when no end came.

        Parameters
        ----------
        ids
            The new tokens. Where there is a template the last one is the end of the turn.
        """
        if self.has_template:
            return str(self.tokenizer.decode(ids[:-1])).strip()
        text, mark, _ = self.tokenizer.decode(ids).partition(_PLAIN_END)
        return text.strip() if mark else None

    @functools.cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before and after every text by itself."""
        bare, whole = self._ids("a"), list(self.tokenizer("a")["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if bare and whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The token that the template writes behind an assistant's message, if it is one of its
        own."""
        if not self.has_template:
            return None
        added = getattr(self.tokenizer, "added_tokens_decoder", ())
        marks = {*added, *self.tokenizer.all_special_ids}
        # Some templates end a message only where another one follows, and some know no assistant.
        turns = [_QUESTION, _ANSWER], [_QUESTION, _ANSWER, _QUESTION]
        for other, said in itertools.product(("assistant", "model"), turns):
            try:
                text = self._write(*said, other=other, tokenize=False)
            except Exception:  # a template may refuse what it likes
                continue
            ids = self._ids(text.rpartition(_ANSWER)[2].strip())
            if ids and ids[0] in marks:
                return ids[0]
        return None

    def notes(self) -> Iterator[str]:
        """What a person should know of the way prompts are written.

        Raises
        ------
        UserError
            When the chat template cannot write a user's message.
        """
        begin, end = (self.tokenizer.decode(ids) for ids in self.added)
        if not self.has_template:
            yield "no chat template: prompts are written in a plain question-and-answer format"
        else:
            system, *_ = self._manner()
            if system is not None:
                yield f"its chat template wants a system message, which says {system!r}"
            if begin and begin not in self._write(_QUESTION, tokenize=False):
                yield (
                    f"its chat template does not write {begin}, with which its tokenizer begins "
                    "every text: prompts get it once"
                )
        if end:
            yield f"its tokenizer ends every text with {end}: prompts leave it out"

    def _begun(self, ids: list[int]) -> list[int]:
        """What a template wrote, with the tokenizer's begin token once, whoever writes it."""
        begin = self.added[0]
        return ids if set(begin) & set(ids) else begin + ids

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _write(self, *turns: str, other: str = "assistant", **how: Any) -> Any:
        """What the template makes of turns of a user and of another, the user first."""
        return self._apply(turns, *self._manner(), other, **how)

    def _apply(
        self,
        turns: tuple[str, ...],
        system: str | None,
        parts: bool,
        dated: bool,
        other: str = "assistant",
        **how: Any,
    ) -> Any:
        if dated:
            day = datetime.date.fromisoformat(self.day)
            how["date_string"] = day.strftime("%d %b %Y")
        spoken = [] if system is None else [("system", system)]
        spoken += [(("user", other)[i % 2], turn) for i, turn in enumerate(turns)]
        chat = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in spoken
        ]
        return self.tokenizer.apply_chat_template(chat, chat_template=self._template, **how)

    def _manner(self) -> Manner:
        """How the template wants messages."""
        template = self._template
        if template not in self._manners:
            self._manners[template] = self._find_manner()
        return self._manners[template]

    def _find_manner(self) -> Manner:
        why = None
        for dated, system, parts in itertools.product((False, True), (None, SYSTEM), (False, True)):
            try:
                text = self._apply((_QUESTION,), system, parts, dated, tokenize=False)
            except Exception as err:  # jinja's errors have no common type
                why = why or first_line(err)
                continue
            if _QUESTION in text:
                return system, parts, dated
        why = why or "it leaves the message out"
        raise UserError(f"its chat template cannot write a user's message: {why}")

    @property
    def _template(self) -> str:
        """The chat template with its clock stopped at the day of the run."""
        try:
            template = self.tokenizer.get_chat_template()
        except ValueError as err:
            raise UserError(f"its chat template cannot be chosen: {err}") from err
        return stopped(template, self.day) if "strftime_now" in template else template


def stopped(template: str, day: str) -> str:
    """A chat template whose clock stands at the beginning of a day, given as yyyy-mm-dd.

    Templates are given no functions, so the clock becomes a macro of the template itself, which
    replaces each directive by what it stands for. The empty text behind it keeps a first line that
    is blank.
    """
    date = datetime.datetime.fromisoformat(day)
    replaced = "".join(f".replace({mark!r}, {date.strftime(mark)!r})" for mark in _DIRECTIVES)
    # Two percent signs stand for one, which must not begin a directive.
    form = f"format.replace('%%', '\\x00'){replaced}.replace('\\x00', '%')"
    macro = f"{{%- macro strftime_now(format) %}}{{{{ {form} }}}}{{% endmacro %}}"
    return macro + "{{ '' }}" + template
