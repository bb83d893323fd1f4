"""Answers: what the target itself says to a prompt, written once and kept.

Used by chapter 01 and by everything that trains. A draft head must learn what the target would
say, so answers are always the target's own: shipped in ``data/answers`` for the default target,
written here for any other. Which prompts and answers a run takes is left to ``corpus``. This
module knows nothing of hidden states.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from draftlayers.contexts import cached_limit
from draftlayers.current import changed, code_digest
from draftlayers.project import DATA, Say, quiet, write_atomically
from draftlayers.prompts import Prompt
from draftlayers.targets import Target

# Every third answer is sampled at this temperature, the others are greedy: users decode in both
# ways, and a head that has only seen greedy text is lost after the first surprise.
SAMPLED_EVERY, SAMPLE_TEMPERATURE = 3, 0.5
STREAMS = 64


class _RoomyLayer(DynamicLayer):
    """A cache layer that grows in its own spare room instead of copying itself at every token."""

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms, self.filled = [key_states[:, :, :0], value_states[:, :, :0]], 0
        end = self.filled + key_states.shape[2]
        # Keys and values may differ in width.
        for i, (new, held) in enumerate(((key_states, self.keys), (value_states, self.values))):
            if end > self.rooms[i].shape[2] or len(new) != len(self.rooms[i]):
                room = new.new_empty(*new.shape[:2], end + 64, new.shape[3])
                if self.filled:
                    room[:, :, : self.filled] = held
                self.rooms[i] = room
            self.rooms[i][:, :, self.filled : end] = new
        self.filled = end
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
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
            [torch.Generator().manual_seed(seed + prompt_number(prompts[i])) for i in indices],
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
    # What pads a prompt is masked; the tokenizer's own pad token may lie beyond the embedding.
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=target.model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = cast(Any, _RoomyLayer)()  # the library's __init__ has no types
    answers: dict[int, list[int]] = {i: [] for i in indices}
    limit, _ = cached_limit(target.config, target.context_limit)
    room = {i: min(max_new_tokens, limit - len(p)) for i, p in zip(indices, prompts, strict=True)}
    alive = torch.tensor(indices, device=device)
    eos = torch.tensor(sorted(target.eos_ids), device=device)
    cached = {target.cache_name: cache, "use_cache": True}
    states = target.decoder(
        input_ids=ids, attention_mask=mask, position_ids=positions, **cached
    ).last_hidden_state[:, -1:]
    position = positions[:, -1:]
    for step in range(max_new_tokens):
        tokens = _sample(target.output_logits(states[:, 0]), temperatures, generators)
        for i, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            answers[i].append(token)
        full = torch.tensor([len(answers[i]) >= room[i] for i in alive.tolist()], device=device)
        open_ = ~torch.isin(tokens, eos) & ~full
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
            input_ids=tokens[:, None], attention_mask=mask, position_ids=position, **cached
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
        "precision": str(target.dtype).removeprefix("torch."),
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
) -> list[Answer]:
    """The target's answers to all prompts that are short enough, kept in ``path`` as they come.

    Answers already in ``path`` are used while they still are what would be written, so a killed
    run goes on where it stopped, and a larger set of prompts only adds to it. Batches hold prompts
    of similar length, chosen within groups of consecutive prompts, so that every state of the file
    is balanced over kinds.

    Parameters
    ----------
    causes
        What the file says that its answers depend on; default ``own_causes``.
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
    group = 6 * STREAMS
    # Grouped before what is done is left out: a run that was killed goes on with the same batches.
    order = [
        i
        for start in range(0, len(short), group)
        for i in sorted(short[start : start + group], key=lambda i: len(rendered[i]))
        if prompts[i].id not in done
    ]
    total, wanted = sum(len(a.tokens) for a in done.values()), len(done) + len(order)
    temperatures = [temperature_of(i) for i in order]
    batches = generate_answers(
        target, [rendered[i] for i in order], max_new_tokens, temperatures, seed
    )
    for batch in batches:
        for j, tokens in batch:
            prompt = prompts[order[j]]
            done[prompt.id] = Answer(
                prompt.id, numbers[prompt.id], temperatures[j], max_new_tokens, seed, tokens
            )
            total += len(tokens)
        save_answers(path, list(done.values()), causes)
        say(f"answered {len(done)} of {wanted} prompts, {total:,} tokens")
    return list(done.values())


def shipped_answers(target: Target) -> Path:
    """Where answers of this target are shipped with the project, if they are."""
    return DATA / "answers" / f"{Path(target.name).name}.safetensors"
