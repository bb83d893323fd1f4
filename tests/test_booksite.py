"""The book: numbers by role, staging, refusals, and a small site built with warnings as errors."""

from __future__ import annotations

import ast
import base64
import copy
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("jupyter_book", reason="the book needs: pip install 'draftlayers[book]'")

import nbformat

from draftlayers.booksite import stage
from draftlayers.booksite.extension import ResultError, look_up, show, show_date, show_seconds
from draftlayers.booksite.scan import scan_site
from draftlayers.booksite.stage import BookError, build_site, documents, merge_notebook
from draftlayers.current import changed
from draftlayers.project import PROJECT
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS, RunSpec

CHAPTER = "05-selection"
PIXEL = base64.b64encode(
    base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
).decode()
RESULTS = {
    "default": {"layers": [2, 4, 5], "score": 0.51234, "rank": 7},
    "sets": [
        {"name": "default", "layers": [2, 4, 5], "score": 0.5, "tau": None},
        {"name": "chosen", "layers": [1, 3, 6], "score": 0.75, "tau": 1.25},
    ],
    "by_kind": {"code": {"n": 12}, "writing": {"n": 30}},
    "complete": True,
    "drop": -0.25,
    "_run": {
        "model": "tiny",
        "profile": "smoke",
        "device": "a test machine, 1 threads",
        "date": "2026-11-29",
        "versions": {"draftlayers": "0.1.0", "torch": "2.13.0"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "clean": False,
        "seconds": 74.2,
    },
}
INTRO = f"""# The question

The default scores {{result}}`{CHAPTER}:default.score|.2f` on {{result}}`{CHAPTER}:default.layers`.

```{{figure}} ../figures/plane.png
:alt: A plane of layers
A figure of the run.
```

```{{result-table}} {CHAPTER}:sets
:caption: Two sets
:name: table-sets
Set | name
Layers | layers
Score | score | .2f
τ | tau | .2f
```

A longer run reached {{result}}`reference/{CHAPTER}:tau|.2f`.

See {{numref}}`table-sets` and [the chapter](../notebooks/{CHAPTER}.ipynb), $e^{{i\\pi}} = -1$.
"""
STATUS = """# What ran

```{run-table} chapters
```
```{run-table} versions
```
```{run-table} parameters
```
"""
TOC = f"""format: jb-book
root: book/intro
chapters:
  - file: notebooks/{CHAPTER}
  - file: book/status
"""


def code(cell_id: str, source: str, tags: tuple[str, ...] = (), **metadata) -> dict:
    return {
        "id": cell_id,
        "cell_type": "code",
        "metadata": {"tags": list(tags), **metadata},
        "source": source,
        "execution_count": None,
        "outputs": [],
    }


def source_notebook() -> dict:
    figure = {
        "figure": {"name": "fig-one", "caption": "One pixel."},
        "image": {"alt": "One coloured pixel"},
    }
    return {
        "cells": [
            {
                "id": "title",
                "cell_type": "markdown",
                "metadata": {},
                "source": f"# Choice\n\n{{result}}`{CHAPTER}:default.rank`, {{numref}}`fig-one`.",
            },
            code("parameters", 'model = "smollm2-135m"', ("parameters",)),
            code("work", "layers = [2, 4, 5]\nfig", mystnb=figure),
            code("table", "Markdown(rows)"),
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def executed_notebook() -> dict:
    """What papermill leaves: outputs, counts, and a cell with the parameters that were passed."""
    notebook = source_notebook()
    title, parameters, work, table = notebook["cells"]
    injected = code("f00d", '# Parameters\nmodel = "tiny"', ("injected-parameters",))
    work["outputs"] = [
        {"output_type": "stream", "name": "stderr", "text": ["chatter of a library\n"]},
        {
            "output_type": "display_data",
            "metadata": {"draftlayers": {"figure": "05-plane"}},
            "data": {"image/png": "of an earlier day", "text/plain": ["figure 05-plane"]},
        },
    ]
    rows = ["| layer | score |\n", "|---|---|\n", "| 2 | 0.5 |\n"]
    table["outputs"] = [
        {
            "output_type": "execute_result",
            "execution_count": 4,
            "metadata": {},
            "data": {"text/markdown": rows, "text/plain": ["<Markdown>"]},
        }
    ]
    notebook["cells"] = [title, parameters, injected, work, table]
    notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    for count, cell in enumerate(notebook["cells"][1:], 1):
        cell["execution_count"] = count
    notebook["metadata"]["papermill"] = {"exception": None, "duration": 1.5}
    return notebook


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository with the project's own configuration and style."""
    root = tmp_path / "repository"
    (root / "notebooks").mkdir(parents=True)
    shutil.copytree(PROJECT / "book" / "_static", root / "book" / "_static")
    shutil.copytree(PROJECT / "book" / "_extra", root / "book" / "_extra")
    shutil.copy(PROJECT / "_config.yml", root)
    (root / "book" / "references.bib").write_text("")
    (root / "book" / "_toc.yml").write_text(TOC)
    (root / "data" / "reference").mkdir(parents=True)
    (root / "data" / "reference" / f"{CHAPTER}.json").write_text('{"tau": 1.618}')
    (root / "book" / "intro.md").write_text(INTRO)
    (root / "book" / "status.md").write_text(STATUS)
    (root / "notebooks" / f"{CHAPTER}.ipynb").write_text(json.dumps(source_notebook()))
    return root


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Run:
    run = Run(RunSpec.make("tiny", "smoke"), root=tmp_path / "runs")
    for folder in ("results", "figures", "executed"):
        run.path(folder).mkdir(parents=True)
    run.begin()
    run.path("results", f"{CHAPTER}.json").write_text(json.dumps(RESULTS))
    for name in ("plane", "05-plane"):
        run.path("figures", f"{name}.png").write_bytes(base64.b64decode(PIXEL))
    executed = run.path("executed", f"{CHAPTER}.ipynb")
    executed.write_text(json.dumps(executed_notebook()))
    # This chapter is none of the project's: what is current is looked at in test_chapters.py.
    monkeypatch.setattr(
        stage, "stale", lambda run, chapter: [] if executed.exists() else ["never made"]
    )
    return run


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "spec", "shown"),
    [
        ("default.layers", "", "[2, 4, 5]"),
        ("default.score", ".2f", "0.51"),
        ("default.score", "", "0.512"),
        ("default.score", ".0%", "51%"),
        ("sets.1.name", "", "chosen"),
        ("sets.0.tau", ".2f", "none"),
        ("complete", "", "yes"),
        ("drop", "+.2f", "−0.25"),
        ("drop", ".0e", "−2e−01"),
        ("_run.versions.torch", "", "2.13.0"),
    ],
)
def test_a_value_is_found_and_written(run, key, spec, shown):
    assert show(look_up(run.path("results"), f"{CHAPTER}:{key}"), spec) == shown


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nothing", "chapter:dotted.key"),
        ("06-draft-head:tau", CHAPTER),
        (f"{CHAPTER}:default.sore", "layers, score, rank"),
        (f"{CHAPTER}:sets.2.name", "no entry '2'"),
        (f"{CHAPTER}:complete.x", "no entry 'x'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_what_exists(run, reference, says):
    with pytest.raises(ResultError, match=says):
        look_up(run.path("results"), reference)


def test_a_value_that_cannot_be_written_is_refused():
    with pytest.raises(ResultError, match=r"\.2f"):
        show("chosen", ".2f")
    with pytest.raises(ResultError, match="layers, score"):
        show({"layers": [1], "score": 2})


def test_times_and_dates_are_written_for_people():
    assert [show_seconds(s) for s in (7.4, 59.7, 74.2, 3723)] == [
        "7 s",
        "1 min 00 s",
        "1 min 14 s",
        "1 h 02 min",
    ]
    assert show_date("2026-11-09") == "9 November 2026"
    assert show_date("last week") == "last week"


# --- Merging -------------------------------------------------------------------------------------


def test_an_edit_to_text_keeps_the_outputs():
    source = source_notebook()
    source["cells"][0]["source"] = "# Another title"
    source["cells"][2]["metadata"]["mystnb"]["figure"]["caption"] = "Another caption."
    source["cells"].append(
        {"id": "end", "cell_type": "markdown", "metadata": {}, "source": "The end."}
    )
    merged = merge_notebook(source, executed_notebook(), CHAPTER)
    assert [cell["id"] for cell in merged["cells"]] == [
        "title",
        "parameters",
        "parameters-of-this-run",
        "work",
        "table",
        "end",
    ]
    assert merged["cells"][0]["source"] == "# Another title"
    assert merged["cells"][3]["outputs"] == executed_notebook()["cells"][3]["outputs"]
    caption = merged["cells"][3]["metadata"]["mystnb"]["figure"]["caption"]
    assert caption == "Another caption."
    assert merged["metadata"]["papermill"] == {"exception": False}
    assert merged["metadata"]["language_info"]["name"] == "python"


def edit(notebook: dict) -> None:
    notebook["cells"][2]["source"] = "layers = [1, 2, 3]\nfig"


def add(notebook: dict) -> None:
    notebook["cells"].append(code("more", "layers"))


def remove(notebook: dict) -> None:
    del notebook["cells"][2]


def move(notebook: dict) -> None:
    notebook["cells"].reverse()


@pytest.mark.parametrize(
    ("change", "names"), [(edit, "work"), (add, "more"), (remove, "moved"), (move, "moved")]
)
def test_code_that_was_not_executed_is_refused(change, names):
    source = source_notebook()
    change(source)
    with pytest.raises(BookError, match=rf"{CHAPTER}.*{names}.*[Rr]un the chapter again"):
        merge_notebook(source, executed_notebook(), CHAPTER)


def test_lists_of_lines_and_whole_strings_are_the_same_source():
    executed = copy.deepcopy(executed_notebook())
    executed["cells"][3]["source"] = ["layers = [2, 4, 5]\n", "fig"]
    merge_notebook(source_notebook(), executed, CHAPTER)


def test_chapters_that_never_ran_are_named_before_any_work(run, repository):
    run.path("executed", f"{CHAPTER}.ipynb").unlink()
    with pytest.raises(BookError, match=rf"{CHAPTER}.*draftlayers book --model tiny"):
        build_site(run, repository)
    assert not run.folder.joinpath("site", "stage").exists()


def test_chapters_of_other_parameters_are_refused_with_their_names(run, repository, monkeypatch):
    monkeypatch.setattr(stage, "stale", lambda run, chapter: ["parameters.k", "code"])
    with pytest.raises(BookError, match=rf"{CHAPTER} \(parameters\.k, code\)\. Run: draftlayers"):
        build_site(run, repository)
    assert not run.path("site").exists()


def test_figures_are_shown_as_they_are_drawn_now(run, repository):
    staged = json.loads(stage.site_files(run, repository)[f"notebooks/{CHAPTER}.ipynb"])
    outputs = [o for cell in staged["cells"] for o in cell.get("outputs", []) if "data" in o]
    assert outputs[0]["data"]["image/png"] == PIXEL


# What makes a site anew: every file of it, its own code and its builders, and nothing else.
@pytest.mark.parametrize(
    ("cause", "again"),
    [
        ("prose", True),
        ("results", True),
        ("figure", True),
        ("reference", True),
        ("code", True),
        ("builder", True),
        ("nothing", False),
        ("remark in the code", False),
        ("saved call of a figure", False),
    ],
)
def test_a_site_is_built_again_when_a_cause_changes(
    run, repository, monkeypatch, source, cause, again
):
    before = stage.site_causes(stage.site_files(run, repository))
    if cause == "prose":
        (repository / "book" / "intro.md").write_text(INTRO + "\nMore.\n")
    elif cause == "results":
        run.path("results", f"{CHAPTER}.json").write_text(json.dumps(RESULTS | {"drop": 0.5}))
    elif cause == "figure":
        run.path("figures", "05-plane.png").write_bytes(b"drawn again")
    elif cause == "reference":
        (repository / "data" / "reference" / f"{CHAPTER}.json").write_text('{"tau": 2}')
    elif cause == "code":
        source.edit("booksite/extension.py", '"book/status"', '"book/what-ran"')
    elif cause == "remark in the code":
        source.edit("booksite/stage.py", "# Cells that papermill adds", "# What papermill adds")
    elif cause == "builder":
        monkeypatch.setattr(stage, "version", lambda package: "99")
    elif cause == "saved call of a figure":
        run.path("figures", "05-plane.safetensors").write_bytes(b"the call")
    after = stage.site_causes(stage.site_files(run, repository))
    assert bool(changed(before, after)) is again


# --- Building ------------------------------------------------------------------------------------


def test_a_book_is_built_once_and_survives_a_failed_build(run, repository, monkeypatch):
    first = build_site(run, repository)
    html = run.path("site", "html")
    assert first == html / "index.html"
    assert scan_site(html) == []

    intro = (html / "book" / "intro.html").read_text()
    assert '<span class="result">0.51</span>' in intro
    assert '<span class="result">1.62</span>' in intro  # from data/reference
    assert '<span class="result">[2, 4, 5]</span>' in intro
    assert "Table 1" in intro and "–" in intro
    assert "_static/mathjax/tex-svg.js" in intro
    chapter = (html / "notebooks" / f"{CHAPTER}.html").read_text()
    status = (html / "book" / "status.html").read_text()
    for page in (intro, chapter, status):
        for fact in ("tiny", "smoke", "a test machine", "29 November 2026", "torch 2.13.0"):
            assert fact in page.partition("run-banner")[2]
    assert 'alt="One coloured pixel"' in chapter
    assert "<td><p>0.5</p></td>" in chapter, "a table that a cell displays"
    assert "Parameters of this run" in chapter and "chatter" not in chapter
    assert "1 min 14 s" in status and "ttt_steps" in status

    # Nothing changed: nothing is built.
    with monkeypatch.context() as nothing:
        nothing.setattr(stage.subprocess, "run", lambda *a, **k: pytest.fail("built again"))
        assert build_site(run, repository) == first

    # A missing number, a dead reference, an aborted notebook: each is named, the book stays.
    page = repository / "book" / "intro.md"
    page.write_text(INTRO + f"\n{{result}}`{CHAPTER}:default.sore`\n\n{{doc}}`nowhere`\n")
    aborted = executed_notebook()
    aborted["metadata"]["papermill"]["exception"] = True
    run.path("executed", f"{CHAPTER}.ipynb").write_text(json.dumps(aborted))
    with pytest.raises(BookError) as failure:
        build_site(run, repository)
    said = str(failure.value)
    assert "book/intro.md" in said and "default.sore" in said and "nowhere" in said
    assert "stopped with an error" in said and str(run.folder / "site" / "build.log") in said
    assert (html / "book" / "intro.html").read_text() == intro


# --- The scan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "from outside"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "from outside"),
        ('<img alt="a plot" src="http://example.org/x.png">', "from outside"),
        ("<style>@import 'https://example.org/x.css';</style>", "from outside"),
        ('<p style="background: url(https://example.org/x.png)">x</p>', "from outside"),
        ('<img src="plot.png">', "no alt text"),
        ('<img src="plot.png" alt=" ">', "no alt text"),
        ('<img src="plot.png" alt="_images/plot.png">', "no alt text"),
        ('<a href="missing.html">x</a>', "does not exist"),
        ('<a href="page.html#nowhere">x</a>', "that place does not exist"),
        ('<img src="gone.png" alt="a plot">', "does not exist"),
        ("<pre>Traceback (most recent call last)</pre>", "traceback"),
    ],
)
def test_the_scan_finds_each_fault(tmp_path, body, fault):
    (tmp_path / "plot.png").touch()
    page = tmp_path / "page.html"
    page.write_text(f"<html><body>{body}</body></html>")
    (found,) = scan_site(tmp_path)
    assert "page.html" in found and fault in found


