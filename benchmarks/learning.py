"""What makes a draft head better: more answers, more updates, and each choice of its training.

    python benchmarks/learning.py [--json FILE] [--model NAME] [--profile full] [PART ...]

Runs on the corpus, the states and the layers of a run whose chapters 1 to 5 are done; what the
study trains lies in that run's ``heads`` folder, so a killed study goes on where it stopped, and
parts named on the command line can be trained by several processes side by side. Without a name
everything is trained, the heads of all answers decode, and the record is written. The parts:

``default``, ``chosen``
    the run's own heads of the default rule's layers and of the chosen ones, on all answers, as the
    profile has it;
``seeds``
    heads of both on an eighth of the answers and for fewer epochs, from several seeds;
``answers``
    heads of the default rule's layers on shares of the training answers;
``choices``
    likewise on an eighth of the answers, with one choice of the training changed each time; what
    they are compared with is the default rule's first head of ``seeds``, trained once for both.

The record's ``decoding`` holds acceptance lengths in real greedy decoding on our held-out prompts
and, with ``--spec-bench question.jsonl``, on Spec-Bench's questions (first turns): the target's own
token counts, pooled over passes, 95 percent bootstrap intervals over prompts, paired for the
difference of the two heads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _record import write

from draftlayers.contenders import head_folder, planned_sets, prepare
from draftlayers.corpus import heldout_prompts, load_corpus
from draftlayers.current import digest
from draftlayers.decoding import Decoded, acceptance_length
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.examples import TrainingData, answer_rows
from draftlayers.head import DraftHead
from draftlayers.prompts import Prompt, read_prompts
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.speed import engine_methods, interval, summarise, time_methods
from draftlayers.targets import Target, open_target
from draftlayers.training import TrainedHead, TrainingSettings, train_head

SHARES = (1 / 16, 1 / 4)
BASELINE = "as the profile"
CHOICE_SHARE, CHOICE_EPOCHS, SEEDS = 1 / 8, 2.0, 3


class Part(StrEnum):
    """Groups of heads that can be trained apart."""

    DEFAULT = "default"
    CHOSEN = "chosen"
    SEEDS = "seeds"
    ANSWERS = "answers"
    CHOICES = "choices"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def part_of(data: TrainingData, share: float) -> TrainingData:
    """The same vocabulary and validation, and the first part of the training conversations."""
    return replace(data, train=data.train[: round(len(data.train) * share)])


def choices(settings: TrainingSettings) -> dict[str, TrainingSettings]:
    """Settings that differ from the profile's in one choice each, all for fewer epochs."""
    changed: dict[str, dict[str, Any]] = {
        BASELINE: {},
        "random start": {"start": "random"},
        "frozen output matrix": {"train_lm_head": not settings.train_lm_head},
        "norm for each layer": {"fc_norm": True},
        "half the learning rate": {"learning_rate": settings.learning_rate / 2},
    }
    return {
        name: replace(settings, epochs=CHOICE_EPOCHS, **values) for name, values in changed.items()
    }


def record_of(trained: TrainedHead, data: TrainingData) -> dict[str, Any]:
    """What the record keeps of a training."""
    return {
        "train_answer_tokens": int(answer_rows(data.store, data.train).sum()),
        "updates": trained.history[-1]["update"],
        **{key: trained.best[key] for key in ("update", "loss", "acceptance", "tau")},
        "history": [
            {key: r[key] for key in ("update", "tokens", "train_loss", "loss", "tau")}
            for r in trained.history
        ],
    }


def decode_all(
    engine: Engine, drafters: dict[str, HeadDrafter], prompts: list[Prompt], run: Run
) -> dict[str, Any]:
    """Acceptance lengths of the heads on prompts, overall and by kind, outputs checked."""
    spec, target = run.spec, engine.target
    rendered = [(p.kind, target.render(p.turns[:1])) for p in prompts]
    usable = [(kind, ids) for kind, ids in rendered if len(ids) <= spec.max_prompt_tokens]
    methods = engine_methods(engine, drafters, spec.max_prompt_tokens + spec.decode_tokens)
    asked = [ids for _, ids in usable]
    timings = time_methods(target, asked, methods, spec.decode_tokens, say=say)
    table = summarise(timings)
    answers = {name: [repeats[0] for repeats in timings.runs[name]] for name in drafters}
    record: dict[str, Any] = {
        "prompts": len(usable),
        "left_out_as_too_long": len(prompts) - len(usable),
        "heads": {},
    }
    for name, decoded in answers.items():
        kinds: dict[str, list[Decoded]] = {}
        for (kind, _), answer in zip(usable, decoded, strict=True):
            kinds.setdefault(kind, []).append(answer)
        record["heads"][name] = {
            "identical_to_plain": round(table[name]["identical"] * len(usable)),
            **{key: table[name][key] for key in ("tau", "tau_interval", "alpha")},
            "by_kind": {kind: acceptance_length(kinds[kind]) for kind in sorted(kinds)},
        }

    def ahead(index: torch.Tensor) -> float:
        some = {name: [decoded[i] for i in index] for name, decoded in answers.items()}
        return acceptance_length(some["chosen"]) - acceptance_length(some["default"])

    if "chosen" in answers:
        record["chosen_minus_default"] = ahead(torch.arange(len(usable)))
        record["chosen_minus_default_interval"] = interval(ahead, len(usable), spec.bootstrap)
    return record


