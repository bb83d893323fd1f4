"""Chapters: notebooks executed by papermill, typed parameters in, an executed notebook out.

``open_chapter`` is the first call of every notebook. ``execute`` runs one notebook for a run;
``python -m draftlayers.chapters CHAPTER`` does so for Snakemake, which decides what has to run
by comparing stamps: a *stamp* changes with the code of a notebook, the package modules it uses,
its parameters, the reference results it shows and the stamps of the chapters before it, and with
nothing else. Prose has no part in it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import nbformat
import typer
from filelock import FileLock, Timeout

from draftlayers.figures import use_style
from draftlayers.spec import (
    CHAPTERS,
    DATA,
    PROJECT,
    Run,
    RunSpec,
    UserError,
    device_name,
    fingerprint,
    versions,
    write_atomically,
)

NOTEBOOKS = PROJECT / "notebooks"
REFERENCE = DATA / "reference"  # results of long runs, by the chapter that shows them
DRAFT_HEAD = "06-draft-head"
SOURCE = Path(__file__).parent
# Modules that move data about and decide no number.
_PLUMBING = {"chapters", "cli", "booksite"}

# The chapter that first uses a parameter; later chapters depend on it through that one.
_FIRST_USE = {
    "01-hidden-states": (
        "model seed trust_remote_code train_conversations validation_conversations "
        "generated_conversations max_prompt_tokens answer_tokens stat_tokens"
    ),
    "02-entropy": "entropy lens_tokens k",
    "03-token-filtering": "keep bootstrap",
    "04-cka": "",
    "05-selection": "cka_threshold",
    "06-draft-head": (
        "head_epochs ttt_steps batch_tokens learning_rate draft_vocab fc_norm head_start "
        "train_lm_head seeds depth heldout_prompts"
    ),
    "07-speedup": "decode_tokens speed_repeats",
}


def open_chapter(
    chapter: str, model: str, profile: str = "quick", overrides: dict[str, Any] | None = None
) -> Run:
    """Open the run that a notebook belongs to, and print where its numbers will come from.

    Sets the figure style. When an earlier chapter has no results yet (a notebook opened by hand
    on a fresh clone), that chapter is executed first.
    """
    use_style()
    # The environment has no widgets, on purpose: their state does not survive into a book.
    warnings.filterwarnings("ignore", message="IProgress not found")
    run = Run(RunSpec.make(model, profile, **(overrides or {})))
    for earlier in CHAPTERS[: CHAPTERS.index(chapter)]:
        if not (run.folder / "results" / f"{earlier}.json").exists():
            run.say(f"chapter {earlier} has no results yet, executing it first")
            execute(run, earlier)
    found = versions()
    print(
        f"{chapter} · {run.spec.model} · profile {run.spec.profile} · {device_name()} · "
        + ", ".join(f"{name} {number}" for name, number in found.items())
    )
    return run


def execute(run: Run, chapter: str, say: Callable[[str], None] | None = None) -> Path:
    """Execute a chapter's notebook for a run, and return the executed notebook.

    The last good notebook stays in place until the new one is whole; a failed one is kept beside
    it under a hidden name.

    Raises
    ------
    UserError
        When a cell fails; the message names the chapter, the cell and the error.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    say = say or run.say
    done = run.path("executed", f"{chapter}.ipynb")
    partial = done.with_name(f".{chapter}.partial.ipynb")
    stamp = chapter_stamp(run, chapter)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    with _progress(say), _quiet_kernels():
        os.environ["DRAFTLAYERS_RUNS"] = str(run.folder.parents[1])
        try:
            papermill.execute_notebook(
                str(NOTEBOOKS / f"{chapter}.ipynb"),
                str(partial),
                parameters={
                    "model": run.spec.model,
                    "profile": run.spec.profile,
                    "overrides": run.spec.overrides,
                },
                kernel_name="python3",
                cwd=str(NOTEBOOKS),
                progress_bar=False,
                autosave_cell_every=30,
                # The kernel talks to this process on this machine only; its warning that others
                # on the machine could listen would be repeated for every chapter.
                extra_arguments=["--IPKernelApp.log_level=40"],
            )
        except PapermillExecutionError as err:
            trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(err.traceback))
            raise UserError(
                f"chapter {chapter} stopped in cell {err.exec_count}: {err.ename}: {err.evalue}\n"
                f"{trace.splitlines()[0] if err.ename == 'UserError' else trace}\n"
                f"the notebook up to there is {partial}"
            ) from None
    notebook = nbformat.read(partial, as_version=4)
    notebook.metadata.pop("widgets", None)
    write_atomically(done, nbformat.writes(notebook).encode())
    write_atomically(run.path("executed", f"{chapter}.stamp"), stamp.encode())
    partial.unlink()
    return done


