"""Prompts, and conversations whose answers the target itself wrote.

Used by chapter 01 and by everything that trains or decodes. A draft head must learn what the
target would say, so answers are always the target's own: shipped in ``data/answers`` for the
default target, generated here for any other. This module knows nothing of hidden states.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from draftlayers.spec import DATA, Run, UserError, write_atomically
from draftlayers.targets import Target

# Every third answer is sampled at this temperature, the others are greedy: users decode in both
# ways, and a head that has only seen greedy text is lost after the first surprise.
SAMPLED_EVERY, SAMPLE_TEMPERATURE = 3, 0.5
STREAMS = 64


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
        return [*self.prompt_ids, *self.answer_ids]


@dataclass(frozen=True)
class Corpus:
    """What a run learns from and is judged on; the three parts share no prompt."""

    train: list[Conversation]
    validation: list[Conversation]
    heldout: list[Prompt]


def read_prompts(path: Path | str) -> list[Prompt]:
    """Read prompts from JSON lines: ours (``id, kind, turns``) or Spec-Bench's ``question.jsonl``.

    Spec-Bench (Xia et al., 2024) names them ``question_id, category, turns``.

    Raises
    ------
    UserError
        When the file is missing, a line is no such object, or an id appears twice.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no prompt file {path}")
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
                raise TypeError("turns must be a list of strings")
            identity = str(row["id"] if "id" in row else row["question_id"])
            kind = str(row["kind"] if "kind" in row else row["category"])
        except (KeyError, TypeError, json.JSONDecodeError) as err:
            raise UserError(
                f"{path}, line {number}: expected an object with id, kind and turns, or "
                f"Spec-Bench's question_id, category and turns ({type(err).__name__}: {err})"
            ) from None
        prompts.append(Prompt(identity, kind, tuple(turns)))
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"{path}: the id {prompt.id!r} appears twice")
        seen.add(prompt.id)
    return prompts


class _RoomyLayer(DynamicLayer):
    """A cache layer that grows in its own spare room instead of copying itself at every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room, self.filled = key_states.new_empty(2, *key_states.shape[:2], 0, 1), 0
        end = self.filled + key_states.shape[2]
        if end > self.room.shape[3] or key_states.shape[0] != self.room.shape[1]:
            shape = list(key_states.shape)
            shape[2] = end + 64
            roomier = key_states.new_empty(2, *shape)
            if self.filled:
                roomier[0, :, :, : self.filled] = self.keys
                roomier[1, :, :, : self.filled] = self.values
            self.room = roomier
        self.room[0, :, :, self.filled : end] = key_states
        self.room[1, :, :, self.filled : end] = value_states
        self.filled = end
        self.keys, self.values = self.room[0, :, :, :end], self.room[1, :, :, :end]
        return self.keys, self.values


@torch.inference_mode()
def generate_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperatures: Sequence[float],
    seed: int = 0,
    streams: int | None = None,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Let the target answer prompts, many streams at a time.

    Parameters
    ----------
    prompts
        Token ids of each prompt; consecutive ones are batched, so their order decides what a
        killed run has finished.
    temperatures
        One for each prompt; 0 is greedy.
    seed
        With a prompt's own tokens it decides the prompt's random numbers, so that an answer does
        not depend on which prompts were answered beside it.
    streams
        Prompts in a batch; default ``STREAMS``.

    Yields
    ------
    list of (index, ids)
        For each batch, the answers without the end-of-sequence token's successors (the token
        itself is kept).
    """
    streams = streams or STREAMS
    for start in range(0, len(prompts), streams):
        indices = list(range(start, min(start + streams, len(prompts))))
        yield _generate_batch(
            target,
            indices,
            [list(prompts[i]) for i in indices],
            max_new_tokens,
            torch.tensor([temperatures[i] for i in indices], device=target.device),
            [torch.Generator().manual_seed(seed + prompt_crc(prompts[i])) for i in indices],
        )


