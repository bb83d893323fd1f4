"""What is left when work is killed: everything, and nothing else.

    python benchmarks/faults.py [--json FILE] [--kills 30] [--stages answers ...]

Each stage is killed with SIGKILL at random moments, spread evenly over the time it takes when
nobody disturbs it, and goes on in the same folder, often to be killed again before it may come to
its end. Then everything in its folder is compared with what an undisturbed run leaves: tensors and
numbers bit for bit, apart from times and what they decide (``without``, ``TIMED``). The stages:

``answers``
    the tiny target answers prompts (``answers.answer_prompts``);
``collection``
    its hidden states are collected (``states.collect``), boundaries being added by a second pass;
``training``
    a head is trained (``training.train_head``), with checkpoints a few updates apart;
``chapter``
    ``draftlayers run --upto 01`` in the smoke profile, killed with every process below it;
``book``
    ``draftlayers book`` likewise, all chapters and the site (``--book-kills`` for fewer kills).

The first three run in children forked from one process that has imported everything. They are also
killed at the moments that matter most: at each file they put in place, when half of it is written,
and right after it is in place.

A stage's record holds its ``moments`` (seconds since the last start, and share of the undisturbed
time; those of one ``trial`` follow each other in one folder), its ``differences``, and
``leftovers``: files that an undisturbed run does not leave. These last two must be empty: the
command exits with 1 if their number in all stages, ``wrong``, is not 0. ``outside`` counts files
that kills leave in the folder for temporary files, which the system empties. A record that is
already in the file keeps its other stages.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from _record import write
from safetensors import safe_open

from draftlayers import answers, current, states, training
from draftlayers.answers import answer_prompts, load_answers, own_causes
from draftlayers.corpus import pair
from draftlayers.device import device_name
from draftlayers.examples import TOP, TrainingData
from draftlayers.project import PROJECT, code_state
from draftlayers.prompts import TRAIN, Conversation, read_prompts
from draftlayers.states import collect
from draftlayers.targets import Target, tiny_target
from draftlayers.training import TrainingSettings, train_head

IN_A_ROW = 6  # kills of one trial, at most
LAYERS = (2, 4, 5)
LONGEST_PROMPT, LONGEST_ANSWER = 480, 16


class StageName(StrEnum):
    """What can be killed."""

    ANSWERS = "answers"
    COLLECTION = "collection"
    TRAINING = "training"
    CHAPTER = "chapter"
    BOOK = "book"


@dataclass(frozen=True)
class Stage:
    """Work that leaves files in a folder.

    Attributes
    ----------
    work
        Does it, in a process of its own, which it may replace by a command.
    inside
        Whether that process does everything itself.
    """

    work: Callable[[Path], None]
    inside: bool


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


# --- The stages ----------------------------------------------------------------------------------


def frozen_project(copy: Path) -> None:
    """Let all work use a copy of the project: it is made again when its code is edited."""
    for name in ("src", "data", "notebooks", "book"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Snakefile", "_config.yml"):
        shutil.copy(PROJECT / name, copy)
    current.SOURCE = copy / "src" / "draftlayers"
    os.environ["PYTHONPATH"] = str(copy / "src")


def small_stages(scratch: Path) -> dict[StageName, Stage]:
    """The stages that are functions of the package, with what they start from already made."""
    torch.set_num_threads(1)  # a process with more cannot be forked
    answers.GROUP, states.SHARD, states.BATCH = 8, 8, 256
    training.CHECKPOINT_SECONDS = 0.05
    target = tiny_target()
    prompts = read_prompts(TRAIN)[:48]

    def answer(folder: Path) -> None:
        path = folder / "answers.safetensors"
        answer_prompts(target, prompts, LONGEST_ANSWER, LONGEST_PROMPT, path)

    answer(scratch)
    written = load_answers(scratch / "answers.safetensors", own_causes(target))
    conversations = pair(target, prompts, written, LONGEST_PROMPT, LONGEST_ANSWER)

    def collect_twice(folder: Path) -> None:
        for boundaries in ([1, 4], [1, 2, 4, 8]):
            collect(target, conversations, boundaries, folder, predict="answer", top=TOP)

    train = trainer(target, conversations[:36], scratch)
    return {
        StageName.ANSWERS: Stage(answer, True),
        StageName.COLLECTION: Stage(collect_twice, True),
        StageName.TRAINING: Stage(train, True),
    }


def trainer(
    target: Target, conversations: list[Conversation], scratch: Path
) -> Callable[[Path], None]:
    """Training of one head, long enough for some checkpoints and validations."""
    boundaries = [*LAYERS, target.n_layers]
    store = collect(target, conversations, boundaries, scratch, predict="answer", top=TOP)
    data = TrainingData.split(store, validation=6, draft_vocab=120)
    settings = TrainingSettings(epochs=2.0, batch_tokens=40, learning_rate=2e-3, ttt_steps=2)

    def work(folder: Path) -> None:
        train_head(data, LAYERS, target, settings, 0, folder)

    return work


def command(*words: str) -> Stage:
    """A stage that is a command of the command line, on the tiny target in the smoke profile."""

    def work(folder: Path) -> None:
        # Whatever the command leaves outside its folder of runs is seen beside it.
        outside = folder.with_name(f"{folder.name}-outside")
        outside.mkdir(exist_ok=True)
        settings = {"TMPDIR": str(outside), "JUPYTER_RUNTIME_DIR": str(outside / "jupyter")}
        line = [sys.executable, "-m", "draftlayers.cli", *words]
        # One core, which on a machine that does other work, too, is faster than two.
        line += ["--model", "tiny", "--profile", "smoke", "--runs", str(folder), "--cores", "1"]
        os.execve(sys.executable, line, {**os.environ, **settings, "HF_HUB_OFFLINE": "1"})

    return Stage(work, False)


# --- Starting and killing ------------------------------------------------------------------------


def start(work: Callable[[Path], None], folder: Path) -> int:
    """Begin work in a child, whose output goes to a file beside the folder, and return its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(f"{folder}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_all(pid: int) -> None:
    """Kill a process and everything below it, so that none can start another meanwhile."""
    found = [psutil.Process(pid)]
    for process in found:  # grows while it is walked
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            found += process.children()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def said_in(folder: Path) -> str:
    """The last of what was said by work in a folder."""
    said = Path(f"{folder}.log").read_text(encoding="utf-8", errors="replace")
    return f"{folder}\n{said[-3000:]}"


def finish(work: Callable[[Path], None], folder: Path) -> float:
    """Let work come to its end, and return how long it took."""
    started = time.monotonic()
    _, status = os.waitpid(start(work, folder), 0)
    if status:
        raise SystemExit(f"work does not come to its end: {said_in(folder)}")
    return time.monotonic() - started


def killed_after(seconds: float, work: Callable[[Path], None], folder: Path) -> bool:
    """Begin work, or go on with it, and kill it; False when it was faster."""
    pid = start(work, folder)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return False
        time.sleep(min(left, 0.02))
    kill_all(pid)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def dying(work: Callable[[Path], None], number: int, when: str) -> Callable[[Path], None]:
    """Work that kills itself around putting its ``number``-th file in place."""

    def until_then(folder: Path) -> None:
        replace, done = os.replace, 0

        def replace_and_die(source: Any, place: Any) -> None:
            nonlocal done
            done += 1
            if done == number and when == "half written":
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, place)
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_and_die
        work(folder)

    return until_then


