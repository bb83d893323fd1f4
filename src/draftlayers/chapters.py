"""Chapters: notebooks executed by papermill, typed parameters in, an executed notebook out.

``open_chapter`` is the first call of every notebook. ``execute`` runs one notebook for a run and
keeps a record of its causes; ``stale`` names those that have changed since. Which chapters run, in
which order and where, is left to ``jobs``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftlayers.current import (
    Reading,
    changed,
    code_digest,
    digest,
    file_digest,
    libraries,
    missing,
    read_record,
    write_record,
)
from draftlayers.figures.drawing import figure_of
from draftlayers.project import (
    PROJECT,
    Say,
    UserError,
    no_room,
    room_for,
    tells_of_no_room,
    versions,
    write_atomically,
)
from draftlayers.runs import HOLDER, Run
from draftlayers.spec import CHAPTERS, RunSpec
from draftlayers.weights import find_weights

NOTEBOOKS = PROJECT / "notebooks"


def open_chapter(
    chapter: str, model: str, profile: str = "quick", overrides: dict[str, Any] | None = None
) -> Run:
    """Open the run that a notebook belongs to, and print where its numbers will come from.

    Opened by hand, a notebook first executes the chapters before it that are not current.
    """
    from draftlayers.device import device_name

    # The environment has no widgets, on purpose: their state does not survive into a book.
    warnings.filterwarnings("ignore", message="IProgress not found")
    run = Run(RunSpec.make(model, profile, **(overrides or {})))
    if os.environ.get(HOLDER) != str(run.folder):
        for earlier in CHAPTERS[: CHAPTERS.index(chapter)]:
            if stale(run, earlier):
                print(f"chapter {earlier} is not current, executing it first", flush=True)
                with run.hold():
                    run.begin()
                    execute(run, earlier)
    print(
        f"{chapter} · {run.parameter('model')} · profile {run.parameter('profile')} · "
        f"{device_name()} · " + ", ".join(f"{name} {number}" for name, number in versions().items())
    )
    return run


# --- Executing -----------------------------------------------------------------------------------


def _print(text: str) -> None:
    print(text, flush=True)


def execute(run: Run, chapter: str, say: Say = _print) -> Path:
    """Execute a chapter's notebook for a run that is held, and return the executed notebook.

    The last good notebook stays in place until the new one is whole; a failed one is kept beside
    it under a hidden name.

    Raises
    ------
    UserError
        When a cell fails, naming the chapter, the cell and the error, or when the disk is full.
    """
    with room_for(f"chapter {chapter}", run.folder):
        return _execute(run, chapter, say)


def _execute(run: Run, chapter: str, say: Say) -> Path:
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    done = run.path("executed", f"{chapter}.ipynb")
    partial = done.with_name(f".{chapter}.partial.ipynb")
    partial.parent.mkdir(parents=True, exist_ok=True)
    source = NOTEBOOKS / f"{chapter}.ipynb"
    code = chapter_code(source)  # as it is now, whatever is edited meanwhile
    logging.getLogger("papermill").setLevel(logging.ERROR)
    settings = {"DRAFTLAYERS_RUNS": str(run.folder.parents[1]), HOLDER: str(run.folder)}
    with _progress(run, say), _environment({**_QUIET, **settings}):
        try:
            papermill.execute_notebook(
                _literal(source),
                _literal(partial),
                parameters={
                    "model": run.parameter("model"),
                    "profile": run.parameter("profile"),
                    "overrides": run.spec.overrides,
                },
                kernel_name="python3",
                kernel_manager_class=_own_kernels(run),
                cwd=NOTEBOOKS,
                progress_bar=False,
                autosave_cell_every=30,
                # The kernel talks to this process on this machine only; its warning that others
                # on the machine could listen would be repeated for every chapter.
                extra_arguments=["--IPKernelApp.log_level=40"],
            )
        except DeadKernelError:
            raise UserError(
                f"chapter {chapter} was killed while it ran, most likely because memory ran out; "
                "free some, or lower stat_tokens, lens_tokens or batch_tokens, and run it again"
            ) from None
        except PapermillExecutionError as err:
            where = f"chapter {chapter} stopped in cell {err.exec_count}"
            if err.ename == "UserError":
                raise UserError(f"{where}: {err.evalue}") from None
            if tells_of_no_room(err.evalue):
                raise no_room(f"chapter {chapter}", run.folder) from None
            trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(err.traceback))
            raise UserError(
                f"{where}: {err.ename}: {err.evalue}\n{trace}\n"
                f"the notebook up to there is {partial}"
            ) from None
    notebook = nbformat.read(partial, as_version=4)
    notebook.metadata.pop("widgets", None)
    write_atomically(done, nbformat.writes(notebook).encode())
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    figures = [name for output in outputs if (name := figure_of(output))]
    _keep_record(run, chapter, code, figures)
    partial.unlink()
    return done


def _keep_record(run: Run, chapter: str, code: str, figures: list[str]) -> None:
    """Write down what the chapter that has just been executed was made from, and what it made."""
    results = read_record(run.path("results", f"{chapter}.json"))
    if results is None:
        raise UserError(
            f"chapter {chapter} wrote no results: expected results/{chapter}.json, which its last "
            "cell writes with run.write_results"
        )
    reading = Reading(**results["_run"]["reading"])
    done = run.path("executed", f"{chapter}.ipynb")
    record = {
        "causes": {**chapter_causes(run, chapter, reading), "code": code},
        "results": run.results_digest(chapter),
        # Nothing reads the notebook before the book does, so it is kept by its content.
        "made": {**reading.made, done.relative_to(run.folder).as_posix(): file_digest(done)},
        "figures": figures,
    }
    for path in run.path("figures").glob(f"{chapter[:2]}-*"):
        if path.stem not in figures:  # of an earlier state of the chapter
            path.unlink()
    write_record(record_path(run, chapter), record)


def _literal(path: Path) -> str:
    """A path for papermill, which fills in parameters between braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _own_kernels(run: Run) -> type[Any]:
    """A kernel manager that starts this interpreter, whatever kernels are installed elsewhere.

    The file that says how its kernel is reached has one name for each run: what a killed command
    has left is taken over, and removed, by the next one.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.paths import jupyter_runtime_dir
    from traitlets import Unicode

    folder = Path(jupyter_runtime_dir())  # nobody else may read it, which not all disks can promise
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = folder / f"draftlayers-{digest(str(run.folder))}.json"

    class OwnKernelManager(AsyncKernelManager):
        # Where there is no such folder, Jupyter takes the one for temporary files.
        connection_file = Unicode(str(name) if os.access(folder, os.W_OK) else "")

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    return OwnKernelManager


@contextlib.contextmanager
def _progress(run: Run, say: Say) -> Iterator[None]:
    """Pass on the lines that ``Run.say`` writes in the kernel, as they come."""
    if "DRAFTLAYERS_PROGRESS" in os.environ:  # inside a chapter: its lines already have a reader
        yield
        return
    stop = threading.Event()
    # Always the same file: one that a killed command has left is written anew, and removed.
    with run.path("executed", ".progress").open("w+", encoding="utf-8") as lines:

        def follow() -> None:
            while True:
                last = stop.is_set()
                for line in lines:
                    say(line.rstrip("\n"))
                if last:
                    return
                stop.wait(0.3)

        reader = threading.Thread(target=follow, daemon=True)
        with _environment({"DRAFTLAYERS_PROGRESS": lines.name}):
            reader.start()
            try:
                yield
            finally:
                stop.set()
                reader.join()
                Path(lines.name).unlink(missing_ok=True)


# Settings of the kernel's process: no progress bars or debugger notes in the output.
_QUIET = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "SOURCE_DATE_EPOCH": "0",
}


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- What is current -----------------------------------------------------------------------------


def record_path(run: Run, chapter: str) -> Path:
    """Where the record of an executed chapter lies."""
    return run.path("executed", f"{chapter}.json")


def chapter_code(notebook: Path) -> str:
    """Digest of a notebook's code cells and of all package code they import.

    The ids of the cells belong to it, because the book finds a cell's output by its id.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    source = "\n".join("".join(cell["source"]) for cell in code)
    return digest([cell["id"] for cell in code], code_digest(source=source))


