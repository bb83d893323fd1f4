"""The command line: ``draftlayers models | answer | select | run | book | bench``.

Every command checks what it was asked before it starts work, reports progress, and ends a mistake
with a sentence instead of a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftlayers.project import PROJECT, UserError
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS, Profile, RunSpec
from draftlayers.weights import TINY, known_models

app = typer.Typer(
    help="Choose the layers that an EAGLE-3 draft head reads, and measure the choice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
say_to = Console(stderr=True, highlight=False)

Model = Annotated[
    str,
    typer.Option(help="Target: a listed name, a hub id (org/name), a folder or a .gguf file."),
]
ProfileOption = Annotated[Profile, typer.Option(help="How much work to do.")]
Parameters = Annotated[
    list[str],
    typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Replace one parameter."),
]
Runs = Annotated[
    Path | None, typer.Option(help="Folder of all runs; default runs/ in the project.")
]
Cores = Annotated[int | None, typer.Option(min=1, help="CPU cores to use; default all.")]


class Terminated(KeyboardInterrupt):
    """A scheduler asked the command to end."""


def _explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print a ``UserError`` as a sentence, and exit with 2; let SIGTERM end it like Ctrl-C."""

    def terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGTERM, terminated)
        try:
            return command(*args, **kwargs)
        except UserError as err:
            say_to.print(Text.assemble(("error: ", "bold red"), str(err)), soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as end:
            say_to.print("stopped; what is finished is kept, and the same command goes on from it")
            raise typer.Exit(143 if isinstance(end, Terminated) else 130) from None

    return wrapped


def _open(model: str, profile: str, parameters: list[str], runs: Path | None) -> Run:
    """The run that was asked for. Nothing is written yet."""
    return Run(RunSpec.make(model, profile, **RunSpec.parse_overrides(parameters)), runs)


def _check(run: Run, *abilities: str) -> None:
    """Refuse, before work starts, a target that cannot do what the run's chapters need."""
    from draftlayers.capabilities import check
    from draftlayers.prompts import read_prompts
    from draftlayers.selection import check_candidates

    if own := run.parameter("prompts"):
        read_prompts(own)
    model = run.parameter("model")
    with say_to.status(f"looking at {model}"):
        target = check(model, run.parameter("trust_remote_code"), say_to.print)
    target.require(*abilities)
    target.require_room(run.parameter("max_prompt_tokens"), run.parameter("answer_tokens"))
    if "select" in abilities:
        check_candidates(target.n_layers, run.parameter("k"))
    for note in target.notes:
        say_to.print(f"[yellow]note:[/] {escape(note)}")


@app.command()
@_explained
def models(
    check: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Say what a model can be used for.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with it.")] = False,
) -> None:
    """List the targets known by name, or check what can be done with one."""
    if check is not None:
        from draftlayers import capabilities

        table = Table("", "", "why", title=escape(check))
        for row in capabilities.check(check, trust_remote_code, say_to.print).rows():
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    table = Table("name", "model", "licence of the weights", "about")
    for name, entry in known_models().items():
        table.add_row(name, entry["title"], entry["licence"], entry["about"])
    table.add_row(TINY, "random weights", "Apache-2.0", "built in memory, for tests")
    Console().print(table)
    say_to.print(
        "Any folder, .gguf file or Hugging Face id of a causal language model will do too."
    )


@app.command()
@_explained
def run(
    model: Model = "smollm2-135m",
    profile: ProfileOption = "quick",
    parameter: Parameters = [],  # noqa: B006 - Typer reads the default, nobody changes it
    upto: Annotated[str, typer.Option(help="Last chapter to run.")] = CHAPTERS[-1],
    runs: Runs = None,
    cores: Cores = None,
) -> None:
    """Execute the chapters of a run that are not up to date."""
    from draftlayers.chapters import up_to_date
    from draftlayers.jobs import run_chapters

    matching = [chapter for chapter in CHAPTERS if chapter.startswith(upto)]
    if len(matching) != 1:
        raise UserError(f"unknown chapter {upto!r}; the chapters are {', '.join(CHAPTERS)}")
    started = time.monotonic()
    this = _open(model, profile, parameter, runs)
    if not up_to_date(this, matching[0]):
        later = ("train", "decode") if matching[0] > CHAPTERS[4] else ()
        _check(this, "select", *later)
    run_chapters(this, matching[0], cores)
    say_to.print(f"finished in {time.monotonic() - started:.0f} s: {this.folder}")


@app.command()
@_explained
def book(
    model: Model = "smollm2-135m",
    profile: ProfileOption = "quick",
    parameter: Parameters = [],  # noqa: B006
    runs: Runs = None,
    cores: Cores = None,
) -> None:
    """Run what is not up to date, then build the book of the run."""
    try:
        from draftlayers.booksite.stage import build_site
    except ImportError as err:
        raise UserError(
            f"the book needs more packages ({err.name} is missing); install them with: "
            "pip install -e '.[book]'"
        ) from None
    from draftlayers.chapters import up_to_date
    from draftlayers.jobs import run_chapters

    started = time.monotonic()
    this = _open(model, profile, parameter, runs)
    if not up_to_date(this):
        _check(this, "select", "train", "decode")
    run_chapters(this, cores=cores)
    with say_to.status("building the book"):
        first = build_site(this)
    say_to.print(f"finished in {time.monotonic() - started:.0f} s; the book's first page is")
    print(first)


@app.command()
@_explained
def answer(
    model: Model = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens to have in the end.")] = 200_000,
    apart: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Prompts that no question may come near."),
    ] = [],  # noqa: B006
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="OpenAI-compatible server of the target, which writes."),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What the server calls the target; default its first model.")
    ] = None,
    parameter: Parameters = [],  # noqa: B006
    runs: Runs = None,
) -> None:
    """Let a target ask itself and answer: more for its heads to learn from, and no data needed."""
    from draftlayers.asking import REASONS
    from draftlayers.corpus import enlarge, own_corpus
    from draftlayers.prompts import read_prompts
    from draftlayers.served import Served
    from draftlayers.targets import open_target

    this = _open(model, "full", parameter, runs)
    others = [prompt for path in apart for prompt in read_prompts(path)]
    _check(this, "write")

    def say(text: str) -> None:
        say_to.print(f"[dim]{time.monotonic() - started:6.0f} s  {text}[/]")

    started = time.monotonic()
    with this.hold():
        target = open_target(this, say)
        writer = Served(target, server, served_name) if server else None
        asked, answers = enlarge(target, this, tokens, others, say, writer)
    table = Table("questions", "", "")
    table.add_row(f"{asked.written:,}", "written", "")
    for name, count in asked.left_out.items():
        table.add_row(f"{count:,}", name, REASONS[name])
    table.add_row(f"{len(asked.prompts):,}", "kept", "")
    console = Console(highlight=False)
    console.print(table)
    total = sum(len(one.tokens) for one in answers)
    console.print(f"{len(answers):,} answers, {total:,} tokens, in {own_corpus(this)[0].parent}",
                  soft_wrap=True)  # fmt: skip


