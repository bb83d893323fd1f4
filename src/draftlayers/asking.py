"""Asking: the target writes the prompts that it will answer.

Used by ``draftlayers answer`` to make more to learn from than the prompts that ship. A model that
was trained on conversations knows how they begin: given the beginning of a user's turn it writes a
question of the kind that it was trained on (Magpie, arXiv:2406.08464, Section 2.1). So no data set
is needed, nor a licence, and any target will do. Half of the turns begin with nothing, the others
with a few words of a kind. What is no question, or nearly one that is held out or was asked before,
is left out and counted. Answers are left to ``answers``.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftlayers.current import changed, digest, read_record, write_record
from draftlayers.project import Say, quiet
from draftlayers.prompts import Prompt
from draftlayers.targets import Target
from draftlayers.writing import Request, Writer, Writes, fast_twin

FREE = "free"  # the kind of questions whose beginning is left to the target, too
# First words of a user's turn, a few for each kind of the prompts that ship.
OPENINGS = {
    "math": ("How many", "Calculate", "What is the", "A shop sells", "Solve", "If a train"),
    "code": ("Write a Python function that", "Write a program", "How do I", "Explain this code:"),
    "conversation": ("Write a short", "Imagine", "I am", "Can you help me", "You are a", "Give me"),
    "qa": ("What is", "Who", "Why do", "When did", "How does", "Which", "Explain"),
    "summarization": ("Summarize the following text:", "Shorten this paragraph:", "Sum up:"),
    "rag": ("Use the text below to answer the question.", "Passage:", "Read this and answer:"),
    "translation": ("Translate into French:", "Translate into German:", "How do you say"),
}
TEMPERATURE = 0.8  # a lower one asks the same questions again and again, a higher one odd ones
LIMIT = 96  # tokens; questions that run on are the bad ones
FEWEST_WORDS = 3
SHINGLE = 3  # words that stand together, by which texts are compared
ALIKE = 0.5  # of the shingles of two texts: more in common makes them nearly the same
DISTINCT = 0.7  # of the shingles of a text: fewer different ones make it a repetition
ROUND = 512  # questions that are written and kept together

# Why a question is left out, in the order in which it is looked at.
REASONS = {
    "no end": f"did not end within {LIMIT} tokens",
    "marks": "holds marks of the prompt format",
    "too short": f"has fewer than {FEWEST_WORDS} words",
    "no text": "holds characters that are no text",
    "repetition": "repeats itself",
    "held out": "is nearly a prompt that is held out for measuring",
    "asked before": "is nearly one that was asked before",
}


@dataclass
class Asked:
    """Questions that a target has written so far.

    Attributes
    ----------
    rounds
        Rounds of ``ROUND`` that were written.
    left_out
        How many were left out for each of ``REASONS``.
    prompts
        Those that were kept, in their order.
    apart
        Digests of the texts that they were held against, none of which is near any of them.
    """

    rounds: int
    left_out: dict[str, int]
    prompts: list[Prompt]
    apart: list[str] = field(default_factory=list)

    @property
    def written(self) -> int:
        """How many were written, kept or not."""
        return self.rounds * ROUND


class Likeness:
    """Tells whether a text is nearly one of those before it.

    Two texts are alike when they share more than ``ALIKE`` of their runs of ``SHINGLE`` words
    (Jaccard's index; Broder, 1997).

    Examples
    --------
    >>> seen = Likeness(["What is the capital of France?"])
    >>> seen.like("what is the capital of  France"), seen.like("What is the price of bread?")
    (True, False)
    """

    def __init__(self, texts: Iterable[str] = ()):
        self.sizes: list[int] = []
        self.places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Compare later texts with this one, too."""
        runs = set(shingles(text))
        for run in runs:
            self.places[run].append(len(self.sizes))
        self.sizes.append(len(runs))

    def like(self, text: str) -> bool:
        """Whether a text is nearly one that was added."""
        runs = set(shingles(text))
        shared = Counter(place for run in runs for place in self.places.get(run, ()))
        return any(
            common > ALIKE * (len(runs) + self.sizes[place] - common)
            for place, common in shared.items()
        )


def shingles(text: str) -> list[tuple[str, ...]]:
    """All runs of ``SHINGLE`` words of a text, or the one run of a shorter text."""
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))]


def load_asked(path: Path, target: Target, **causes: Any) -> Asked:
    """Questions that a target has kept in a file.

    No questions when the file is missing, is another target's, or was made with other values of the
    causes that are asked for. Questions are data: they stay what they are when the code that wrote
    them changes.
    """
    record = read_record(path) or {}
    was, causes = record.get("causes", {}), {"target": target.digest, **causes}
    if changed({name: was.get(name) for name in causes}, causes):
        return Asked(0, dict.fromkeys(REASONS, 0), [])
    prompts = [Prompt(p["id"], p["kind"], tuple(p["turns"])) for p in record["prompts"]]
    return Asked(record["rounds"], record["left_out"], prompts, record.get("apart", []))