# --- Comparing -----------------------------------------------------------------------------------

# Keys that hold times and dates, in any JSON, at any depth; and what chapter 7 computes from times.
TIMES = ("seconds", "date")
SPEEDS = (
    "speed", "speed_interval", "speedup", "speedup_low", "speedup_high", "speedup_interval",
    "speedup_with_prompt", "tokens_per_second", "pass_ms", "verify_over_decode", "terms", "depths",
    "roofline", "prediction_error", "best", "best_draft",
    "sweep",  # shapes of draft for the head that was fastest, one of them cut by measured costs
)  # fmt: skip
# Files that show such times: they must be there.
TIMED = re.compile(r"executed/0[67]-|figures/07-|site/(?!html/notebooks/0[1-5])")
RUN_TIME = re.compile(r"run time <strong>[^<]*</strong>")  # of a page, in a line about its run
# Notes of one command about its jobs, by which no other decides anything (one that finds all of its
# work done writes none), and pictures of the site, which are named by what they show.
IGNORED = re.compile(r"\.snakemake/|\.jobs/|site/html/_images/")


def without(keys: tuple[str, ...], value: Any) -> Any:
    """What JSON holds, without some keys, and without what follows from times.

    A notebook that shows times has no fixed size, and results that hold them no fixed digest.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in keys and not k.endswith(".ipynb")}
        return {k: without(keys, item) for k, item in kept.items() if k != "06-draft-head"}
    return [without(keys, item) for item in value] if isinstance(value, list) else value


def content(path: Path) -> Any:
    """A file as it is compared; of a notebook, cells and outputs."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [(cell["source"], cell.get("outputs")) for cell in cells]
    if path.suffix == ".json":
        keys = TIMES + SPEEDS if path.name == "07-speedup.json" else TIMES
        return without(keys, json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        bits = {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
        return metadata, bits, {n: (str(t.dtype), t.shape) for n, t in tensors.items()}
    if path.suffix == ".html":
        return RUN_TIME.sub("", path.read_text(encoding="utf-8"))
    return path.read_bytes()


def files_in(folder: Path) -> dict[str, Path]:
    """Files below a folder, or below the run in it, by name."""
    run = folder / "tiny" / "smoke"
    base = run if run.is_dir() else folder
    found = {p.relative_to(base).as_posix(): p for p in base.rglob("*") if p.is_file()}
    return {name: path for name, path in found.items() if not IGNORED.match(name)}


def compare(folder: Path, whole: Path) -> tuple[list[str], list[str]]:
    """Names of the files that differ or are missing, and of those that are too many."""
    here, there = files_in(folder), files_in(whole)
    different = [
        name
        for name, path in there.items()
        if name not in here or not (TIMED.match(name) or content(here[name]) == content(path))
    ]
    return different, [name for name in here if name not in there]


# --- Trials --------------------------------------------------------------------------------------


class Report:
    """What was found in one stage."""

    def __init__(self, stage: Stage, root: Path):
        self.stage, self.root = stage, root
        self.whole = self.new("whole")
        self.seconds = finish(stage.work, self.whole)
        self.moments: list[dict[str, Any]] = []
        self.differences: list[str] = []
        self.leftovers: list[str] = []
        self.outside = 0

    def new(self, name: str) -> Path:
        """A fresh folder."""
        folder = self.root / name
        folder.mkdir(parents=True)
        return folder

    def check(self, folder: Path) -> None:
        """Finish what was killed, compare it, and throw it away."""
        finish(self.stage.work, folder)
        different, left = compare(folder, self.whole)
        self.differences += [f"{folder.name}: {name}" for name in different]
        self.leftovers += [f"{folder.name}: {name}" for name in left]
        self.outside += len(files_in(folder.with_name(f"{folder.name}-outside")))
        if not different:
            shutil.rmtree(folder)

    def kill_at_random(self, kills: int, chance: random.Random) -> None:
        """Kill the stage so often, several times in a folder, and finish it in between."""
        trial = 0
        while len(self.moments) < kills:
            trial += 1
            folder = self.new(f"trial-{trial}")
            in_a_row = min(chance.randint(1, IN_A_ROW), kills - len(self.moments))
            for _ in range(in_a_row):
                # Together they reach, on average, the same share of all that there is to do.
                share = chance.random() * 2 / (in_a_row + 1)
                seconds = share * self.seconds
                if not killed_after(seconds, self.stage.work, folder):
                    break  # what was left to do took less time than that
                moment = {"seconds": round(seconds, 3), "share": round(share, 3), "trial": trial}
                self.moments.append(moment)
            self.check(folder)

    def kill_at_files(self, most: int) -> int:
        """Kill the stage around each of the files it puts in place; return how many there were."""
        for number in range(1, most + 1):
            for when in ("half written", "in place"):
                folder = self.new(f"file-{number}-{when.replace(' ', '-')}")
                pid = start(dying(self.stage.work, number, when), folder)
                _, status = os.waitpid(pid, 0)
                if status == 0:
                    return number - 1  # there are no more files
                if not os.WIFSIGNALED(status):
                    raise SystemExit(f"work failed by itself: {said_in(folder)}")
                self.check(folder)
        return most


def main(
    stages: Annotated[list[StageName] | None, typer.Option(help="Only these; default all.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Kills at random moments of a stage.")] = 30,
    book_kills: Annotated[int | None, typer.Option(min=1, help="The same of the book.")] = None,
    files: Annotated[int, typer.Option(min=0, help="Files to kill around, at most.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="New folder for all of it; kept.")] = None,
    json_to: Annotated[str, typer.Option("--json", help="File for the record; - prints it.")] = "-",
) -> None:
    """Kill each stage, let it go on, compare, and write one JSON object."""
    names = list(dict.fromkeys(stages or StageName))
    patterns = {"shows_times": TIMED.pattern, "ignored": IGNORED.pattern}
    record: dict[str, Any] = {"seed": seed, "not_compared": {"keys": TIMES + SPEEDS, **patterns}}
    before = (current.read_record(Path(json_to)) if json_to != "-" else None) or {}
    record["stages"] = before.get("stages", {})
    with tempfile.TemporaryDirectory(prefix="faults-") as own:
        root = folder or Path(own)
        frozen_project(root / "project")
        known = {
            StageName.CHAPTER: command("run", "--upto", "01"),
            StageName.BOOK: command("book"),
        }
        if set(names) - known.keys():
            known |= small_stages(root / "start")
        for name in names:
            wanted = book_kills if name == StageName.BOOK and book_kills else kills
            found = examine(name, known[name], root / name, wanted, files, seed)
            record["stages"][name] = {**found, "device": device_name(), **code_state()}
    all_found = record["stages"].values()
    record["kills"] = sum(one["kills"] + 2 * one.get("killed_around_files", 0) for one in all_found)
    record["wrong"] = sum(len(one["differences"]) + len(one["leftovers"]) for one in all_found)
    write(record, json_to)
    if record["wrong"]:
        raise typer.Exit(1)


def examine(
    name: str, stage: Stage, root: Path, kills: int, most: int, seed: int
) -> dict[str, Any]:
    """Kill a stage in all ways, and return its part of the record."""
    report = Report(stage, root)
    say(f"{name}: {report.seconds:.1f} s undisturbed")
    report.kill_at_random(kills, random.Random(f"{seed} {name}"))
    say(f"{name}: killed {kills} times at random moments")
    found = {
        "undisturbed_seconds": round(report.seconds, 2),
        "kills": len(report.moments),
        "moments": report.moments,
    }
    if stage.inside:
        found["killed_around_files"] = report.kill_at_files(most)
        say(f"{name}: killed around each of {found['killed_around_files']} files")
    found |= {"differences": report.differences, "leftovers": report.leftovers}
    if not stage.inside:
        found["outside"] = report.outside
    say(f"{name}: {len(report.differences)} differences, {len(report.leftovers)} leftovers")
    return found


if __name__ == "__main__":
    typer.run(main)
