"""Jobs: the chapters and heads of a run in their order, on this machine or on a cluster.

``run_chapters`` asks Snakemake for what is not current. Snakemake only orders the jobs and gives
them cores or nodes; each job asks for itself whether its work is current, because only then is it
known what the jobs before it have changed. ``python -m draftlayers.jobs JOB FOLDER`` is one such
job. A command that is stopped ends everything below it, and what lives below a command that was
killed ends by itself. How a chapter is executed is left to ``chapters``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

from draftlayers.chapters import execute, record_path, stale, up_to_date
from draftlayers.figures.drawing import redraw_stale
from draftlayers.project import (
    PROJECT,
    Say,
    UserError,
    no_room,
    room_for,
    tells_of_no_room,
    write_atomically,
)
from draftlayers.runs import HOLDER, Run
from draftlayers.spec import CHAPTERS

DRAFT_HEAD = "06-draft-head"
MARKS = ".jobs"  # in a run's folder: what Snakemake orders jobs by, made anew by each command
NEEDS = "DRAFTLAYERS_NEEDS"  # what the target must be able to do for the chapters asked for
MISTAKE = "mistake"  # among them: what a job that failed says
WATCH_SECONDS = 0.2  # shorter than the start of a command, so that two never write at once
GRACE_SECONDS = 0.5  # for processes to end by themselves before they are killed


def run_chapters(run: Run, upto: str = CHAPTERS[-1], cores: int | None = None) -> None:
    """Execute every chapter of a run that is not current, and draw again what figures need it.

    Raises
    ------
    UserError
        When a chapter fails or another process is working on the same run.
    """
    if up_to_date(run, upto) and not redraw_stale(run, dry=True):
        return
    with room_for("this run", run.folder), run.hold():
        run.begin()
        for chapter in redraw_stale(run).chapters:  # figures that only their chapter can make
            record_path(run, chapter).unlink(missing_ok=True)
        if not up_to_date(run, upto):
            _run_jobs(run, upto, cores)


def _run_jobs(run: Run, upto: str, cores: int | None) -> None:
    """Let Snakemake run the jobs from the first chapter that is not current on."""
    marks = run.path(MARKS)
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    for chapter in CHAPTERS[: CHAPTERS.index(upto)]:
        if stale(run, chapter):
            break
        (marks / chapter).touch()
    command = [
        sys.executable, "-m", "snakemake",
        "--snakefile", str(PROJECT / "Snakefile"),
        "--directory", str(run.folder),
        "--cores", str(cores or os.cpu_count() or 1),
        "--rerun-triggers", "params",  # what is current is decided here, not by dates
        "--nolock",  # the run is held already, and by a lock that ends with its process
        "--quiet", "progress", "rules", "host", "reason",
        "--", f"{MARKS}/{upto}",
    ]  # fmt: skip
    later = ("train", "decode") if upto > CHAPTERS[4] else ()
    settings = {
        NEEDS: " ".join(("select", *later)),
        "DRAFTLAYERS_RUNS": str(run.folder.parents[1]),
        HOLDER: str(run.folder),
    }
    child = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process, which ends the others
    )
    try:
        _, said = child.communicate()
    except BaseException:
        end_all(child.pid)
        raise
    if child.returncode:
        mistake = marks / MISTAKE
        told = mistake.exists()  # whole, or not there
        if not told and tells_of_no_room(said):  # for the mistake itself, or for Snakemake
            raise no_room("this run", run.folder)
        raise UserError(
            (mistake.read_text(encoding="utf-8") if told else said.strip())
            + "\nThe run stopped; what is finished is kept, and the same command goes on from it."
        )


def end_all(pid: int) -> None:
    """End a process and everything below it, politely first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        # Found before the first one ends, since what it leaves behind would have no parent.
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = psutil.wait_procs(processes, timeout=GRACE_SECONDS)[1]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def end_with_parent() -> None:
    """End this process, and what is below it, soon after the one that started it has died."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- One job -------------------------------------------------------------------------------------


def check_abilities(run: Run, needed: Sequence[str], say: Say) -> None:
    """Open the target and try what later chapters need, before any of them works.

    Raises
    ------
    UserError
        When the target cannot do it; the message says why.
    """
    from draftlayers.capabilities import check_target
    from draftlayers.corpus import heldout_prompts
    from draftlayers.targets import open_target

    target = open_target(run, say)
    check_target(target).require(*needed)
    if "decode" in needed:
        heldout_prompts(target, run)


def train_planned_head(run: Run, name: str, say: Say) -> None:
    """Train one head of chapter 06 by itself, so that a cluster can train several at once."""
    from draftlayers.contenders import head_folder, parse_head_name
    from draftlayers.corpus import load_corpus
    from draftlayers.targets import open_target
    from draftlayers.training import TrainingSettings, train_head
    from draftlayers.training_data import prepare

    layers, seed = parse_head_name(name)
    target = open_target(run, say)
    data = prepare(run, target, load_corpus(target, run, say), say)
    settings = TrainingSettings.from_spec(run.spec)
    train_head(data, layers, target, settings, seed, head_folder(run, layers, seed), say)


def _main(
    job: Annotated[str, typer.Argument(help="A chapter, or a head such as 2-15-27-s0.")],
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
) -> None:
    """Execute one chapter of a run, or train one head, if it is not current."""
    end_with_parent()
    run = Run.stored(folder)
    started = time.monotonic()
    chapter = job if job in CHAPTERS else DRAFT_HEAD
    number = f"[{CHAPTERS.index(job) + 1}/{len(CHAPTERS)}]" if job in CHAPTERS else None
    what = f"{number} {job}" if number else f"      draft head {job}"
    why = stale(run, chapter)
    if not why:
        print(f"{what}: unchanged", flush=True)
        return
    print(what, flush=True)

    def say(text: str) -> None:
        print(f"      {time.monotonic() - started:5.0f} s  {text}", flush=True)

    if number and why != ["never made"]:
        say(f"made again, because of: {', '.join(why[:6])}")
    try:
        if job == CHAPTERS[0]:
            check_abilities(run, os.environ.get(NEEDS, "select").split(), say)
        if number:
            execute(run, job, say)
        else:
            train_planned_head(run, job, say)
    except UserError as err:
        with contextlib.suppress(OSError, UserError):  # without room, the words below are heard
            write_atomically(run.path(MARKS, MISTAKE), str(err).encode())
        raise SystemExit(str(err)) from None
    say("done")


if __name__ == "__main__":
    typer.run(_main)
