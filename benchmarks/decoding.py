"""How fast answers are decoded: plainly, speculatively, and by Hugging Face's ``generate()``.

    python benchmarks/decoding.py [--json -] [--head FOLDER] [--model NAME] [--dtype float32]

All methods decode the same held-out prompts greedily in one process, in an order that rotates from
prompt to prompt, after one unmeasured round; outputs are compared before a time counts. Times are
those of whole answers, the prompt included, because ``generate()`` tells no other. Three ratios
sum it up:

``verify6_over_decode``
    a target pass over 6 tokens against a pass over 1 on our engine, the medians of passes taken
    in turn after the same context;
``plain_over_hf``
    our plain decoding against ``generate()``, tokens per second;
``spec_over_plain``
    our speculative decoding with the head against our plain decoding, likewise.

Speculation drafts a small tree: as many guesses as a pass verifies for about the price of one
token, which is measured first. A long chain stands beside it (``chain_over_plain``), and so do
``generate()`` with prompt lookup and with assisted generation, where the assistant is the target's
own first layers (it has no smaller sibling). Loading and preparing are reported apart, and so is
the first answer of each method, beside the same answer once all is warm. The head is the default
layers' from the furthest run at hand, or ``--head``; without any it is an untrained one, which the
result says.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _record import write

from draftlayers.corpus import balanced, read_prompts
from draftlayers.decoding import Decoded, HeadDrafter, decode
from draftlayers.engine import Engine
from draftlayers.head import DraftHead, HeadConfig, start_from_target
from draftlayers.selection import default_rule
from draftlayers.spec import DATA, PROJECT, slug
from draftlayers.speed import (
    Measured,
    compare,
    first_difference,
    free_guesses,
    interval,
    measure_costs,
    measure_passes,
)
from draftlayers.targets import Target, load_target

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
    runs = PROJECT / "runs" / slug(target.name)
    places = [folder] if folder else [runs / p / "heads" / name for p in ("full", "quick")]
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


def hugging_face(target: Target, **options: Any) -> Callable[[list[int], int], Decoded]:
    """``generate()`` as a method that reports like our own."""

    def run(prompt: list[int], max_new_tokens: int) -> Decoded:
        ids = torch.tensor([prompt], device=target.device)
        began = time.perf_counter()
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.eos_ids),
            pad_token_id=target.tokenizer.pad_token_id,
            **options,
        )
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        tokens = out[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - began
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
    heldout = balanced(read_prompts(DATA / "prompts" / "heldout.jsonl"))
    rendered = [target.render(prompt.turns) for prompt in heldout]
    # The tree's shape was chosen on the first prompts, so it is measured on the last.
    chosen = [ids for ids in rendered if len(ids) <= 320][-prompts:]
    context = max(chosen, key=len)
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    engine.reserve(len(context) + tokens, new=max(sizes))
    passes = measure_passes(engine, context, sizes, repeats=40)
    tree = HeadDrafter(draft_head, 2, top_k=3, total=max(2, free_guesses(passes)))

    def ours(drafter: HeadDrafter | None) -> Callable[[list[int], int], Decoded]:
        return lambda ids, n: decode(engine, ids, n, drafter)

    methods = {
        "plain": ours(None),
        "chain": ours(chain),
        "tree": ours(tree),
        HF: hugging_face(target),
        f"{HF}, prompt lookup": hugging_face(target, prompt_lookup_num_tokens=depth),
        ASSISTED: hugging_face(
            target,
            assistant_early_exit=target.n_layers // 3,
            num_assistant_tokens=depth,
            num_assistant_tokens_schedule="constant",
        ),
    }
    names = list(methods)
    runs: dict[str, list[list[Decoded]]] = {name: [[] for _ in chosen] for name in names}
    differences: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    first = {name: methods[name](chosen[0], tokens).seconds["total"] for name in names}
    for repeat in range(repeats):
        for i, ids in enumerate(chosen):
            shift = (i + repeat) % len(names)
            turns = [n for n in names[shift:] + names[:shift] if n != ASSISTED or i % 4 == 0]
            for name in turns:
                runs[name][i].append(methods[name](ids, tokens))
            for name in set(turns) - {"plain"}:
                found = first_difference(engine, ids, runs["plain"][i][-1], runs[name][i][-1])
                if found and not repeat:
                    differences[name].append({"prompt": i, "place": found[0], "gap": found[1]})
            print(f"round {repeat + 1}: {i + 1} of {len(chosen)} prompts", file=sys.stderr)

    def speed(name: str, index: torch.Tensor) -> float:
        """Tokens per second over whole answers, medians over rounds, pooled over prompts."""
        timed = [repeats for repeats in runs[name] if repeats]
        counts = torch.tensor([float(len(repeats[0].tokens)) for repeats in timed])
        seconds = torch.tensor(
            [statistics.median(r.seconds["total"] for r in repeats) for repeats in timed]
        )
        return (counts[index].sum() / seconds[index].sum()).item()

    def ratio(name: str, base: str) -> tuple[float, tuple[float, float]]:
        def statistic(index: torch.Tensor) -> float:
            return speed(name, index) / speed(base, index)

        return statistic(whole), interval(statistic, len(chosen), 1000)

    whole = torch.arange(len(chosen))
    answers = {name: sum(map(bool, runs[name])) for name in names}
    costs = measure_costs(engine, {"chain": chain}, context, passes)["chain"]
    table = compare(Measured({name: runs[name] for name in ("plain", "chain", "tree")}, []), 200)
    hf, hf_interval = ratio("plain", HF)
    best, best_interval = ratio("tree", "plain")
    long, long_interval = ratio("chain", "plain")
    result = {
        "verify6_over_decode": costs.verify(6) / costs.passes[1],
        "plain_over_hf": hf,
        "plain_over_hf_interval": hf_interval,
        "spec_over_plain": best,
        "spec_over_plain_interval": best_interval,
        "spec_over_hf": ratio("tree", HF)[0],
        "spec_over_plain_after_prompt": table["tree"]["speedup"],
        "chain_over_plain": long,
        "chain_over_plain_interval": long_interval,
        "tokens_per_second": {name: speed(name, whole[: answers[name]]) for name in names},
        "tau": {name: table[name]["tau"] for name in ("chain", "tree")},
        "alpha": table["chain"]["alpha"],
        "pass_ms": {n: 1000 * seconds for n, seconds in costs.passes.items()},
        "draft_step_ms": 1000 * costs.draft_next,
        "draft_first_ms": 1000 * costs.draft_first,
        "rest_ms": 1000 * costs.rest[1],
        "identical": {name: 1 - len(differences[name]) / answers[name] for name in names},
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
                name: [seconds, statistics.median(r.seconds["total"] for r in runs[name][0])]
                for name, seconds in first.items()
            },
        },
        "setting": {
            "model": model,
            "dtype": str(target.dtype).removeprefix("torch."),
            "engine": engine.way,
            "head": source,
            "depth": depth,
            "tree": {"depth": tree.depth, "top_k": tree.top_k, "total": tree.size},
            "prompts": len(chosen),
            "new_tokens": tokens,
            "rounds": repeats,
        },
    }
    write(result, json_to)


if __name__ == "__main__":
    typer.run(main)
