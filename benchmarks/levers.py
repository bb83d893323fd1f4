"""What each choice of a head's training is worth: one changed at a time, on one budget.

    python benchmarks/levers.py [--json FILE] [--model NAME] [--seeds 2] [LEVER ...]

A head of the default rule's layers is trained for one pass over the same answers with each of
``LEVERS``, from several seeds, and judged on the same validation answers. The ``base`` has one
layer, AdamW, and an output matrix of its own that learns. The answers are those
that the target wrote to questions of its own (``draftlayers answer``). Everything lies in the
folder of the run that ``-p`` describes, so a killed study goes on where it stopped, and levers
named on the command line can be trained by several processes side by side. Without a name
everything is trained and the record is written.

A lever's ``tau`` has one number for each seed, ``gain`` the differences to ``base``, seed
by seed, ``acceptance`` the share of first guesses that are accepted, and ``relative_seconds`` what
training took, as a share of what it took without the lever.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import typer
from _record import write

from draftlayers.corpus import load_corpus
from draftlayers.current import digest
from draftlayers.examples import TOP, TrainingData, answer_rows
from draftlayers.prompts import Conversation, Corpus
from draftlayers.runs import Run
from draftlayers.selection import default_rule
from draftlayers.spec import RunSpec
from draftlayers.states import collect
from draftlayers.targets import Target, open_target
from draftlayers.training import TrainedHead, TrainingSettings, train_head
from draftlayers.writing import fast_twin

BASELINE = "base"


@dataclass(frozen=True)
class Lever:
    """One choice: settings that differ from the profile's, or other rows to learn from."""

    settings: dict[str, Any] = field(default_factory=dict)
    questions: bool = False


LEVERS = {
    BASELINE: Lever(),
    "a second layer": Lever({"head_layers": 2}),
    "Muon": Lever({"optimizer": "muon"}),
    "larger batches": Lever({"batch_tokens": 512}),
    "Muon, larger batches": Lever({"optimizer": "muon", "batch_tokens": 512}),
    "sharper targets": Lever({"sharpen": 1 / 0.6}),
    "norms before and behind": Lever({"fc_norm": True, "norm_output": True}),
    "noise": Lever({"noise": 0.05}),
    "weight decay": Lever({"weight_decay": 0.1}),
    "the target's output matrix": Lever({"train_lm_head": False}),
    "questions are learned, too": Lever(questions=True),
}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def whole(conversation: Conversation) -> Conversation:
    """A conversation all of which counts as answer, but for its first token."""
    first, *others = conversation.tokens
    return replace(conversation, prompt_ids=(first,), answer_ids=tuple(others))


def training_data(run: Run, target: Target, corpus: Corpus, questions: bool) -> TrainingData:
    """States and distributions at the default rule's layers, and at all positions if wanted."""
    train = [whole(c) if questions else c for c in corpus.train]
    boundaries = [*default_rule(target.n_layers), target.n_layers]
    folder = run.path("states")
    with run.hold():
        store = collect(
            fast_twin(target), [*train, *corpus.validation], boundaries, folder,
            predict="answer", top=TOP, say=say,
        )  # fmt: skip
    return TrainingData.split(store, len(corpus.validation), run.spec.draft_vocab)


def record_of(trained: list[TrainedHead], base: list[TrainedHead]) -> dict[str, Any]:
    """What the record keeps of one lever's heads, one for each seed."""
    tau = [t.best["tau"] for t in trained]
    seconds = [t.seconds / b.seconds for t, b in zip(trained, base, strict=True)]
    return {
        "tau": tau,
        "gain": [t - b.best["tau"] for t, b in zip(tau, base, strict=True)],
        "acceptance": [t.best["acceptance"][0] for t in trained],
        "loss": [t.best["loss"] for t in trained],
        "updates": trained[0].history[-1]["update"],
        "parameters": sum(p.numel() for p in trained[0].head.parameters()),
        "relative_seconds": sum(seconds) / len(seconds),
    }


def main(
    levers: Annotated[list[str] | None, typer.Argument(help="Only train these.")] = None,
    json_to: Annotated[str, typer.Option("--json", help="File for the record; - prints it.")] = "-",
    model: Annotated[str, typer.Option(help="Target, as everywhere.")] = "smollm2-135m",
    profile: Annotated[str, typer.Option(help="Profile of the run.")] = "full",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each.")] = 2,
    set_values: Annotated[
        list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="Override a parameter.")
    ] = None,
) -> None:
    """Train what is not trained yet, and write one JSON object."""
    if unknown := sorted(set(levers or ()) - LEVERS.keys()):
        raise typer.BadParameter(f"no lever {unknown}; there are {', '.join(LEVERS)}")
    values = RunSpec.parse_overrides(set_values or [])
    run = Run(RunSpec.make(model, profile, **{"head_epochs": 1.0, **values}))
    target = open_target(run, say)
    corpus = load_corpus(target, run, say)
    plain = replace(TrainingSettings.from_spec(run.spec), train_lm_head=True)
    data = {False: training_data(run, target, corpus, questions=False)}
    heads: dict[str, list[TrainedHead]] = {name: [] for name in LEVERS}
    for seed in range(run.spec.seed, run.spec.seed + seeds):
        for name, lever in LEVERS.items():
            if levers and name not in levers:
                continue
            if lever.questions not in data:  # what can be guessed stays the same
                more = training_data(run, target, corpus, questions=True)
                data[True] = replace(more, vocabulary=data[False].vocabulary)
            some = data[lever.questions]
            place = run.path("heads", f"lever-{digest(name)[:8]}-s{seed}")
            settings = replace(plain, **lever.settings)
            layers = default_rule(target.n_layers)
            label = f"{name}, seed {seed}"
            trained = train_head(
                some, layers, target, settings, seed, place,
                lambda text, label=label: say(f"{label}: {text}"),
            )  # fmt: skip
            heads[name].append(trained)
    if levers:
        return
    kinds = [c.id.split("-")[0] for c in corpus.train]
    write(
        {
            "levers": {name: record_of(found, heads[BASELINE]) for name, found in heads.items()},
            "setting": {
                "model": model,
                "layers": list(default_rule(target.n_layers)),
                "train_conversations": len(corpus.train),
                "asked_by_the_target": kinds.count("asked"),
                "train_answer_tokens": int(answer_rows(data[False].store, data[False].train).sum()),
                "validation_conversations": len(corpus.validation),
                "validation_answer_tokens": sum(len(c.answer_ids) for c in corpus.validation),
                "epochs": plain.epochs,
                "batch_tokens": plain.batch_tokens,
                "ttt_steps": plain.ttt_steps,
                "draft_vocab": len(data[False].vocabulary),
                "seeds": seeds,
                "threads": torch.get_num_threads(),
            },
        },
        json_to,
    )


if __name__ == "__main__":
    typer.run(main)