def test_the_scan_leaves_good_pages_alone(tmp_path):
    (tmp_path / "plot.png").touch()
    (tmp_path / "style.css").write_text("p { background: url('plot.png') }")
    (tmp_path / "page.html").write_text(
        '<h1 id="top">x</h1><a href="#top">up</a> <a href="https://example.org">out</a>'
        '<img src="plot.png" alt="A plot"><link rel="canonical" href="https://example.org/">'
        '<a href="mailto:reader@example.org">write</a><a href="page.html?q=1#top">again</a>'
    )
    assert scan_site(tmp_path) == []


def test_the_scan_reads_style_sheets(tmp_path):
    (tmp_path / "style.css").write_text("p { background: url(//example.org/plot.png) }")
    (found,) = scan_site(tmp_path)
    assert found.startswith("style.css")


# --- What is in the repository -------------------------------------------------------------------


def test_the_table_of_contents_is_complete():
    listed = documents(PROJECT / "book" / "_toc.yml")
    pages = {f"book/{path.stem}" for path in (PROJECT / "book").glob("*.md")}
    assert set(listed) == pages | {f"notebooks/{chapter}" for chapter in CHAPTERS}
    assert [name for name in listed if name.startswith("notebooks/")] == [
        f"notebooks/{chapter}" for chapter in CHAPTERS
    ]


@pytest.mark.parametrize(
    "path", sorted((PROJECT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_can_be_run_read_and_compared(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "outputs in git"
    (parameters,) = (cell for cell in code if "parameters" in cell.metadata.get("tags", []))
    names = [node.targets[0].id for node in ast.parse(parameters.source).body]
    assert names == ["model", "profile", "overrides"]
    for cell in code:
        if figure := cell.metadata.get("mystnb", {}).get("figure"):
            assert figure["name"] and figure["caption"]
            assert cell.metadata.mystnb.image.alt
