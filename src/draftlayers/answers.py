"""Answers: what the target itself says to a prompt, written once and kept.

Used by chapter 01 and by everything that trains. A draft head must learn what the target would
say, so answers are always the target's own: shipped in ``data/answers`` for the default target,
written here for any other. How many are written at once is left to ``writing``, which prompts and
answers a run takes to ``corpus``. This module knows nothing of hidden states.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from draftlayers.current import changed, code_digest
from draftlayers.device import dtype_name
from draftlayers.project import DATA, Say, quiet, write_atomically
from draftlayers.prompts import Prompt
from draftlayers.targets import Target
from draftlayers.writing import Request, Writer, Writes, fast_twin, precision

# Every third answer is sampled at this temperature, the others are greedy: users decode in both
# ways, and a head that has only seen greedy text is lost after the first surprise.
SAMPLED_EVERY, SAMPLE_TEMPERATURE = 3, 0.5
# Prompts that are answered and kept together. A run that was killed answers a whole group again,
# beside the same others as before, so that rounding cannot make a difference.
GROUP = 512
TELL_EVERY = 64  # answers between two lines of progress


@dataclass(frozen=True)
class Answer:
    """The target's answer to one prompt, and what it was written under.

    Attributes
    ----------
    id
        Of the prompt.
    prompt
        ``prompt_number`` of its token ids, so that an answer is never paired with a prompt whose
        text, template or tokenizer has changed since.
    temperature, limit, seed
        Of the writing: 0 is greedy, and an answer of ``limit`` tokens may have been cut.
    tokens
        Token ids, the one that ends the answer included.
    """

    id: str
    prompt: int
    temperature: float
    limit: int
    seed: int
    tokens: list[int]

    def fits(self, prompt: int, limit: int, seed: int) -> bool:
        """Whether writing it again, for a limit and a seed, would begin with the same tokens."""
        whole = len(self.tokens) < self.limit or self.limit >= limit
        return self.prompt == prompt and whole and (self.temperature == 0 or self.seed == seed)


def prompt_number(prompt_ids: Sequence[int]) -> int:
    """A number that stands for a prompt's token ids, also in the seeds of its answer."""
    return zlib.crc32(" ".join(map(str, prompt_ids)).encode())


def temperature_of(index: int) -> float:
    """Sampling temperature of the answer to the ``index``-th training prompt; 0 is greedy."""
    return SAMPLE_TEMPERATURE if index % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0


def save_answers(path: Path, answers: Sequence[Answer], causes: Mapping[str, Any]) -> None:
    """Write answers, and what all of them depend on, as one small safetensors file, atomically."""
    flat = [token for answer in answers for token in answer.tokens]
    compact = torch.uint16 if not flat or max(flat) < 1 << 16 else torch.int32
    tensors = {
        "tokens": torch.tensor(flat, dtype=torch.int32).to(compact),
        "lengths": torch.tensor([len(a.tokens) for a in answers], dtype=torch.int32),
        "prompt": torch.tensor([a.prompt for a in answers], dtype=torch.int64),
        "temperature": torch.tensor([a.temperature for a in answers], dtype=torch.float32),
        "limit": torch.tensor([a.limit for a in answers], dtype=torch.int32),
        "seed": torch.tensor([a.seed for a in answers], dtype=torch.int64),
    }
    metadata = {"causes": json.dumps(causes), "ids": json.dumps([a.id for a in answers])}
    write_atomically(path, save(tensors, metadata))


def load_answers(path: Path, causes: Mapping[str, Any], say: Say = quiet) -> list[Answer]:
    """Read answers; none when there are none, or they depend on something else, or are damaged.

    Of these only damage is said.
    """
    if not path.exists():
        return []
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if changed(json.loads(metadata["causes"]), causes):
            return []
        flat = tensors.pop("tokens").to(torch.int32)
        parts = [part.tolist() for part in flat.split(tensors.pop("lengths").tolist())]
        columns = {name: tensor.tolist() for name, tensor in tensors.items()}
        return [
            Answer(name, tokens=tokens, **dict(zip(columns, row, strict=True)))
            for name, tokens, *row in zip(
                json.loads(metadata["ids"]), parts, *columns.values(), strict=True
            )
        ]
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as err:
        say(f"the answers in {path} are damaged ({err}) and will be written again")
        return []


def own_causes(target: Target) -> dict[str, Any]:
    """What all answers that a target writes here depend on."""
    return {
        "target": target.digest,
        "precision": dtype_name(precision(target)),
        "code": code_digest("answers"),
    }


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    max_prompt_tokens: int,
    path: Path,
    seed: int = 0,
    say: Say = quiet,
    causes: Mapping[str, Any] | None = None,
    greedy: bool = False,
    writer: Writes | None = None,
) -> list[Answer]:
    """The target's answers to all prompts that are short enough, kept in ``path`` as they come.

    Answers already in ``path`` are used while they still are what would be written, so a killed
    run goes on where it stopped, and a larger set of prompts only adds to it. Within a group of
    consecutive prompts those of similar length are read together, and every state of the file is
    balanced over kinds.

    Parameters
    ----------
    causes
        What the file says that its answers depend on; default ``own_causes``.
    greedy
        Whether no answer is sampled.
    writer
        What writes; default the target itself, in the precision that is fastest here.
    """
    causes = own_causes(target) if causes is None else causes
    rendered = [target.render(prompt.turns) for prompt in prompts]
    numbers = {p.id: prompt_number(ids) for p, ids in zip(prompts, rendered, strict=True)}
    done = {
        answer.id: answer
        for answer in load_answers(path, causes, say)
        if answer.id not in numbers or answer.fits(numbers[answer.id], max_new_tokens, seed)
    }
    short = [i for i, ids in enumerate(rendered) if len(ids) <= max_prompt_tokens]
    groups = []
    for start in range(0, len(short), GROUP):
        group = sorted(short[start : start + GROUP], key=lambda i: len(rendered[i]))
        groups.append([i for i in group if prompts[i].id not in done])
    total = sum(len(a.tokens) for a in done.values())
    wanted = len(done) + sum(map(len, groups))
    if writer is None and any(groups):
        writer = Writer(fast_twin(target))
    for group in filter(None, groups):
        assert writer is not None  # there is something to write
        temperatures = [0.0 if greedy else temperature_of(i) for i in group]
        requests = [
            Request(rendered[i], max_new_tokens, temperature, seed + numbers[prompts[i].id])
            for i, temperature in zip(group, temperatures, strict=True)
        ]
        written: list[list[int]] = [[] for _ in group]
        for count, (place, tokens) in enumerate(writer.write(requests), 1):
            written[place] = tokens
            total += len(tokens)
            if count % TELL_EVERY == 0 and count < len(group):
                say(f"answered {len(done) + count} of {wanted} prompts, {total:,} tokens")
        for i, temperature, tokens in zip(group, temperatures, written, strict=True):
            prompt = prompts[i]
            done[prompt.id] = Answer(
                prompt.id, numbers[prompt.id], temperature, max_new_tokens, seed, tokens
            )
        save_answers(path, list(done.values()), causes)
        say(f"answered {len(done)} of {wanted} prompts, {total:,} tokens")
    return list(done.values())


def shipped_answers(target: Target) -> Path:
    """Where answers of this target are shipped with the project, if they are."""
    return DATA / "answers" / f"{Path(target.name).name}.safetensors"
