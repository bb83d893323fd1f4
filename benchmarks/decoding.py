"""How fast answers are decoded: plainly, speculatively, and by Hugging Face's ``generate()``.

    python benchmarks/decoding.py [--json -] [--head FOLDER] [--model NAME] [--dtype float32]

All methods decode the same held-out prompts greedily in one process, in an order that rotates from
prompt to prompt, after one unmeasured answer; outputs are compared with the target's own forward
pass, and with one another, before a time counts. Times are those of whole answers, the prompt
included, because ``generate()`` tells no other. Three ratios sum it up:

``verify6_over_decode``
    a target pass over 6 tokens against a pass over 1 on our engine, the medians of passes taken
    in turn after the same context;
``plain_over_hf``
    our plain decoding against ``generate()``, tokens per second;
``spec_over_plain``
    our speculative decoding with the head against our plain decoding, likewise.

Speculation drafts a tree or a chain of the shape that is foretold to be fastest (``shapes``), from
terms that are measured first and from other prompts; ``foretold`` has the predictions. A long chain
stands beside it (``chain_over_plain``), and so do
``generate()`` with prompt lookup and with assisted generation, where the assistant is the target's
own first layers (it has no smaller sibling). Loading and preparing are reported apart, and so is
the first answer of each method, beside the same answer once all is warm. The head is the one that
ships for the default layers, or theirs from the furthest run at hand, or ``--head``; without any it
is an untrained one, which the result says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _record import write
from transformers import GenerationConfig

from draftlayers.contenders import shipped_place
from draftlayers.costs import measure_costs, measure_passes
from draftlayers.decoding import Decoded
from draftlayers.device import dtype_name
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.project import PROJECT
from draftlayers.prompts import HELDOUT, balanced, read_prompts
from draftlayers.selection import default_rule
from draftlayers.shapes import foretell
from draftlayers.speed import (
    PLAIN,
    Method,
    Timings,
    decode_seconds,
    engine_methods,
    speed,
    speedup,
    summarise,
    time_methods,
)
from draftlayers.start import start_from_target
from draftlayers.targets import Target, load_target
from draftlayers.weights import find_weights

DRAFT = "draft"  # of the shape that is foretold to be fastest
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # tokens of the passes that are timed
HF = "generate()"
ASSISTED = f"{HF}, assisted"  # many times slower than the others, so it gets every fourth prompt


class Precision(StrEnum):
    """In which the target computes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def find_head(target: Target, folder: Path | None) -> tuple[DraftHead, str]:
    """The head to draft with, and where it comes from."""
    layers = tuple(default_rule(target.n_layers))
    name = "-".join(map(str, layers)) + "-s0"
    runs = PROJECT / "runs" / find_weights(target.name).folder_name
    ships = shipped_place(target, layers)
    own = [runs / profile / "heads" / name for profile in ("full", "quick")]
    places = [folder] if folder else [ships, *own]
    for place in places:
        if folder or (place / "config.json").exists():
            shown = place.relative_to(PROJECT) if place.is_relative_to(PROJECT) else place.name
            return DraftHead.load(place, target), str(shown)
    embedding = target.model.get_input_embeddings().weight
    size = min(6000, len(embedding))
    vocabulary = torch.arange(len(embedding) - size, len(embedding))
    head = DraftHead(HeadConfig.for_target(target, layers, size), embedding, vocabulary)
    start_from_target(head, target, 0)
    return head.eval(), "untrained: no run has a head yet"


def hugging_face(target: Target, **options: Any) -> Method:
    """``generate()`` as a method that reports like our own, and that decodes as plainly.

    What a model's own settings ask for (penalties, suppressed tokens, lengths) is set aside, since
    nothing here honours it: ``generate()`` would fill it into any settings that it is given.
    """
    settings = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(target.eos_ids),
        pad_token_id=target.tokenizer.pad_token_id,
    )

    def run(prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        ids = torch.tensor([prompt], device=target.device)
        own, target.model.generation_config = target.model.generation_config, settings
        try:
            began = time.perf_counter()
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                **options,
            )
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            tokens = out[0, len(prompt) :].tolist()
            seconds = time.perf_counter() - began
        finally:
            target.model.generation_config = own
        return Decoded(tokens, seconds={"total": seconds, "prefill": 0.0})

    return run