def study(
    run: Run, target: Target, parts: list[Part]
) -> tuple[dict[str, Any], dict[str, DraftHead]]:
    """Train what is not trained yet; return the record so far and the heads of all answers."""
    corpus = load_corpus(target, run, say)
    data = prepare(run, target, corpus, say)
    settings, seed = TrainingSettings.from_spec(run.spec), run.spec.seed
    sets = planned_sets(run)

    def train(
        name: str,
        data: TrainingData,
        settings: TrainingSettings,
        folder: Path | None = None,
        layers: tuple[int, ...] = sets["default"],
        seed: int = seed,
    ) -> TrainedHead:
        place = folder or run.path("heads", f"study-{digest(name)}")
        progress: Callable[[str], None] = lambda text: say(f"{name}: {text}")  # noqa: E731
        return train_head(data, layers, target, settings, seed, place, progress)

    record: dict[str, Any] = {
        "sets": {name: list(layers) for name, layers in sets.items()},
        "settings": vars(settings),
        "draft_vocab": len(data.vocabulary),
        "whole": {},
    }
    heads = {}
    for name, layers in sets.items():
        if name in parts:
            place = head_folder(run, layers, seed)
            trained = train(f"{name}, all answers", data, settings, place, layers)
            record["whole"][name], heads[name] = record_of(trained, data), trained.head
    if Part.SEEDS in parts:
        part, fewer = part_of(data, CHOICE_SHARE), replace(settings, epochs=CHOICE_EPOCHS)
        record["seeds"] = {
            name: [
                record_of(train(f"{name}, seed {s}", part, fewer, None, layers, s), part)
                for s in range(seed, seed + SEEDS)
            ]
            for name, layers in sets.items()
        }
    if Part.ANSWERS in parts:
        parts_of_data = {share: part_of(data, share) for share in SHARES}
        record["answers"] = [
            {"share": share, **record_of(train(f"share {share:g}", part, settings), part)}
            for share, part in parts_of_data.items()
        ]
    if Part.CHOICES in parts:
        part = part_of(data, CHOICE_SHARE)
        names = {name: name for name in choices(settings)} | {BASELINE: f"default, seed {seed}"}
        record["choices"] = {
            name: record_of(train(names[name], part, changed), part)
            for name, changed in choices(settings).items()
        }
    return record, heads


def main(
    parts: Annotated[list[Part] | None, typer.Argument(help="Only train these parts.")] = None,
    json_to: Annotated[str, typer.Option("--json", help="File for the record; - prints it.")] = "-",
    model: Annotated[str, typer.Option(help="Target, as everywhere.")] = "smollm2-135m",
    profile: Annotated[str, typer.Option(help="Profile of the run.")] = "full",
    spec_bench: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Its questions, evenly spaced.")] = 120,
    set_values: Annotated[
        list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="Override a parameter.")
    ] = None,
) -> None:
    """Run the study and write one JSON object."""
    run = Run(RunSpec.make(model, profile, **RunSpec.parse_overrides(set_values or [])))
    run.results("05-selection")
    asked = read_prompts(spec_bench) if spec_bench else []
    target = open_target(run, say)
    record, heads = study(run, target, parts or list(Part))
    if parts:
        return
    engine = Engine(target)
    drafters = {name: HeadDrafter(head, run.spec.depth) for name, head in heads.items()}
    prompts = {"ours": heldout_prompts(target, run)}
    if asked:
        prompts["Spec-Bench"] = asked[:: max(1, len(asked) // questions)]
    record["decoding"] = {
        name: decode_all(engine, drafters, some, run) for name, some in prompts.items()
    }
    record["setting"] = {
        "model": model,
        "profile": profile,
        "overrides": run.spec.overrides,
        "depth": run.spec.depth,
        "decode_tokens": run.spec.decode_tokens,
    }
    write(record, json_to)


if __name__ == "__main__":
    typer.run(main)
