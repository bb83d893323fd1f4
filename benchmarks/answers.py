"""How fast answers are written: many at once, against ``generate()`` and against the processor.

    python benchmarks/answers.py [--json -] [--model NAME] [--prompts 256] [--streams 128]

The target answers the first training prompts greedily, each with ``--tokens`` tokens at most, in
the precision in which answers are written here. Reading the prompts counts. Three numbers sum it
up:

``tokens_per_s``
    answer tokens a second;
``vs_generate``
    that, against Hugging Face's ``generate()`` on the same prompts in the same precision, in
    batches of as many streams and in the same order; the two take turns, batch by batch;
``fraction_of_gemm``
    the share of the time that the products alone would take: all matrices of the target once for
    each token, prompts included, as fast as this machine multiplies as many rows as there are
    streams, with packed weights or without, whichever is faster.

``equal_to_engine`` counts answers that are those of the engine, one sequence at a time in the same
precision, token for token. In low precision a product depends on how many rows are multiplied at
once, so answers may part where two tokens are almost equally likely: ``parted_at_most`` is the
largest distance, where they part, of the two tokens' logits in float32, None when none parts.
``vs_float32`` is the speed against the same writing without packed weights in
float32, on a part of the prompts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import torch
import typer
from _record import write
from torch import Tensor, nn
from transformers import GenerationConfig

from draftlayers.decoding import decode
from draftlayers.device import dtype_name
from draftlayers.engine import Engine
from draftlayers.packing import PackedLinear, packs
from draftlayers.prompts import TRAIN, read_prompts
from draftlayers.targets import Target, load_target
from draftlayers.writing import STREAMS, Request, Writer, fast_twin

ALONE = 12  # answers that are compared with the engine's
REPEATS = 5


def timed(work: Callable[[], object]) -> float:
    """Seconds that a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def generated(target: Target, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Answer a batch with ``generate()``; how many tokens came before the end of each answer."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    settings = GenerationConfig(
        do_sample=False, eos_token_id=sorted(target.eos_ids), pad_token_id=0, max_new_tokens=tokens
    )
    own, target.model.generation_config = target.model.generation_config, settings
    try:
        out = target.model.generate(ids, attention_mask=mask)[:, longest:].tolist()
    finally:
        target.model.generation_config = own
    count = 0
    for row in out:
        ends = [place + 1 for place, token in enumerate(row) if token in target.eos_ids]
        count += min(ends, default=len(row))
    return count


def product_seconds(target: Target, rows: int) -> float:
    """Seconds of all products of a pass over so many tokens, done as fast as they can be."""
    inside = [m for m in target.layers.modules() if isinstance(m, nn.Linear)]
    shapes: dict[tuple[int, ...], list[nn.Linear]] = {}
    for linear in [*inside, target.output_matrix]:
        shapes.setdefault(tuple(linear.weight.shape), []).append(linear)
    total = 0.0
    for alike in shapes.values():
        x = torch.randn(rows, alike[0].in_features).to(target.dtype)
        ways = [alike] if not packs(alike[0].weight) else [alike, packed(alike)]
        total += min(timed(partial(through, way, x)) for way in ways for _ in range(REPEATS))
    return total


def apart(target: Target, prompt: Sequence[int], one: list[int], other: list[int]) -> float:
    """How far apart the target's logits of the first two tokens are in which answers differ."""
    place = next(i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1)
    ids = torch.tensor([[*prompt, *one[:place]]])
    logits = target.model(ids).logits[0, -1].float()
    return float((logits[one[place]] - logits[other[place]]).abs())


def packed(linears: Sequence[nn.Linear]) -> list[PackedLinear]:
    return [PackedLinear([linear], 1) for linear in linears]


def through(ways: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> None:
    """Multiply by one after the other, as in a pass: the same again would lie in the cache."""
    for multiply in ways:
        multiply(x)


@torch.inference_mode()
def main(
    json_to: Annotated[str, typer.Option("--json", help="File for the result; - prints it.")] = "-",
    model: Annotated[str, typer.Option(help="Target, as everywhere.")] = "smollm2-135m",
    prompts: Annotated[int, typer.Option(min=1, help="Training prompts.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 128,
    streams: Annotated[int, typer.Option(min=1, help="Answers side by side.")] = STREAMS,
) -> None:
    """Time the writing of answers and print one JSON object."""
    loaded = load_target(model, say=lambda text: print(text, file=sys.stderr))
    target = fast_twin(loaded)
    ids = [target.render(prompt.turns) for prompt in read_prompts(TRAIN)[:prompts]]
    ids.sort(key=len)
    writer = Writer(target, streams)
    dict(writer.write([Request(ids[0], 4)]))  # what happens once does not count
    generated(target, ids[:1], 4)

    answers: dict[int, list[int]] = {}
    ours = timed(lambda: answers.update(writer.write([Request(p, tokens) for p in ids])))
    count = sum(map(len, answers.values()))
    theirs, their_count = 0.0, 0
    for start in range(0, len(ids), streams):
        batch, began = ids[start : start + streams], time.perf_counter()
        their_count += generated(target, batch, tokens)
        theirs += time.perf_counter() - began
    read = sum(map(len, ids))
    multiplied = product_seconds(target, streams) * (count + read) / streams

    engine, parted = Engine(target), []
    some = range(0, len(ids), max(1, len(ids) // ALONE))
    for place in some:
        alone = decode(engine, ids[place], tokens).tokens
        if alone != answers[place]:
            parted.append(apart(loaded, ids[place], alone, answers[place]))
    part = [Request(p, tokens) for p in ids[:: max(1, len(ids) // streams)]]
    before: dict[int, list[int]] = {}
    plainly = timed(lambda: before.update(Writer(loaded, streams, packed=False).write(part)))
    per_second = count / ours
    write(
        {
            "tokens_per_s": per_second,
            "vs_generate": per_second / (their_count / theirs),
            "fraction_of_gemm": multiplied / ours,
            "vs_float32": per_second / (sum(map(len, before.values())) / plainly),
            "equal_to_engine": [len(some) - len(parted), len(some)],
            "parted_at_most": max(parted, default=None),
            "setting": {
                "model": model,
                "precision": dtype_name(target.dtype),
                "way": writer.way,
                "prompts": len(ids),
                "prompt_tokens": read,
                "answer_tokens": count,
                "streams": streams,
            },
        },
        json_to,
    )


if __name__ == "__main__":
    typer.run(main)