def main(
    json_to: Annotated[str, typer.Option("--json", help="File for the result; - prints it.")] = "-",
    model: Annotated[str, typer.Option(help="Target, as everywhere.")] = "smollm2-135m",
    dtype: Annotated[Precision | None, typer.Option(help="Default: the device's own.")] = None,
    head: Annotated[Path | None, typer.Option(help="Folder of a trained head.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 14,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 64,
    depth: Annotated[int, typer.Option(min=1, help="Guesses of a chain.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 2,
) -> None:
    """Time decoding and print one JSON object."""
    began = time.perf_counter()
    target = load_target(
        model,
        dtype=getattr(torch, dtype) if dtype else None,
        say=lambda text: print(text, file=sys.stderr),
    )
    loaded = time.perf_counter()
    engine = Engine(target)
    prepared = time.perf_counter()
    draft_head, source = find_head(target, head)
    chain = HeadDrafter(draft_head, depth)
    ready = time.perf_counter()
    heldout = balanced(read_prompts(HELDOUT))
    rendered = [target.render(prompt.turns) for prompt in heldout]
    # The shape is chosen on the first prompts, so it is measured on the last.
    short = [ids for ids in rendered if len(ids) <= 320]
    surveyed, chosen = short[: min(prompts, len(short) - prompts)], short[-prompts:]
    context = max(chosen, key=len)
    passes = measure_passes(engine, context, SIZES, repeats=60)
    forecast = foretell(engine, draft_head, surveyed or chosen, passes, tokens, depth, depth)
    best = forecast.best
    drafters = {"chain": chain, DRAFT: best.drafter(draft_head)}
    methods = engine_methods(engine, drafters, len(context) + tokens) | {
        HF: hugging_face(target),
        f"{HF}, prompt lookup": hugging_face(target, prompt_lookup_num_tokens=depth),
        ASSISTED: hugging_face(
            target,
            assistant_early_exit=target.n_layers // 3,
            num_assistant_tokens=depth,
            num_assistant_tokens_schedule="constant",
        ),
    }
    first = {name: run(chosen[0], tokens).seconds["total"] for name, run in methods.items()}
    timings = time_methods(
        target,
        chosen,
        methods,
        tokens,
        repeats,
        every={ASSISTED: 4},
        say=lambda text: print(text, file=sys.stderr),
    )
    answered = {name: timings.shared(name) for name in methods}
    differences = {
        name: [
            {"prompt": d.prompt, "place": d.place, "gap": d.gap}
            for d in timings.differences
            if d.method == name
        ]
        for name in methods
    }
    rates = {
        name: speed([timings.runs[name][i] for i in indices], whole=True)
        for name, indices in answered.items()
    }
    costs = measure_costs(engine, {"chain": chain}, context, passes)["chain"]
    own = Timings({name: timings.runs[name] for name in (PLAIN, *drafters)}, [])
    table = summarise(own, replicates=200)
    ratios = {
        "plain_over_hf": speedup(timings, PLAIN, HF, whole=True),
        "spec_over_plain": speedup(timings, DRAFT, whole=True),
        "chain_over_plain": speedup(timings, "chain", whole=True),
    }
    result = {
        "verify6_over_decode": costs.verify(6) / costs.passes[1],
        **{name: ratio.value for name, ratio in ratios.items()},
        **{f"{name}_interval": (ratio.low, ratio.high) for name, ratio in ratios.items()},
        "spec_over_hf": speedup(timings, DRAFT, HF, whole=True).value,
        "spec_over_plain_after_prompt": table[DRAFT]["speedup"],
        "tokens_per_second": {
            name: rates[name](torch.arange(len(answered[name]))) for name in methods
        },
        "tau": {name: table[name]["tau"] for name in drafters},
        "alpha": table["chain"]["alpha"],
        "foretold": {str(shape): gain for shape, gain in forecast.speedups.items()},
        "pass_ms": {n: 1000 * seconds for n, seconds in costs.passes.items()},
        "draft_step_ms": 1000 * costs.draft_next,
        "draft_first_ms": 1000 * costs.draft_first,
        "rest_ms": 1000 * costs.rest[1],
        "identical": {name: 1 - len(differences[name]) / len(answered[name]) for name in methods},
        "differences": {name: found for name, found in differences.items() if found},
        "largest_gap": {
            name: max((d["gap"] for d in found), default=0.0) for name, found in differences.items()
        },
        "startup_seconds": {
            "load_target": loaded - began,
            "prepare_engine": prepared - loaded,
            "load_and_prepare_head": ready - prepared,
            # Recording graphs and setting up libraries is in the first answer of a method.
            "first_answer": {
                name: [seconds, decode_seconds([timings.runs[name][0]], whole=True).item()]
                for name, seconds in first.items()
            },
        },
        "setting": {
            "model": model,
            "dtype": dtype_name(target.dtype),
            "engine": engine.way,
            "head": source,
            "depth": depth,
            "shape": vars(best),
            "prompts": len(chosen),
            "new_tokens": tokens,
            "rounds": repeats,
        },
    }
    write(result, json_to)


if __name__ == "__main__":
    typer.run(main)
