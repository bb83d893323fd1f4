"""What makes a draft head better: more answers, more updates, and each choice of its training.

    python benchmarks/learning.py [--json FILE] [--model NAME] [--profile full] [PART ...]

Runs on the corpus, the states and the layers of a run whose chapters 1 to 5 are done; what the
study trains lies in that run's ``heads`` folder, so a killed study goes on where it stopped, and
parts named on the command line can be trained by several processes side by side. Without a name
everything is trained, the head of all answers decodes, and the record is written. The parts are
heads that read the default rule's layers:

``whole``
    the run's own, on all answers, as the profile has it;
``answers``
    on shares of the training answers;
``choices``
    on an eighth of the answers and for fewer epochs, with one choice changed each time.

The record's ``decoding`` holds acceptance lengths in real greedy decoding on our held-out prompts
and, with ``--spec-bench question.jsonl``, on Spec-Bench's questions (first turns): the target's own
token counts, pooled over passes, 95 percent bootstrap intervals over prompts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from _record import write

from draftlayers.corpus import Prompt, balanced, load_corpus, read_prompts
from draftlayers.decoding import Decoded, HeadDrafter, acceptance_length, acceptance_rates, decode
from draftlayers.engine import Engine
from draftlayers.head import DraftHead
from draftlayers.spec import (
    DATA,
    Run,
    RunSpec,
    UserError,
    fingerprint,
)
from draftlayers.speed import decoded_tokens, interval
from draftlayers.targets import Target, load_target
from draftlayers.training import (
    TrainedHead,
    TrainingData,
    TrainingSettings,
    head_folder,
    planned_sets,
    prepare,
    train_head,
)

SHARES = (1 / 16, 1 / 4)
CHOICE_SHARE, CHOICE_EPOCHS = 1 / 8, 2.0
Part = Literal["whole", "answers", "choices"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def part_of(data: TrainingData, share: float) -> TrainingData:
    """The same vocabulary and validation, and the first part of the training conversations."""
    return replace(data, train=data.train[: round(len(data.train) * share)])


def choices(
    data: TrainingData, settings: TrainingSettings
) -> dict[str, tuple[TrainingData, TrainingSettings]]:
    """Data and settings of the heads that differ in one choice each."""
    plain = replace(settings, epochs=CHOICE_EPOCHS)
    part = part_of(data, CHOICE_SHARE)
    changed: dict[str, dict[str, Any]] = {
        "as the profile": {},
        "random start": {"start": "random"},
        "frozen output matrix": {"train_lm_head": not settings.train_lm_head},
        "norm for each layer": {"fc_norm": True},
        "half the learning rate": {"learning_rate": settings.learning_rate / 2},
    }
    return {name: (part, replace(plain, **values)) for name, values in changed.items()}


def answer_tokens(data: TrainingData) -> int:
    rows = data.store.meta["answer"] & torch.isin(data.store.meta["sequence"], data.train)
    return int(rows.sum())


def record_of(trained: TrainedHead, data: TrainingData) -> dict[str, Any]:
    """What the record keeps of a training."""
    return {
        "train_answer_tokens": answer_tokens(data),
        "updates": trained.history[-1]["update"],
        **{key: trained.best[key] for key in ("update", "loss", "acceptance", "tau")},
        "history": [
            {key: r[key] for key in ("update", "tokens", "train_loss", "loss", "tau")}
            for r in trained.history
        ],
    }


def decode_all(
    engine: Engine, drafter: HeadDrafter, prompts: list[Prompt], run: Run, name: str
) -> dict[str, Any]:
    """Acceptance length on prompts, overall and by kind, outputs checked."""
    spec, target = run.spec, engine.target
    rendered = [(p, target.render(p.turns[:1])) for p in prompts]
    usable = [(p, ids) for p, ids in rendered if len(ids) <= spec.max_prompt_tokens]
    runs: list[Decoded] = []
    identical = 0
    for i, (_, ids) in enumerate(usable):
        plain = decode(engine, ids, spec.decode_tokens)
        runs.append(decode(engine, ids, spec.decode_tokens, drafter))
        identical += runs[-1].tokens == plain.tokens
        if (i + 1) % 20 == 0:
            say(f"{name}: decoded {i + 1} of {len(usable)} prompts")

    tokens = decoded_tokens([[r] for r in runs])
    passes = torch.tensor([float(r.passes) for r in runs])

    def tau(index: torch.Tensor) -> float:
        return (tokens[index].sum() / passes[index].sum().clamp(min=1)).item()

    return {
        "prompts": len(usable),
        "left_out_as_too_long": len(prompts) - len(usable),
        "identical_to_plain": identical,
        "tau": acceptance_length(runs),
        "tau_interval": interval(tau, len(runs), 1000),
        "alpha": acceptance_rates(runs),
        "by_kind": {
            kind: acceptance_length(
                [r for r, (p, _) in zip(runs, usable, strict=True) if p.kind == kind]
            )
            for kind in sorted({p.kind for p, _ in usable})
        },
    }


def study(run: Run, target: Target, parts: list[Part]) -> tuple[dict[str, Any], DraftHead | None]:
    """Train what is not trained yet; return the record so far and the head of all answers."""
    corpus = load_corpus(target, run, say)
    data = prepare(run, target, corpus, say)
    settings, seed = TrainingSettings.from_spec(run.spec), run.spec.seed
    layers = planned_sets(run)["default"]

    def train(
        name: str, data: TrainingData, settings: TrainingSettings, folder: Path | None = None
    ) -> TrainedHead:
        place = folder or run.path("heads", f"study-{fingerprint(name)}")
        progress: Callable[[str], None] = lambda text: say(f"{name}: {text}")  # noqa: E731
        return train_head(data, layers, target, settings, seed, place, progress)

    record: dict[str, Any] = {
        "layers": list(layers),
        "settings": vars(settings),
        "draft_vocab": len(data.vocabulary),
    }
    head = None
    if "whole" in parts:
        trained = train("all answers", data, settings, head_folder(run, layers, seed))
        record["whole"], head = record_of(trained, data), trained.head
    if "answers" in parts:
        record["answers"] = [
            {
                "share": share,
                **record_of(train(f"share {share:g}", part_of(data, share), settings),
                            part_of(data, share)),
            }
            for share in SHARES
        ]  # fmt: skip
    if "choices" in parts:
        record["choices"] = {
            name: record_of(train(name, part, changed), part)
            for name, (part, changed) in choices(data, settings).items()
        }
    return record, head


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Only train these parts.")] = None,
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
    known = ("whole", "answers", "choices")
    if unknown := sorted(set(parts or []) - set(known)):
        raise UserError(f"unknown part {', '.join(unknown)}; the parts are {', '.join(known)}")
    run = Run(RunSpec.make(model, profile, **RunSpec.parse_overrides(set_values or [])))
    run.results("05-selection")
    asked = read_prompts(spec_bench) if spec_bench else []
    target = load_target(model, say=say)
    record, head = study(run, target, parts or list(known))
    if parts:
        return
    engine, drafter = Engine(target), HeadDrafter(head, run.spec.depth)
    held_out = balanced(read_prompts(DATA / "prompts" / "heldout.jsonl"))
    prompts = {"ours": held_out[: run.spec.heldout_prompts]}
    if asked:
        prompts["Spec-Bench"] = asked[:: max(1, len(asked) // questions)]
    record["decoding"] = {
        name: decode_all(engine, drafter, some, run, name) for name, some in prompts.items()
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