@app.command()
@_explained
def select(
    model: Annotated[str, typer.Argument(help="Target, as in --model.")],
    k: Annotated[int, typer.Option("-k", min=1, max=8, help="Layers to choose.")] = 3,
    tokens: Annotated[int, typer.Option(min=64, help="Positions to look at.")] = 8000,
    parameter: Parameters = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    runs: Runs = None,
) -> None:
    """Choose the layers for a draft head: chapters 1 to 5 as one command."""
    from draftlayers.criterion import criterion, summary
    from draftlayers.figures import selection as figures
    from draftlayers.figures.drawing import draw
    from draftlayers.selection import diversity, some_sets
    from draftlayers.targets import open_target

    # Nothing is trained, so no more answers are needed than hold so many positions.
    few = [f"train_conversations={max(24, tokens // 64)}", "validation_conversations=1"]
    pairs = [f"k={k}", f"stat_tokens={tokens}", *few, *parameter]
    this = _open(model, "quick", pairs, runs)
    _check(this, "select")

    def say(text: str) -> None:
        say_to.print(f"[dim]{text}[/]")

    with this.hold():
        target = open_target(this, say)
        found, choice = criterion(this, target, say)
        result = summary(this, target, found, choice)
        sets = some_sets(target.n_layers, this.spec.k, seed=this.spec.seed)
        marked = (choice.found, choice.rules["default"], choice.rules["greedy_threshold"])
        draw(
            this,
            "select",
            figures.entropy_cka_plane,
            choice.aggregate(sets),
            diversity(sets, choice.level.matrix),
            {chosen.method: choice.place(chosen.layers) for chosen in marked},
            [choice.rules["default"].score, choice.found.score],
        )
        result["picture"] = str(this.path("figures", "select.png"))
    if as_json:
        print(json.dumps(result))
        return
    table = Table("rule", "boundaries", "score", "rank")
    for row in result["sets"]:
        rank = f"{row['rank']:,} of {row['of']:,}"
        table.add_row(row["name"], str(row["layers"]), f"{row['score']:.4f}", rank)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{result['reason']}; {result['rows']:,} positions kept", soft_wrap=True)
    same = result["same_choice_in_bootstrap"]
    console.print(f"the bootstrap over conversations makes the same choice in {same:.0%}")
    console.print(f"chosen: [bold]{result['chosen']}[/] ({result['convention']})", soft_wrap=True)
    console.print(f"picture: {result['picture']}", soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_explained
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark.")],
) -> None:
    """Run a benchmark of benchmarks/; further arguments are passed on."""
    scripts = {path.stem: path for path in sorted((PROJECT / "benchmarks").glob("[a-z]*.py"))}
    if name not in scripts:
        raise UserError(f"unknown benchmark {name!r}; there are {', '.join(scripts)}")
    done = subprocess.run([sys.executable, str(scripts[name]), *context.args], env=os.environ)
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    app()