@contextlib.contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[None]:
    """Pass on the lines that ``Run.say`` writes in the kernel, as they come."""
    outer = os.environ.get("DRAFTLAYERS_PROGRESS")
    if outer:  # a chapter that executes an earlier one: its lines already have a reader
        yield
        return
    stop = threading.Event()
    with tempfile.NamedTemporaryFile("r", suffix=".progress", encoding="utf-8") as lines:
        os.environ["DRAFTLAYERS_PROGRESS"] = lines.name

        def follow() -> None:
            while True:
                last = stop.is_set()
                for line in lines:
                    say(line.rstrip("\n"))
                if last:
                    return
                stop.wait(0.3)

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        try:
            yield
        finally:
            stop.set()
            reader.join()
            del os.environ["DRAFTLAYERS_PROGRESS"]


@contextlib.contextmanager
def _quiet_kernels() -> Iterator[None]:
    """Settings of the kernel's process: no progress bars or debugger notes in the output."""
    settings = {
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "SOURCE_DATE_EPOCH": "0",
    }
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


# --- What has to run again -----------------------------------------------------------------------


def chapter_stamp(run: Run, chapter: str) -> str:
    """What determines a chapter's results, as a fingerprint."""
    before = CHAPTERS[: CHAPTERS.index(chapter)]
    upstream = chapter_stamp(run, before[-1]) if before else ""
    code = notebook_code(NOTEBOOKS / f"{chapter}.ipynb")
    fields = {name: getattr(run.spec, name) for name in _FIRST_USE[chapter].split()}
    reference = REFERENCE / f"{chapter}.json"
    shown = [reference.read_text(encoding="utf-8")] if reference.exists() else []
    return fingerprint(code, modules_stamp(code), fields, upstream, *shown)


def notebook_code(path: Path) -> str:
    """The code cells of a notebook, one after the other, each under its id.

    The ids belong to it because the book finds a cell's output by its id.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return "\n".join(f"# {cell['id']}\n{''.join(cell['source'])}" for cell in cells)


def modules_stamp(code: str) -> str:
    """A fingerprint of the package modules that code imports, and those that they import.

    Comments and layout have no part in it: what is compared is the syntax tree.
    """
    digests: dict[str, str] = {}
    waiting = _imported(ast.parse(code))
    while waiting:
        name = waiting.pop()
        path = SOURCE / f"{name}.py"
        if name in digests or name in _PLUMBING or not path.exists():
            continue
        digests[name], imports = _read_module(path, path.stat().st_mtime_ns)
        waiting |= imports
    return fingerprint(digests)


@functools.lru_cache(maxsize=256)
def _read_module(path: Path, changed: int) -> tuple[str, set[str]]:
    """Digest of a module's syntax tree, and what it imports; read again when the file changed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), _imported(tree)


def _imported(tree: ast.Module) -> set[str]:
    """Names of the package's modules that a syntax tree imports, at any depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {part[1] for part in parts if part[0] == "draftlayers" and len(part) > 1}
    return found


def up_to_date(run: Run, upto: str = CHAPTERS[-1]) -> bool:
    """Whether every chapter up to this one was executed with today's code and parameters."""
    marks = {
        chapter: run.path("executed", f"{chapter}.stamp")
        for chapter in CHAPTERS[: CHAPTERS.index(upto) + 1]
    }
    return all(m.exists() and m.read_text() == chapter_stamp(run, c) for c, m in marks.items())


