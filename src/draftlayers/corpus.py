"""The corpus of a run: conversations whose answers the target itself wrote.

Used by chapter 01, by everything that trains, by chapter 07 for the prompts that are decoded, and
by ``draftlayers answer``. It puts together what ``prompts`` reads, ``asking`` makes and ``answers``
writes, and knows nothing of hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlayers.answers import (
    Answer,
    answer_prompts,
    load_answers,
    prompt_number,
    shipped_answers,
)
from draftlayers.asking import ROUND, Asked, ask, load_asked
from draftlayers.project import Say, UserError, quiet
from draftlayers.prompts import (
    HELDOUT,
    TRAIN,
    Conversation,
    Corpus,
    Prompt,
    balanced,
    read_prompts,
)
from draftlayers.runs import Run
from draftlayers.targets import Target


def load_corpus(target: Target, run: Run, say: Say = quiet) -> Corpus:
    """Training and validation conversations of a run.

    Of a target with shipped answers the prompts that were answered count, and only answers that
    were cut short of ``answer_tokens``, or that no longer belong to their prompt, are written
    again. Any other target writes all answers itself. At most ``generated_conversations`` are
    written, into the run's ``corpus`` folder. What ``draftlayers answer`` has written for the
    target comes first, so that what validates is of another kind. To a user's own prompts all
    answers are written; those that are held out for decoding are left out.

    Raises
    ------
    UserError
        When fewer conversations remain than training needs.
    """
    spec = run.spec
    prompts = training_prompts(run, say)
    wanted = spec.train_conversations + spec.validation_conversations
    validation = spec.validation_conversations
    causes = {"target": target.digest}
    shipped: dict[str, Answer] = {}
    if spec.prompts is None:
        path = run.uses(shipped_answers(target))
        shipped = {answer.id: answer for answer in load_answers(path, causes, say)}
        own = [run.uses(place) for place in own_corpus(run)]
        prompts = [*load_asked(own[0], target).prompts, *prompts]
        shipped |= {answer.id: answer for answer in load_answers(own[1], causes, say)}
    if shipped:
        lengths = {p.id: len(target.render(p.turns)) for p in prompts if p.id in shipped}
        fitting = [
            p
            for p in prompts
            if lengths.get(p.id, spec.max_prompt_tokens + 1) <= spec.max_prompt_tokens
            and len(shipped[p.id].tokens) >= 2
        ]
        prompts = fitting[:wanted]
    else:
        limit = spec.generated_conversations
        if wanted > limit:
            validation = max(2, validation * limit // wanted)
        prompts = prompts[: min(wanted, limit)]
    unanswered = [
        p
        for p in prompts
        if p.id not in shipped
        or not shipped[p.id].fits(
            prompt_number(target.render(p.turns)),
            spec.answer_tokens,
            shipped[p.id].seed,  # which draw was shipped is no parameter of the run
        )
    ]
    written = []
    if unanswered:
        with run.hold():
            written = answer_prompts(
                target,
                unanswered[: spec.generated_conversations],
                spec.answer_tokens,
                spec.max_prompt_tokens,
                run.path("corpus", "answers.safetensors"),
                spec.seed,
                say,
            )
    answers = [*shipped.values(), *written]
    found = pair(target, prompts, answers, spec.max_prompt_tokens, spec.answer_tokens)[:wanted]
    if len(found) < validation + 2:
        remedy = "raise max_prompt_tokens or generated_conversations"
        if shipped:
            remedy = (
                "raise max_prompt_tokens, lower validation_conversations, or let the target write "
                "more (draftlayers answer)"
            )
        elif spec.prompts is not None:
            remedy = (
                f"add prompts to {spec.prompts}, raise max_prompt_tokens, or lower "
                "validation_conversations"
            )
        raise UserError(
            f"only {len(found)} conversations are at hand, and {validation + 2} are needed, "
            f"{validation} of them to validate on; {remedy}"
        )
    return Corpus(found[:-validation], found[-validation:])


def own_corpus(run: Run) -> tuple[Path, Path]:
    """Where questions that a target asked itself lie, and its answers: one place for all profiles.

    They are shared by the runs of one model, in the folder above theirs.
    """
    folder = run.folder.parent / "corpus"
    return folder / "asked.json", folder / "answers.safetensors"


def enlarge(
    target: Target, run: Run, tokens: int, apart: Sequence[Prompt] = (), say: Say = quiet
) -> tuple[Asked, list[Answer]]:
    """Let the target ask and answer until its answers have this many tokens.

    What is finished is kept as it comes, so a killed run goes on, and asking for more adds to it.

    Parameters
    ----------
    apart
        Prompts that no question may come near, beside those of ``data/prompts/heldout.jsonl``.

    Returns
    -------
    (Asked, list of Answer)
        All questions so far, and the answers to those that are short enough.
    """
    spec, (questions, path) = run.spec, own_corpus(run)
    heldout = [*read_prompts(run.uses(HELDOUT)), *apart]
    wanted = 1
    while True:
        asked = ask(target, wanted, questions, heldout, spec.seed, say)
        answers = answer_prompts(
            target,
            asked.prompts,
            spec.answer_tokens,
            spec.max_prompt_tokens,
            path,
            spec.seed,
            say,
            {"target": target.digest},  # data, which stays when the code that wrote it changes
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
    heldout = {prompt.turns[0].strip() for prompt in read_prompts(run.uses(HELDOUT))}
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
    """The prompts that a run decodes: short enough ones, as many as asked for, all kinds alike."""
    spec = run.spec
    prompts = read_prompts(run.uses(HELDOUT))
    short = [p for p in prompts if len(target.render(p.turns)) <= spec.max_prompt_tokens]
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
        if same and len(ids) <= max_prompt and len(answer.tokens) >= 2:
            tokens = tuple(answer.tokens[:max_answer])
            found.append(Conversation(prompt.id, prompt.kind, tuple(ids), tokens))
    return found
