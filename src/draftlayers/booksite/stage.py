"""From a run folder to a website: lay out the sources, build, check, swap.

Used by ``draftlayers book``. The staged tree mirrors the repository (``book/``, ``notebooks/``)
so that the links "edit this page" and "open on Binder" lead to the committed files. Notebooks
are staged with the text of the repository and the outputs of the run: an edit to prose executes
nothing, an edit to code asks for a new run. Executing chapters is left to
``draftlayers.chapters``, the look of results to ``draftlayers.booksite.extension``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from draftlayers.booksite.scan import scan_site
from draftlayers.chapters import stale
from draftlayers.current import changed, code_digest, read_record, write_record
from draftlayers.figures.drawing import figure_of
from draftlayers.project import PROJECT, UserError
from draftlayers.runs import Run

# Cells that papermill adds to an executed notebook and that no source notebook has.
_ADDED = {"injected-parameters", "papermill-error-cell-tag"}
_BUILDERS = ("jupyter-book", "sphinx", "myst-nb", "sphinx-book-theme", "pydata-sphinx-theme")
RECORD = ".causes.json"  # what a site was built from, beside its first page
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class BookError(UserError):
    """The book cannot be built; the message says why and what to do."""


# --- Notebooks -----------------------------------------------------------------------------------


def merge_notebook(
    source: dict[str, Any], executed: dict[str, Any], chapter: str
) -> dict[str, Any]:
    """Return the source notebook with the outputs of its execution.

    Text, captions and tags come from ``source``, outputs from ``executed``; cells are matched by
    id. The parameters that the run passed are kept, folded, behind the cell of defaults.

    Raises ``BookError`` when the code is not the code that was executed.
    """
    ran = {cell["id"]: cell for cell in executed["cells"] if not _tags(cell) & _ADDED}
    code = [cell for cell in source["cells"] if cell["cell_type"] == "code"]
    ran_code = [cell for cell in ran.values() if cell["cell_type"] == "code"]
    was, now = ([(cell["id"], _text(cell)) for cell in cells] for cells in (ran_code, code))
    if was != now:
        changed = [name for name, _ in now if (name, dict(now)[name]) not in was]
        what = f"cells {', '.join(changed)}" if changed else "its cells were moved or removed"
        raise BookError(
            f"chapter {chapter}: the code of the notebook is not the code that was executed "
            f"({what}). Run the chapter again (make book, or draftlayers run), then build."
        )
    cells = []
    for cell in source["cells"]:
        if cell["cell_type"] == "code":
            done = ran[cell["id"]]
            cell = cell | {key: done[key] for key in ("outputs", "execution_count")}
        cells.append(cell)
        if "parameters" in _tags(cell):
            added = (c for c in executed["cells"] if "injected-parameters" in _tags(c))
            cells += [_folded(extra) for extra in added]
    # Times are left out: the same outputs give the same page. The kernel's language is kept, or
    # the code would not be coloured.
    exception = executed["metadata"].get("papermill", {}).get("exception", True)
    metadata = source["metadata"] | {
        "papermill": {"exception": bool(exception)},
        "language_info": executed["metadata"].get("language_info", {"name": "python"}),
    }
    return source | {"cells": cells, "metadata": metadata}


def _folded(cell: dict[str, Any]) -> dict[str, Any]:
    label = "Parameters of this run"
    prompt = {"code_prompt_show": label, "code_prompt_hide": label}
    return cell | {
        "id": "parameters-of-this-run",
        "metadata": {"tags": ["injected-parameters", "hide-input"], "mystnb": prompt},
    }


def _tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def _text(cell: dict[str, Any]) -> str:
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


# --- Staging -------------------------------------------------------------------------------------


def documents(toc: Path) -> list[str]:
    """Names of all pages of the table of contents, in reading order."""

    def walk(node: Any) -> list[str]:
        if isinstance(node, list):
            return [name for item in node for name in walk(item)]
        if not isinstance(node, dict):
            return []
        own = [node[key] for key in ("root", "file") if key in node]
        return own + [name for value in node.values() for name in walk(value)]

    return walk(yaml.safe_load(toc.read_text(encoding="utf-8")))


def site_files(run: Run, repository: Path = PROJECT) -> dict[str, bytes]:
    """Return the content of every file of the staged tree, by its path in the tree.

    Raises ``BookError`` when a chapter of the table of contents has not been executed, or was
    made from other code, parameters or results than the run has now.
    """
    toc = repository / "book" / "_toc.yml"
    if not toc.is_file():
        raise BookError(
            f"there is no book at {repository}: building it needs a checkout of the repository, "
            "installed with pip install -e '.[book]'"
        )
    chapters = [
        Path(name).with_suffix("").name for name in documents(toc) if name.startswith("notebooks/")
    ]
    _check_current(run, chapters)
    tree = {"_config.yml": (repository / "_config.yml").read_bytes()}
    for folder, pattern in (
        (repository / "book", "*"),
        (run.path("figures"), "*.svg"),
        (run.path("figures"), "*.png"),
        (run.path("results"), "*.json"),
    ):
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and not path.name.startswith("."):
                tree[f"{folder.name}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    tree["results/spec.json"] = run.path("spec.json").read_bytes()
    for path in sorted((repository / "data" / "reference").glob("*.json")):
        tree[f"results/reference/{path.name}"] = path.read_bytes()
    for name in chapters:
        source = _read_notebook(repository / "notebooks" / f"{name}.ipynb")
        executed = _read_notebook(run.path("executed", f"{name}.ipynb"))
        merged = with_figures(merge_notebook(source, executed, name), run)
        tree[f"notebooks/{name}.ipynb"] = json.dumps(merged, indent=1, sort_keys=True).encode()
    return tree


def _check_current(run: Run, chapters: list[str]) -> None:
    """Refuse a book whose chapters do not belong to the run as it is."""
    why = {name: found for name in chapters if (found := stale(run, name))}
    if not why:
        return
    place = str(run.folder.parents[1])
    command = shlex.join(
        ["draftlayers", "book", "--model", run.parameter("model"), "--profile",
         run.parameter("profile"), "--runs", place]
    )  # fmt: skip
    if missing := [name for name, found in why.items() if found == ["never made"]]:
        raise BookError(f"not executed yet in {run.folder}: {', '.join(missing)}. Run: {command}")
    listed = "; ".join(f"{name} ({', '.join(found[:4])})" for name, found in why.items())
    raise BookError(
        f"the chapters in {run.folder} are not what this run's code, model and parameters give: "
        f"{listed}. Run: {command}"
    )


def with_figures(notebook: dict[str, Any], run: Run) -> dict[str, Any]:
    """A notebook with its figures as they are drawn now, maybe later than it was executed."""
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell = cell | {"outputs": [_with_figure(output, run) for output in cell["outputs"]]}
        cells.append(cell)
    return notebook | {"cells": cells}


def _with_figure(output: dict[str, Any], run: Run) -> dict[str, Any]:
    name = figure_of(output)
    if name is None:
        return output
    png = base64.b64encode(run.path("figures", f"{name}.png").read_bytes()).decode()
    return output | {"data": output["data"] | {"image/png": png}}


def _read_notebook(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def site_causes(tree: dict[str, bytes]) -> dict[str, Any]:
    """Everything that decides what the site looks like."""
    return {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in tree.items()},
        "code": code_digest("booksite.stage", "booksite.extension"),
        "libraries": {package: version(package) for package in _BUILDERS},
    }


# --- Building ------------------------------------------------------------------------------------


def build_site(run: Run, repository: Path = PROJECT) -> Path:
    """Build the book of a run and return the path of its first page.

    When nothing that the site depends on has changed, the finished site is returned at once.
    Otherwise it is built from nothing, with warnings as errors, scanned, and only then put in
    the place of the earlier one, so a failed build never costs the reader a working book.

    Raises ``BookError`` with the warnings of the build or the faults of the scan; the full log
    and the rejected pages stay in the run's ``site`` folder.
    """
    html = run.path("site", "html")
    first = html / "index.html"
    tree = site_files(run, repository)
    causes = site_causes(tree)
    if first.is_file() and not changed(read_record(html / RECORD), causes):
        return first

    with run.hold():
        _build(run, tree)
        write_record(html / RECORD, causes)
    return first


def _build(run: Run, tree: dict[str, bytes]) -> None:
    """Build, scan and put in place."""
    html, stage, output = (run.path("site", name) for name in ("html", "stage", "build"))
    log = run.path("site", "build.log")
    for folder in (stage, output):
        shutil.rmtree(folder, ignore_errors=True)
    for name, content in tree.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    done = subprocess.run(
        [
            *(sys.executable, "-c", "from jupyter_book.cli.main import main; main()"),
            *("build", str(stage), "--config", str(stage / "_config.yml")),
            *("--toc", str(stage / "book" / "_toc.yml"), "--path-output", str(output)),
            *("-W", "--keep-going", "-n"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"},
    )
    said = _ANSI.sub("", done.stdout)
    log.write_text(said, encoding="utf-8")
    built = output / "_build" / "html"
    if done.returncode != 0:
        raise BookError(f"the book was not built:\n{complaints(said, stage)}\nWhole log: {log}")
    if faults := scan_site(built):
        listed = "\n".join(f"  {fault}" for fault in faults[:20])
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise BookError(f"the book was built but is not fit to read:\n{listed}{more}\nSee {built}")
    old = run.path("site", "html.old")
    shutil.rmtree(old, ignore_errors=True)
    if html.exists():
        os.replace(html, old)
    os.replace(built, html)
    for folder in (old, output):
        shutil.rmtree(folder, ignore_errors=True)


def complaints(log: str, stage: Path) -> str:
    """The warnings and errors of a build log, with paths as a reader knows them.

    When the log holds none, its last lines are returned.
    """
    lines = log.replace(f"{stage}/", "").splitlines()
    found = [line for line in lines if re.search(r"\b(WARNING|ERROR|CRITICAL|SEVERE)\b", line)]
    if not found:
        found = [line for line in lines if line.strip()][-15:]
    listed = list(dict.fromkeys(found))
    more = [f"and {len(listed) - 20} more"] if len(listed) > 20 else []
    return "\n".join(f"  {line}" for line in listed[:20] + more)