def forget_stale(run: Run) -> None:
    """Remove the marks of finished work that the code and parameters of today would not make."""
    for chapter in CHAPTERS:
        mark = run.path("executed", f"{chapter}.stamp")
        if mark.exists() and mark.read_text() != chapter_stamp(run, chapter):
            mark.unlink()
    for mark in run.folder.glob("heads/*.stamp"):
        if mark.read_text() != chapter_stamp(run, DRAFT_HEAD):
            mark.unlink()


def run_chapters(run: Run, upto: str = CHAPTERS[-1], cores: int | None = None) -> None:
    """Execute, through Snakemake, every chapter of a run that is not up to date.

    Raises
    ------
    UserError
        When a chapter fails or another process is working on the same run.
    """
    if up_to_date(run, upto):
        return
    command = [
        sys.executable, "-m", "snakemake",
        "--snakefile", str(PROJECT / "Snakefile"),
        "--directory", str(run.folder),
        "--cores", str(cores or os.cpu_count() or 1),
        "--rerun-triggers", "params",
        "--rerun-incomplete",
        "--nolock",  # the lock below ends with its process, Snakemake's outlives a killed one
        "--quiet", "progress", "rules", "host", "reason",
        "--config", f"spec={run.folder / 'spec.json'}",
        "--", f"executed/{upto}.stamp",
    ]  # fmt: skip
    environment = {**os.environ, "DRAFTLAYERS_RUNS": str(run.folder.parents[1])}
    try:
        with FileLock(run.folder / ".lock", timeout=0):
            forget_stale(run)
            done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    except Timeout:
        raise UserError(f"another process is working in {run.folder}; wait for it") from None
    if done.returncode:
        raise UserError(
            "the run stopped; what is finished is kept, and the same command goes on from there\n"
            + done.stderr.strip()
        )


def select_layers(run: Run, say: Callable[[str], None]) -> dict[str, Any]:
    """Chapters 1 to 5 without their text: the layers for a draft head, and a picture.

    Returns a dictionary that JSON can hold: ``chosen``, ``sets`` (each rule's layers, score and
    rank among all sets of its size), ``n_layers``, ``kept_share`` with its ``reason``, how often
    the bootstrap makes the same choice, and the path of the ``picture``.
    """
    import numpy as np

    from draftlayers import cka, entropy, figures, filtering, selection
    from draftlayers.corpus import load_corpus, until_tokens
    from draftlayers.states import collect
    from draftlayers.targets import load_target

    spec = run.spec
    target = load_target(spec.model, trust_remote_code=spec.trust_remote_code, say=say)
    conversations = until_tokens(load_corpus(target, run, say).train, spec.stat_tokens)
    store = collect(
        target, conversations, range(target.n_layers + 1), run.folder / "states", say=say
    )
    rows = filtering.eligible(store.meta, store.norms).rows
    sequence = store.meta["sequence"][rows]
    shares, parts = filtering.SHARES, 16
    how = cka.plan(len(rows), len(store.boundaries), store.d, cells=parts * len(shares),
                   shares=shares)  # fmt: skip
    say(f"CKA: {how}")
    sums = cka.measure(store, rows, sequence, shares=shares, how=how, parts=parts, seed=spec.seed)
    whole = sums.compute(len(shares) - 1)
    measured = entropy.measure(
        target, store, rows, whole.overlap, lens_tokens=spec.lens_tokens, seed=spec.seed, say=say
    )
    definition = entropy.DEFINITIONS[spec.entropy]
    levels = selection.along_filter(
        sums, cka.deal_parts(sequence, spec.seed, parts), measured, definition, shares, spec.k,
        bootstrap=spec.bootstrap, seed=spec.seed, say=say,
    )  # fmt: skip
    advice = filtering.recommend(
        shares,
        [level.layers for level in levels],
        np.stack([level.stability.inclusion for level in levels]),
        [level.rows for level in levels],
    )
    share = advice.share if spec.keep is None else spec.keep
    rows = filtering.kept(rows, share)
    used = cka.measure(store, rows, store.meta["sequence"][rows], seed=spec.seed).compute()
    measured = measured.among(
        len(rows), used.overlap, entropy.sample_grams(store, rows, seed=spec.seed)
    )
    scores, matrix = definition.layer_shares(measured).numpy(), used.matrix.numpy()
    aggregate = definition.aggregate_function(measured)
    found = selection.search(scores, matrix, spec.k, aggregate)
    methods = selection.compare(scores, matrix, spec.k, spec.cka_threshold, aggregate)
    use_style()
    sets = selection.some_sets(target.n_layers, spec.k, seed=spec.seed)
    marked = {}
    for choice in (found, methods["default"], methods["greedy_threshold"]):
        one = np.array([choice.layers])
        marked[choice.method] = (
            float(aggregate(one)[0]), float(selection.diversity(one, matrix)[0])
        )  # fmt: skip
    figure = figures.entropy_cka_plane(
        aggregate(sets),
        selection.diversity(sets, matrix),
        marked,
        [methods["default"].score, found.score],
    )
    run.save_figure(figure, "select")
    listed = []
    for name, choice in {"chosen": found, **methods}.items():
        rank = selection.rank_of(choice.layers, scores, matrix, aggregate)
        listed.append(
            {"name": name, "layers": list(choice.layers), "score": choice.score,
             "rank": rank.rank, "of": rank.total, "note": choice.note}
        )  # fmt: skip
    return {
        "model": spec.model,
        "n_layers": target.n_layers,
        "convention": "boundary b: the residual stream entering layer b (vLLM's numbering)",
        "chosen": list(found.layers),
        "entropy": spec.entropy,
        "rows": len(rows),
        "kept_share": share,
        "reason": advice.reason if spec.keep is None else "set by the parameter keep",
        "same_choice_in_bootstrap": next(
            (lv.stability.share(found.layers) for lv in levels if lv.share == share), None
        ),
        "sets": listed,
        "picture": str(run.path("figures", "select.png")),
    }


