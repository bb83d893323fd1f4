"""The corpus of a run: conversations whose answers the target itself wrote.

Used by chapter 01, by everything that trains, by chapter 07 for the prompts that are decoded, and
by ``draftlayers answer``. It puts together what ``prompts`` reads, ``asking`` makes and ``answers``
writes, and knows nothing of hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftlayers.answers import (
    Answer,
    answer_prompts,
    load_answers,
    prompt_number,
    shipped_answers,
)
from draftlayers.asking import ROUND, Asked, ask, load_asked
from draftlayers.project import DATA, Say, UserError, quiet, write_atomically
from draftlayers.prompts import (
    HELDOUT,
    TRAIN,
    VALIDATION,
    Conversation,
    Corpus,
    Prompt,
    balanced,
    read_prompts,
)
from draftlayers.runs import Run
from draftlayers.targets import Target
from draftlayers.writing import Writes

FEWEST_TOKENS = 2  # of an answer; a head guesses the second one first


def load_corpus(target: Target, run: Run, say: Say = quiet) -> Corpus:
    """Training and validation conversations of a run.

    What ``draftlayers answer`` has written for the target is learned from first, then answers to
    the prompts that ship. Those that validate are answers to other prompts, written by hand as the
    held-out ones are, so that no template is shared. Answers that are at hand are used; those that
    are missing, were cut short of ``answer_tokens`` or no longer belong to their prompt are written
    into the run's ``corpus`` folder. A user's own prompts take the place of both kinds, and the
    last of them validate.

    Raises
    ------
    UserError
        When fewer conversations remain than training needs.
    """
    spec = run.spec
    train, validation = spec.train_conversations, spec.validation_conversations
    prompts = training_prompts(run, say)
    known: dict[str, Answer] = {}
    if spec.prompts is None:
        causes = {"target": target.digest}
        ours = load_answers(run.uses(shipped_answers(target)), causes, say)
        known = {answer.id: answer for answer in ours}
        for place in (own_corpus(run), shipped_corpus(target)):
            asked, answers = map(run.uses, place)
            if questions := load_asked(asked, target).prompts:
                own = {answer.id: answer for answer in load_answers(answers, causes, say)}
                prompts = [*(p for p in questions if p.id in own), *prompts]
                known |= own
                break  # what was written here began with what ships
        judged = _usable(target, run, read_prompts(run.uses(VALIDATION)), known, validation)
        learned = _usable(target, run, prompts, known, train)
    else:
        usable = _usable(target, run, prompts, known, train + validation)
        if len(usable) < train + validation:
            validation = max(2, validation * len(usable) // (train + validation))
        learned, judged = usable[:-validation], usable[-validation:]
    found = [
        _conversations(target, run, some, known, place, say)
        for some, place in ((learned, "answers"), (judged, "validation"))
    ]
    if run.path("corpus").exists():
        run.made(run.path("corpus"))
    if len(found[0]) < 2 or not found[1]:
        raise UserError(
            f"only {len(found[0])} conversations to learn from and {len(found[1])} to validate on "
            f"are at hand, and 2 and 1 are needed; raise max_prompt_tokens (now "
            f"{spec.max_prompt_tokens}), or give more prompts"
        )
    return Corpus(*found)


def _usable(
    target: Target, run: Run, prompts: Sequence[Prompt], known: Mapping[str, Answer], count: int
) -> list[Prompt]:
    """The first prompts that are short enough, and whose answer, if it is known, is of use."""
    found: list[Prompt] = []
    for prompt in prompts:
        if len(found) == count:
            break
        if prompt.id in known and len(known[prompt.id].tokens) < FEWEST_TOKENS:
            continue
        if len(target.render(prompt.turns)) <= run.spec.max_prompt_tokens:
            found.append(prompt)
    return found


def _conversations(
    target: Target,
    run: Run,
    prompts: Sequence[Prompt],
    known: Mapping[str, Answer],
    place: str,
    say: Say,
) -> list[Conversation]:
    """Prompts with their answers, of which those that are missing are written."""
    spec = run.spec
    missing = [
        p
        for p in prompts
        if p.id not in known
        or not known[p.id].fits(
            prompt_number(target.render(p.turns)),
            spec.answer_tokens,
            known[p.id].seed,  # which draw was shipped is no parameter of the run
        )
    ]
    written = list[Answer]()
    if missing:
        with run.hold():
            written = answer_prompts(
                target,
                missing,
                spec.answer_tokens,
                spec.max_prompt_tokens,
                run.path("corpus", f"{place}.safetensors"),
                spec.seed,
                say,
                greedy=place == "validation",  # what is estimated is greedy decoding
            )
    answers = [*known.values(), *written]
    return pair(target, prompts, answers, spec.max_prompt_tokens, spec.answer_tokens)


def own_corpus(run: Run) -> tuple[Path, Path]:
    """Where questions that a target asked itself lie, and its answers: one place for all profiles.

    They are shared by the runs of one model, in the folder above theirs.
    """
    return _corpus_files(run.folder.parent / "corpus")


def shipped_corpus(target: Target) -> tuple[Path, Path]:
    """Where those that ship with the project lie, if this target has any."""
    return _corpus_files(DATA / "corpus" / Path(target.name).name)


def questions_at_hand(target: Target, run: Run) -> tuple[Asked, str]:
    """The questions of the target's own that a run learns from, and where they come from.

    None when its prompts are the user's, or when there are none for this target.
    """
    if run.spec.prompts is None:
        for (asked, _), where in ((own_corpus(run), "run"), (shipped_corpus(target), "project")):
            if (found := load_asked(run.uses(asked), target)).prompts:
                return found, where
    return Asked(0, {}, []), ""


def _corpus_files(folder: Path) -> tuple[Path, Path]:
    return folder / "asked.json", folder / "answers.safetensors"


def enlarge(
    target: Target,
    run: Run,
    tokens: int,
    apart: Sequence[Prompt] = (),
    say: Say = quiet,
    writer: Writes | None = None,
) -> tuple[Asked, list[Answer]]:
    """Let the target ask and answer until its answers have this many tokens.

    What is finished is kept as it comes, so a killed run goes on, and asking for more adds to it.

    Parameters
    ----------
    apart
        Prompts that no question may come near, beside those that this project holds out.
    writer
        What writes questions and answers; default the target itself.

    Returns
    -------
    (Asked, list of Answer)
        All questions so far, and the answers to those that are short enough.
    """
    spec, (questions, path) = run.spec, own_corpus(run)
    ships = shipped_corpus(target)
    if not load_asked(questions, target).rounds and load_asked(ships[0], target).rounds:
        write_atomically(path, ships[1].read_bytes())
        write_atomically(questions, ships[0].read_bytes())  # last: without it there is no corpus
    heldout = [p for path in (HELDOUT, VALIDATION) for p in read_prompts(run.uses(path))]
    heldout += apart
    wanted = 1
    while True:
        asked = ask(target, wanted, questions, heldout, spec.seed, say, writer)
        answers = answer_prompts(
            target,
            asked.prompts,
            spec.answer_tokens,
            spec.max_prompt_tokens,
            path,
            spec.seed,
            say,
            {"target": target.digest},  # data, which stays when the code that wrote it changes
            writer=writer,
        )
        total = sum(len(answer.tokens) for answer in answers)
        if total >= tokens or len(asked.prompts) < wanted:
            return asked, answers
        # As many more as the answers so far promise, in steps that a killed run can spare.
        missing = (tokens - total) * len(asked.prompts) // max(total, 1) + 1
        wanted = len(asked.prompts) + min(missing, 4 * ROUND)


def training_prompts(run: Run, say: Say = quiet) -> list[Prompt]:
    """The prompts that heads may learn from: the user's own, or those of ``data/prompts``.

    Raises
    ------
    UserError
        When the user's file cannot be read, or holds held-out prompts only.
    """
    if run.spec.prompts is None:
        return read_prompts(run.uses(TRAIN))
    own = read_prompts(run.uses(Path(run.spec.prompts)))
    heldout = {p.turns[0].strip() for p in read_prompts(run.uses(HELDOUT))}
    apart = [prompt for prompt in own if prompt.turns[0].strip() not in heldout]
    if len(apart) < len(own):
        say(f"{len(own) - len(apart)} of your prompts are held out for decoding and left out")
    if not apart:
        raise UserError(
            f"every prompt in {run.spec.prompts} is one that is held out for decoding, so heads "
            "would learn from what they are measured on; add others"
        )
    return apart


def heldout_prompts(target: Target, run: Run) -> list[Prompt]:
    """The prompts that a run decodes: short enough ones, as many as asked for, all kinds alike.

    Raises
    ------
    UserError
        When none is short enough.
    """
    spec = run.spec
    prompts = read_prompts(run.uses(HELDOUT))
    lengths = [len(target.render(p.turns)) for p in prompts]
    most = spec.max_prompt_tokens
    short = [p for p, length in zip(prompts, lengths, strict=True) if length <= most]
    if not short:
        raise UserError(
            f"none of the prompts that are held out for decoding has at most {most} tokens "
            f"(max_prompt_tokens); the shortest has {min(lengths)}"
        )
    return balanced(short)[: spec.heldout_prompts]


def until_tokens(conversations: Sequence[Conversation], tokens: int) -> list[Conversation]:
    """The first conversations that together have at least this many tokens, or all."""
    taken: list[Conversation] = []
    total = 0
    for conversation in conversations:
        if total >= tokens:
            break
        taken.append(conversation)
        total += len(conversation.tokens)
    return taken


def pair(
    target: Target,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    max_prompt: int,
    max_answer: int,
) -> list[Conversation]:
    """Conversations in the order of the prompts, where prompt and answer fit together.

    Of several answers to a prompt the last one counts.
    """
    by_id = {answer.id: answer for answer in answers}
    found = []
    for prompt in prompts:
        if prompt.id not in by_id:
            continue
        ids, answer = target.render(prompt.turns), by_id[prompt.id]
        same = answer.prompt == prompt_number(ids)
        if same and len(ids) <= max_prompt and len(answer.tokens) >= FEWEST_TOKENS:
            tokens = tuple(answer.tokens[:max_answer])
            found.append(Conversation(prompt.id, prompt.kind, tuple(ids), tokens))
    return found