def _generate_batch(
    target: Target,
    indices: list[int],
    prompts: list[list[int]],
    max_new_tokens: int,
    temperatures: Tensor,
    generators: list[torch.Generator],
) -> list[tuple[int, list[int]]]:
    device = target.device
    longest = max(map(len, prompts))
    pad = target.tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=target.model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _RoomyLayer()
    answers: dict[int, list[int]] = {i: [] for i in indices}
    alive = torch.tensor(indices, device=device)
    eos = torch.tensor(sorted(target.eos_ids), device=device)
    states = target.decoder(
        input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
    ).last_hidden_state[:, -1:]
    position = positions[:, -1:]
    for step in range(max_new_tokens):
        tokens = _sample(target.output_logits(states[:, 0]), temperatures, generators)
        for i, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            answers[i].append(token)
        open_ = ~torch.isin(tokens, eos)
        if step + 1 == max_new_tokens or not open_.any():
            break
        if not open_.all():
            rows = open_.nonzero()[:, 0]
            alive, tokens, temperatures = alive[rows], tokens[rows], temperatures[rows]
            mask, position = mask[rows], position[rows]
            generators = [generators[row] for row in rows.tolist()]
            cache.batch_select_indices(rows)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = position + 1
        states = target.decoder(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=position,
            cache=cache,
            use_cache=True,
        ).last_hidden_state
    return list(answers.items())