def ask(
    target: Target,
    count: int,
    path: Path,
    apart: Sequence[Prompt] = (),
    seed: int = 0,
    say: Say = quiet,
    writer: Writes | None = None,
) -> Asked:
    """Let the target write questions until this many are kept, or hardly any new one comes.

    What is finished lies in ``path`` and is used again, so a killed run goes on after its last
    round, and asking for more adds to it.

    Parameters
    ----------
    count
        Questions wanted; the last round may keep more.
    path
        File that keeps them.
    apart
        Prompts that no question may come near: those that are held out for measuring.
    seed
        Question number n is drawn with this seed plus n; questions of another seed do not count.
    writer
        What writes; default the target itself, in the precision that is fastest here.

    Returns
    -------
    Asked
        All questions of the file, with those that were written now.
    """
    turns = [turn for prompt in apart for turn in prompt.turns]
    heldout = Likeness(turns)
    asked = load_asked(path, target, seed=seed)
    known = {digest(turn) for turn in turns}
    if more := known - set(asked.apart):
        # Questions that were kept before these were held out may be like them.
        far = [prompt for prompt in asked.prompts if not heldout.like(prompt.turns[0])]
        asked.left_out["held out"] += len(asked.prompts) - len(far)
        asked.prompts, asked.apart = far, sorted({*asked.apart, *more})
        if asked.rounds:
            _keep(path, asked, target, seed)
    before = Likeness(prompt.turns[0] for prompt in asked.prompts)
    if writer is None and len(asked.prompts) < count:
        writer = Writer(fast_twin(target))
    while writer and len(asked.prompts) < count:
        kept = _round(target, writer, asked, heldout, before, seed)
        asked.apart = sorted(known)  # what was held out only earlier was not looked at now
        _keep(path, asked, target, seed)
        say(f"asked {asked.written:,} questions, kept {len(asked.prompts):,} of {count:,}")
        if kept < ROUND / 50:
            say("hardly any new question comes, so no more are asked")
            break
    return asked


def _keep(path: Path, asked: Asked, target: Target, seed: int) -> None:
    """Write down what has been asked so far."""
    write_record(path, {"causes": {"target": target.digest, "seed": seed}, **asdict(asked)})


def _round(
    target: Target, writer: Writes, asked: Asked, heldout: Likeness, before: Likeness, seed: int
) -> int:
    """Write one round of questions and keep the good ones; how many they are."""
    numbers = range(asked.written, asked.written + ROUND)
    openings = [opening_of(number) for number in numbers]
    ended = None if target.has_chat_template else lambda ids: target.chat.said(ids) is not None
    requests = [
        Request(target.chat.beginning(words), LIMIT, TEMPERATURE, seed + number, ended)
        for number, (_, words) in zip(numbers, openings, strict=True)
    ]
    written = dict(writer.write(requests))
    kept = 0
    for place, number in enumerate(numbers):
        kind, words = openings[place]
        text = _text(target, words, written[place])
        why = _fault(target, text, written[place], heldout, before)
        if text is None or why:
            asked.left_out[why or "no end"] += 1
            continue
        before.add(text)
        asked.prompts.append(Prompt(f"asked-{number:06d}", kind, (text,)))
        kept += 1
    asked.rounds += 1
    return kept


def opening_of(number: int) -> tuple[str, str]:
    """Kind and first words of a question, by its number: every second one begins with nothing."""
    if number % 2 == 0:
        return FREE, ""
    turn, kind = divmod(number // 2, len(OPENINGS))
    name = list(OPENINGS)[kind]
    return name, OPENINGS[name][turn % len(OPENINGS[name])]


def _text(target: Target, words: str, ids: list[int]) -> str | None:
    """A question from its first words on, or None when it has no end."""
    if target.has_chat_template and ids[-1] not in target.eos_ids:
        return None
    said = target.chat.said(ids)
    if said is None or not words:
        return said
    # The first token of what follows says whether a blank stands between.
    more = target.tokenizer.decode(ids)
    return (words + (" " if more[:1].isspace() else "") + said).strip()


def _fault(
    target: Target, text: str | None, ids: list[int], heldout: Likeness, before: Likeness
) -> str | None:
    """Which of ``REASONS`` speaks against a question, or None."""
    if text is None:
        return "no end"
    marks = {*getattr(target.tokenizer, "added_tokens_decoder", ())}
    if marks & set(ids[:-1]):
        return "marks"
    words = re.findall(r"\w+", text)
    if len(words) < FEWEST_WORDS:
        return "too short"
    if any(unicodedata.category(c) in ("Cn", "Co", "Cs") or c == "\ufffd" for c in text):
        return "no text"
    runs = shingles(text)
    if len(set(runs)) < DISTINCT * len(runs):
        return "repetition"
    if heldout.like(text):
        return "held out"
    return "asked before" if before.like(text) else None
