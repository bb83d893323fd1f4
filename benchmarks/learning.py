"""What more answers buy a draft head, and the head of all of them, which ships with the project.

    python benchmarks/learning.py --ship [--json FILE] [--spec-bench question.jsonl] [PART ...]

Runs on the corpus, the states and the layers of a run whose chapters 1 to 5 are done. What is
trained lies in that run's ``heads`` folder, so a killed study goes on where it stopped, and parts
named on the command line can be trained by several processes side by side. Without a name
everything is trained and decoded with, and the record is written. The parts:

``sixteenth``, ``quarter``, ``all``
    heads of the default rule's layers on shares of the training answers, for as many passes;
``chosen``
    a head of the chosen layers on a quarter of them.

The record's ``decoding`` holds acceptance lengths in real greedy decoding on our held-out prompts
and, with ``--spec-bench``, on Spec-Bench's questions (first turns): the target's own token counts,
pooled over passes, 95 percent bootstrap intervals over prompts, paired for the difference of the
two heads of a quarter. The head of all answers decodes as a chain, as the tree that is foretold to
be fastest (``shapes``), and as the whole tree that this one is cut from. Every output is compared
with plain decoding's.

With ``--ship`` the head of all answers goes to ``data/heads``, in bfloat16 and without what can be
made again from the target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _record import whole, write

from draftlayers.contenders import head_folder, planned_sets, shipped_place
from draftlayers.corpus import heldout_prompts, load_corpus
from draftlayers.costs import measure_passes
from draftlayers.current import write_record
from draftlayers.decoding import acceptance_length
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.examples import TrainingData, answer_rows
from draftlayers.project import UserError
from draftlayers.prompts import Prompt, read_prompts
from draftlayers.runs import Run
from draftlayers.shapes import Shape, best_shape, foretell
from draftlayers.spec import RunSpec
from draftlayers.speed import difference, engine_methods, summarise, time_methods
from draftlayers.targets import Target, open_target
from draftlayers.training import TrainedHead, TrainingSettings, train_head
from draftlayers.training_data import prepare

LARGEST = 25_000_000  # bytes of a head that ships
VERIFIED = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of the passes that are timed


class Part(StrEnum):
    """Heads that can be trained apart."""

    SIXTEENTH = "sixteenth"
    QUARTER = "quarter"
    CHOSEN = "chosen"
    ALL = "all"


SHARES = {Part.SIXTEENTH: 1 / 16, Part.QUARTER: 1 / 4, Part.CHOSEN: 1 / 4, Part.ALL: 1.0}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def part_of(data: TrainingData, share: float) -> TrainingData:
    """The same vocabulary and validation, and the first part of the training conversations."""
    return replace(data, train=data.train[: round(len(data.train) * share)])


def train(run: Run, target: Target, data: TrainingData, part: Part) -> TrainedHead:
    """The head of a part, trained now if it is not yet."""
    sets, seed = planned_sets(run), run.spec.seed
    if part is Part.CHOSEN and "chosen" not in sets:
        raise UserError("the criterion chose the default rule's layers, so there is no such head")
    layers = sets["chosen" if part is Part.CHOSEN else "default"]
    own = run.path("heads", f"study-{part}")
    folder = head_folder(run, layers, seed) if part is Part.ALL else own
    settings = TrainingSettings.from_spec(run.spec)
    some = part_of(data, SHARES[part])
    return train_head(some, layers, target, settings, seed, folder, lambda t: say(f"{part}: {t}"))


def record_of(trained: TrainedHead, data: TrainingData) -> dict[str, Any]:
    """What the record keeps of a training."""
    return {
        "layers": list(trained.head.config.layers),
        "train_answer_tokens": int(answer_rows(data.store, data.train).sum()),
        "train_conversations": len(data.train),
        "updates": trained.history[-1]["update"],
        "seconds": trained.seconds,
        **{key: trained.best[key] for key in ("update", "loss", "acceptance", "tau")},
        "history": [
            {key: r[key] for key in ("update", "tokens", "train_loss", "loss", "tau")}
            for r in trained.history
        ],
    }


def decode_all(
    engine: Engine, drafters: Mapping[str, HeadDrafter], prompts: list[Prompt], run: Run
) -> dict[str, Any]:
    """Acceptance lengths on prompts, overall and by kind, outputs checked."""
    spec, target = run.spec, engine.target
    rendered = [(p.kind, target.render(p.turns[:1])) for p in prompts]
    usable = [(kind, ids) for kind, ids in rendered if len(ids) <= spec.max_prompt_tokens]
    methods = engine_methods(engine, drafters, spec.max_prompt_tokens + spec.decode_tokens)
    asked = [ids for _, ids in usable]
    timings = time_methods(target, asked, methods, spec.decode_tokens, say=say)
    found = summarise(timings, spec.bootstrap)
    kinds = sorted({kind for kind, _ in usable})
    record: dict[str, Any] = {
        "prompts": len(usable),
        "left_out_as_too_long": len(prompts) - len(usable),
        "drafts": {
            name: {
                "identical_to_plain": round(found[name]["identical"] * len(usable)),
                **{key: found[name][key] for key in ("tau", "tau_interval", "alpha")},
                "by_kind": {
                    kind: acceptance_length(
                        [timings.runs[name][i][0] for i, (k, _) in enumerate(usable) if k == kind]
                    )
                    for kind in kinds
                },
            }
            for name in drafters
        },
    }
    if Part.CHOSEN in drafters:
        ahead = difference(timings, Part.CHOSEN, Part.QUARTER, spec.bootstrap)["tau"]
        record["chosen_minus_default"] = ahead.value
        record["chosen_minus_default_interval"] = [ahead.low, ahead.high]
    return record


def ship(trained: TrainedHead, record: dict[str, Any], target: Target) -> None:
    """Put a head and what is known of it where chapter 07 looks for it."""
    head, config = trained.head, trained.head.config
    if not config.tied_output:
        raise UserError("this head has its own output matrix; train it with train_lm_head=false")
    place = shipped_place(target, config.layers)
    head.to(torch.bfloat16).save(place)
    head.to(target.dtype)
    if (size := (place / "model.safetensors").stat().st_size) > LARGEST:
        raise UserError(f"{place} takes {size:,} bytes, and {LARGEST:,} are what may ship")
    causes = {"target": target.digest, "head": config.to_dict(), **record.pop("causes")}
    write_record(place / "training.json", whole({**record, "causes": causes}))


def main(
    parts: Annotated[list[Part] | None, typer.Argument(help="Only train these parts.")] = None,
    json_to: Annotated[str, typer.Option("--json", help="File for the record; - prints it.")] = "-",
    model: Annotated[str, typer.Option(help="Target, as everywhere.")] = "smollm2-135m",
    profile: Annotated[str, typer.Option(help="Profile of the run.")] = "full",
    spec_bench: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Its questions, evenly spaced.")] = 120,
    ship_it: Annotated[bool, typer.Option("--ship", help="Keep the head in data/heads.")] = False,
    set_values: Annotated[
        list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="Override a parameter.")
    ] = None,
) -> None:
    """Train what is not trained yet, decode, and write one JSON object."""
    run = Run(RunSpec.make(model, profile, **RunSpec.parse_overrides(set_values or [])))
    asked = read_prompts(spec_bench) if spec_bench else []
    target = open_target(run, say)
    data = prepare(run, target, load_corpus(target, run, say), say)
    trained = {part: train(run, target, data, part) for part in parts or Part}
    if parts:
        return
    settings, depth = TrainingSettings.from_spec(run.spec), run.spec.depth
    record: dict[str, Any] = {
        "settings": asdict(settings),
        "draft_vocab": len(data.vocabulary),
        "heads": {
            part: {"share": SHARES[part], **record_of(found, part_of(data, SHARES[part]))}
            for part, found in trained.items()
        },
    }
    engine, best = Engine(target), trained[Part.ALL].head
    prompts = {"ours": heldout_prompts(target, run)}
    if asked:
        prompts["Spec-Bench"] = asked[:: max(1, len(asked) // questions)]
    some = [target.render(p.turns) for p in prompts["ours"][:14]]
    passes = measure_passes(engine, max(some, key=len), VERIFIED, repeats=40)
    tree = best_shape(foretell(engine, best, some, passes, 64, depth, depth, say).trees)
    drafters = {part: HeadDrafter(trained[part].head, depth) for part in Part}
    drafters |= {"tree": tree.drafter(best), "whole tree": Shape.whole_tree(depth).drafter(best)}
    record["decoding"] = {
        name: decode_all(engine, drafters, these, run) for name, these in prompts.items()
    }
    record["setting"] = {
        "model": model,
        "profile": profile,
        "overrides": run.spec.overrides,
        "depth": depth,
        "tree": vars(tree),
        "whole_tree": vars(Shape.whole_tree(depth)),
        "decode_tokens": run.spec.decode_tokens,
        "threads": torch.get_num_threads(),
    }
    write(record, json_to)
    if ship_it:
        shown = {
            place: {name: found["drafts"][name] for name in (Part.ALL, "tree")}
            for place, found in record["decoding"].items()
        }
        causes = {"settings": asdict(settings), "seed": run.spec.seed}
        ship(
            trained[Part.ALL],
            {**record["heads"][Part.ALL], "decoding": shown, "causes": causes},
            target,
        )


if __name__ == "__main__":
    typer.run(main)