def _sample(logits: Tensor, temperatures: Tensor, generators: list[torch.Generator]) -> Tensor:
    """The next token of each stream: greedy, or by inverting the cumulative distribution."""
    tokens = logits.argmax(-1)
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        mass = torch.softmax(logits[warm] / temperatures[warm, None], -1).double().cumsum(-1)
        draws = [torch.rand(1, dtype=torch.float64, generator=generators[i]) for i in warm.tolist()]
        at = torch.searchsorted(mass, torch.stack(draws).to(mass.device) * mass[:, -1:], right=True)
        tokens[warm] = at[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens


@dataclass(frozen=True)
class Answers:
    """The target's answers to prompts, with what is needed to know that they still fit.

    ``crc`` is the checksum of each prompt's token ids, so that an answer is never paired with a
    prompt whose text, template or tokenizer has changed since.
    """

    ids: list[str]
    crc: list[int]
    temperature: list[float]
    tokens: list[list[int]]


def prompt_crc(prompt_ids: Sequence[int]) -> int:
    """Checksum of a prompt's token ids."""
    return zlib.crc32(" ".join(map(str, prompt_ids)).encode())


def temperature_of(index: int) -> float:
    """Sampling temperature of the answer to the ``index``-th training prompt; 0 is greedy."""
    return SAMPLE_TEMPERATURE if index % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0


def save_answers(path: Path, answers: Answers, identity: str) -> None:
    """Write answers as one small safetensors file, atomically."""
    flat = [token for answer in answers.tokens for token in answer]
    compact = torch.uint16 if not flat or max(flat) < 1 << 16 else torch.int32
    tensors = {
        "tokens": torch.tensor(flat, dtype=torch.int32).to(compact),
        "lengths": torch.tensor([len(answer) for answer in answers.tokens], dtype=torch.int32),
        "crc": torch.tensor(answers.crc, dtype=torch.int64),
        "temperature": torch.tensor(answers.temperature, dtype=torch.float32),
    }
    metadata = {"target": identity, "ids": "\n".join(answers.ids)}
    write_atomically(path, save(tensors, metadata))


def load_answers(path: Path, identity: str) -> Answers | None:
    """Read answers; ``None`` when there are none, or they are another target's."""
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["target"] != identity:
            return None
        flat = file.get_tensor("tokens").to(torch.int32).tolist()
        lengths = file.get_tensor("lengths").tolist()
        crc, temperature = (file.get_tensor(name).tolist() for name in ("crc", "temperature"))
    tokens, start = [], 0
    for length in lengths:
        tokens.append(flat[start : start + length])
        start += length
    return Answers(metadata["ids"].split("\n"), crc, temperature, tokens)


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    max_prompt_tokens: int,
    path: Path,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Answers:
    """The target's answers to all prompts that are short enough, kept in ``path`` as they come.

    Answers already in ``path`` are reused, so a killed run goes on where it stopped, and a
    larger set of prompts only adds to it. Batches hold prompts of similar length, chosen within
    groups of consecutive prompts, so that every state of the file is balanced over kinds.
    """
    done = load_answers(path, target.identity) or Answers([], [], [], [])
    have = dict(zip(done.ids, done.crc, strict=True))
    rendered = [target.render(prompt.turns) for prompt in prompts]
    todo = [
        i
        for i, ids in enumerate(rendered)
        if len(ids) <= max_prompt_tokens and have.get(prompts[i].id) != prompt_crc(ids)
    ]
    stale = {prompts[i].id for i in todo} & set(have)
    keep = [j for j, identity in enumerate(done.ids) if identity not in stale]
    done = Answers(
        *(
            [column[j] for j in keep]
            for column in (done.ids, done.crc, done.temperature, done.tokens)
        )
    )
    group = 6 * STREAMS
    order = [
        i
        for start in range(0, len(todo), group)
        for i in sorted(todo[start : start + group], key=lambda i: len(rendered[i]))
    ]
    total = sum(map(len, done.tokens))
    temperatures = [temperature_of(i) for i in order]
    batches = generate_answers(
        target, [rendered[i] for i in order], max_new_tokens, temperatures, seed
    )
    for batch in batches:
        for j, answer in batch:
            i = order[j]
            done.ids.append(prompts[i].id)
            done.crc.append(prompt_crc(rendered[i]))
            done.temperature.append(temperatures[j])
            done.tokens.append(answer)
            total += len(answer)
        save_answers(path, done, target.identity)
        say(f"answered {len(done.ids)} of {len(keep) + len(todo)} prompts, {total:,} tokens")
    return done


def shipped_answers(target: Target) -> Path:
    """Where answers of this target are shipped with the project, if they are."""
    return DATA / "answers" / f"{target.name}.safetensors"


def load_corpus(target: Target, run: Run, say: Callable[[str], None] = lambda text: None) -> Corpus:
    """Training and validation conversations and held-out prompts of a run.

    Shipped answers are used where they are this target's; what is missing the target writes
    itself, up to ``generated_conversations``, into the run's ``corpus`` folder.

    Raises
    ------
    UserError
        When fewer conversations remain than training needs.
    """
    spec = run.spec
    prompts = read_prompts(DATA / "prompts" / "train.jsonl")
    heldout = read_prompts(DATA / "prompts" / "heldout.jsonl")
    wanted = spec.train_conversations + spec.validation_conversations
    answers = load_answers(shipped_answers(target), target.identity)
    if answers is None:
        validation = max(2, spec.validation_conversations * spec.generated_conversations // wanted)
        wanted = min(wanted, spec.generated_conversations)
        answers = answer_prompts(
            target,
            prompts[:wanted],
            spec.answer_tokens,
            spec.max_prompt_tokens,
            run.path("corpus", "answers.safetensors"),
            spec.seed,
            say,
        )
    else:
        validation = spec.validation_conversations
    conversations = pair(target, prompts, answers, spec.max_prompt_tokens, spec.answer_tokens)
    conversations = conversations[:wanted]
    if len(conversations) < validation + 2:
        raise UserError(
            f"only {len(conversations)} conversations are at hand and {validation} go to "
            "validation; raise max_prompt_tokens or generated_conversations"
        )
    short = [p for p in heldout if len(target.render(p.turns)) <= spec.max_prompt_tokens]
    return Corpus(
        conversations[:-validation],
        conversations[-validation:],
        balanced(short)[: spec.heldout_prompts],
    )


def balanced(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in an order whose every prefix is balanced over kinds."""
    rounds: Counter[str] = Counter()
    placed = []
    for prompt in prompts:
        placed.append((rounds[prompt.kind], prompt))
        rounds[prompt.kind] += 1
    return [prompt for _, prompt in sorted(placed, key=lambda pair: pair[0])]


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
    target: Target, prompts: list[Prompt], answers: Answers, max_prompt: int, max_answer: int
) -> list[Conversation]:
    """Conversations in the order of the prompts, where prompt and answer still fit together."""
    by_id = dict(zip(answers.ids, zip(answers.crc, answers.tokens, strict=True), strict=True))
    found = []
    for prompt in prompts:
        if prompt.id not in by_id:
            continue
        ids = target.render(prompt.turns)
        crc, tokens = by_id[prompt.id]
        if crc == prompt_crc(ids) and len(ids) <= max_prompt and len(tokens) >= 2:
            answer = tuple(tokens[:max_answer])
            found.append(Conversation(prompt.id, prompt.kind, tuple(ids), answer))
    return found