def chapter_causes(run: Run, chapter: str, reading: Reading) -> dict[str, Any]:
    """What a chapter's results depend on, as it is now.

    Parameters
    ----------
    reading
        What the chapter asked for when it was executed: which parameters, which earlier results,
        which files.
    """
    return {
        "target": find_weights(run.parameter("model")).digest,
        "code": chapter_code(NOTEBOOKS / f"{chapter}.ipynb"),
        "libraries": libraries(),
        "parameters": {name: run.parameter(name) for name in reading.parameters},
        "results": {earlier: run.results_digest(earlier) for earlier in reading.results},
        "files": {name: run.input_digest(name) for name in reading.files},
    }


def stale(run: Run, chapter: str) -> list[str]:
    """Why a chapter has to be executed: names of what has changed; empty when it is current."""
    path = record_path(run, chapter)
    record = read_record(path)
    if record is None or not record.keys() >= {"causes", "results", "made", "figures"}:
        return ["damaged record"] if path.exists() else ["never made"]
    was = record["causes"]
    reading = Reading(was["parameters"], was["results"], was["files"])
    found = changed(was, chapter_causes(run, chapter, reading))
    if record["results"] != run.results_digest(chapter):
        found.append("results written since")  # by a notebook that was executed by hand
    found += [f"missing {name}" for name in missing(record["made"], run.folder)]
    calls = (run.path("figures", f"{name}.safetensors") for name in record["figures"])
    return found + [f"missing figure {path.stem}" for path in calls if not path.exists()]


def up_to_date(run: Run, upto: str = CHAPTERS[-1]) -> bool:
    """Whether every chapter up to this one is current."""
    return not any(stale(run, chapter) for chapter in CHAPTERS[: CHAPTERS.index(upto) + 1])