def train_planned_head(run: Run, layers: list[int], seed: int, say: Callable[[str], None]) -> None:
    """Train one head of chapter 06 by itself, so that a cluster can train several at once."""
    from draftlayers.corpus import load_corpus
    from draftlayers.targets import load_target
    from draftlayers.training import TrainingSettings, head_folder, prepare, train_head

    spec = run.spec
    target = load_target(spec.model, trust_remote_code=spec.trust_remote_code, say=say)
    data = prepare(run, target, load_corpus(target, run, say), say)
    settings = TrainingSettings.from_spec(spec)
    folder = head_folder(run, layers, seed)
    train_head(data, layers, target, settings, seed, folder, say)
    mark = folder.with_name(f"{folder.name}.stamp")
    write_atomically(mark, chapter_stamp(run, DRAFT_HEAD).encode())


def planned_heads(run: Run) -> list[str]:
    """Names ``<layers>-s<seed>`` of the heads that chapter 06 will ask for."""
    from draftlayers.training import head_folder, planned_sets

    seeds = range(run.spec.seed, run.spec.seed + run.spec.seeds)
    return [head_folder(run, ls, s).name for ls in planned_sets(run).values() for s in seeds]


def _main(
    what: Annotated[str, typer.Argument(help="A chapter, or a head such as 2-15-27-s0.")],
    spec: Annotated[Path, typer.Argument(help="The run's spec.json.")],
) -> None:
    """Execute one chapter of a run, or train one head (called by Snakemake)."""
    values = json.loads(spec.read_text())
    run = Run(RunSpec.model_validate(values), root=spec.parents[2])
    started = time.monotonic()
    if what in CHAPTERS:
        print(f"[{CHAPTERS.index(what) + 1}/{len(CHAPTERS)}] {what}", flush=True)
    else:
        print(f"      draft head {what}", flush=True)

    def say(text: str) -> None:
        print(f"      {time.monotonic() - started:5.0f} s  {text}", flush=True)

    try:
        if what in CHAPTERS:
            execute(run, what, say)
        else:
            layers, seed = what.rsplit("-s", 1)
            train_planned_head(run, [int(b) for b in layers.split("-")], int(seed), say)
    except UserError as err:
        print(err, file=sys.stderr)
        raise SystemExit(1) from None
    print(f"      {time.monotonic() - started:5.0f} s  done", flush=True)


if __name__ == "__main__":
    typer.run(_main)
