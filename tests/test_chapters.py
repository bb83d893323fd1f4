"""All chapters, executed in the smoke profile on a tiny random model, and the book built of them.

The run is made once, through the command a user gives; each test looks at another side of it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import nbformat
import pytest
import torch
from typer.testing import CliRunner

from draftlayers import chapters, current, jobs, runs
from draftlayers.booksite.stage import BookError, build_site
from draftlayers.chapters import NOTEBOOKS, record_path, stale, up_to_date
from draftlayers.cli import app
from draftlayers.current import read_record
from draftlayers.figures.drawing import redraw_stale
from draftlayers.jobs import run_chapters
from draftlayers.project import PROJECT, UserError
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS, PROFILES, RunSpec


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A finished smoke run, and what the command printed."""
    # A name with all that a shell or a template could misread.
    root = tmp_path_factory.mktemp("runs") / "it's {here} & (now) $HOME" / "läufe [1]" / "-x"
    run = Run(RunSpec.make("tiny", "smoke"), root)
    done = command("book", root)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done


def command(name, root, *more):
    # One thread: two of these tests may share the cores.
    arguments = [
        "--model",
        "tiny",
        "--profile",
        "smoke",
        "--runs",
        str(root),
        "--cores",
        "1",
        *more,
    ]
    return subprocess.run(
        [sys.executable, "-m", "draftlayers.cli", name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_sources_are_clean(chapter):
    notebook = nbformat.read(NOTEBOOKS / f"{chapter}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert [c.source for c in tagged] == [
        'model = "smollm2-135m"\nprofile = "quick"\noverrides = {}'
    ]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            if "figure" in cell.metadata.get("mystnb", {}):
                assert cell.metadata["mystnb"]["image"]["alt"], cell.id
                assert cell.metadata["mystnb"]["figure"]["caption"], cell.id
        assert "glue" not in cell.source
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_every_chapter_leaves_results_and_an_executed_notebook(smoke):
    run, _ = smoke
    for chapter in CHAPTERS:
        assert run.results(chapter)["_run"]["model"] == "tiny"
        notebook = nbformat.read(run.path("executed", f"{chapter}.ipynb"), as_version=4)
        assert not notebook.metadata.papermill["exception"]
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                assert output.output_type != "error"
                assert output.get("name") != "stderr", (chapter, cell.id, output.text)


def test_results_agree_with_each_other(smoke):
    run, _ = smoke
    results = {chapter: run.results(chapter) for chapter in CHAPTERS}
    n = results["01-hidden-states"]["n_layers"]
    chosen = results["05-selection"]["chosen"]["layers"]
    assert n == 8 and len(chosen) == run.spec.k
    assert all(1 <= b < n for b in chosen) and all(a < b for a, b in pairwise(chosen))
    heads = results["06-draft-head"]["heads"]
    assert {tuple(head["layers"]) for head in heads.values()} >= {(2, 4, 5), tuple(chosen)}
    speed = results["07-speedup"]
    assert speed["identical"] == 1
    for method in speed["methods"].values():
        assert 1 <= method["tau"] <= run.spec.depth + 1


def test_select_finds_what_the_chapters_found_number_for_number(smoke, tmp_path):
    run, _ = smoke
    pairs = [f"-p{name}={value}" for name, value in PROFILES["smoke"].items()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the chapters had
    try:
        done = CliRunner().invoke(
            app, ["select", "tiny", *pairs, "--json", "--runs", str(tmp_path)]
        )
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    results = {chapter[:2]: run.results(chapter) for chapter in CHAPTERS[:5]}
    assert found["chosen"] == results["05"]["chosen"]["layers"]
    assert found["n_layers"] == results["01"]["n_layers"]
    assert found["rows"] == results["03"]["kept_rows"] == results["04"]["rows"]
    assert found["kept_share"] == results["03"]["share"] == results["04"]["share"]
    assert found["reason"] == results["03"]["reason"]
    assert found["same_choice_in_bootstrap"] == results["05"]["stability"]["chosen_share"]
    rows = {row["name"]: row for row in found["sets"]}
    assert rows["chosen"]["score"] == results["05"]["chosen"]["score"]
    assert rows["default"]["rank"] == results["05"]["default"]["rank"]
    for name, layers in results["05"]["layers"].items():
        assert rows[name]["layers"] == layers
        assert rows[name]["score"] == results["05"]["scores"][name]


def test_chapters_agree_on_how_stable_the_choice_is(smoke):
    """Chapter 3 recommends a share by the numbers that chapter 5 reports."""
    run, _ = smoke
    third, fifth = run.results("03-token-filtering"), run.results("05-selection")
    used = next(level for level in third["sweep"] if level["share"] >= third["share"])
    assert used["inclusion"] == fifth["stability"]["inclusion"]
    assert used["layers"] == fifth["chosen"]["layers"]
    if third["recommended"]:
        assert min(used["inclusion"][b] for b in used["layers"]) >= 0.9


def test_figures_are_written_for_every_chapter(smoke):
    run, _ = smoke
    for chapter in CHAPTERS:
        assert list(run.path("figures").glob(f"{chapter[:2]}-*.svg")), chapter


def test_the_command_reports_progress_and_ends_with_the_first_page(smoke):
    run, done = smoke
    for number, chapter in enumerate(CHAPTERS, 1):
        assert f"[{number}/{len(CHAPTERS)}] {chapter}" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == str(run.path("site", "html", "index.html"))
    assert run.path("site", "html", "index.html").exists()


def test_the_site_holds_every_chapter_with_its_figures(smoke):
    run, _ = smoke
    html = run.path("site", "html")
    for chapter in CHAPTERS:
        page = (html / "notebooks" / f"{chapter}.html").read_text()
        assert "Traceback" not in page and "<img" in page


def test_nothing_changed_means_nothing_is_done(smoke):
    run, _ = smoke
    before = {chapter: run.path("executed", f"{chapter}.ipynb").stat() for chapter in CHAPTERS}
    done = command("book", run.folder.parents[1])
    assert done.returncode == 0 and "[1/" not in done.stdout
    for chapter, then in before.items():
        assert run.path("executed", f"{chapter}.ipynb").stat().st_mtime_ns == then.st_mtime_ns


# --- What is current -----------------------------------------------------------------------------

NUMBERS = [chapter[:2] for chapter in CHAPTERS]


@pytest.fixture
def finished(smoke, tmp_path):
    """A copy of the finished run, to be damaged."""
    run, _ = smoke
    skip = shutil.ignore_patterns("site", ".snakemake", ".lock")
    shutil.copytree(run.folder, tmp_path / "tiny" / "smoke", ignore=skip)
    copy = Run(RunSpec.make("tiny", "smoke"), tmp_path)
    assert up_to_date(copy)
    return copy


def why(run):
    """Numbers of the chapters that are not current."""
    return [chapter[:2] for chapter in CHAPTERS if stale(run, chapter)]


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, []),
        ({"decode_tokens": 6}, ["07"]),
        ({"heldout_prompts": 5}, ["07"]),
        ({"learning_rate": 1e-4}, ["06"]),
        ({"cka_threshold": 0.8}, ["05"]),
        ({"keep": 0.5}, ["03", "04"]),
        ({"answer_tokens": 32}, ["01", "06"]),
        ({"seed": 1}, ["01", "02", "03", "04", "05", "06"]),
        ({"day": "2001-01-01"}, ["01", "02", "06", "07"]),
    ],
)
def test_a_parameter_concerns_the_chapters_that_read_it(finished, tmp_path, changes, numbers):
    """Later ones follow only if they read a result that then comes out differently."""
    run = Run(RunSpec.make("tiny", "smoke", **changes), tmp_path)
    assert why(run) == numbers
    for number in numbers:
        (reason,) = changes
        assert f"parameters.{reason}" in stale(run, CHAPTERS[int(number) - 1])


def attributes_of_spec(chapter):
    """Parameters that a chapter's code names: ``run.spec.k`` and ``spec.k``."""
    notebook = json.loads((NOTEBOOKS / f"{chapter}.ipynb").read_text())
    source = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    )
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            base = node.value
            if getattr(base, "attr", getattr(base, "id", "")) == "spec":
                found.add(node.attr)
    return found & set(RunSpec.model_fields)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_record_holds_every_parameter_that_its_chapter_reads(smoke, chapter):
    causes = read_record(record_path(smoke[0], chapter))["causes"]
    assert attributes_of_spec(chapter) <= set(causes["parameters"])


def test_every_parameter_is_read_by_a_chapter(smoke):
    run, _ = smoke
    records = [read_record(record_path(run, chapter)) for chapter in CHAPTERS]
    read = {name for record in records for name in record["causes"]["parameters"]}
    assert set(RunSpec.model_fields) - read <= {"profile"}


# (file of the package, what changes in it, chapters that compute with it)
EDITS = {
    "nothing": ("cka", "", "", []),
    "a constant of the loss": ("ttt", "= 0.8  #", "= 0.7  #", ["06"]),
    "a constant of the collection": ("states", "SHARD = 32", "SHARD = 16", NUMBERS[:6]),
    "a constant of selection": ("selection", "BEAM_POOL = 20", "BEAM_POOL = 19", None),
    "a docstring": ("spec", '"""What a run is', '"""What a run was', []),
    "a remark": ("ttt", "# weight of step i", "# a weight of step i", []),
    "a profile's default": ("spec", "(256, 1024, 4096)", "(257, 1024, 4096)", []),
    "the label of a figure": ("figures/speedup", "new tokens in the pass", "tokens", []),
    "how chapters are executed": (
        "chapters",
        "autosave_cell_every=30",
        "autosave_cell_every=9",
        [],
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_code_concerns_the_chapters_that_compute_with_it(finished, source, edit):
    module, old, new, numbers = EDITS[edit]
    if old and old not in (source.folder / f"{module}.py").read_text():
        pytest.fail(f"{module} does not hold {old!r}")
    source.edit(f"{module}.py", old, new)
    if numbers is None:  # chapters 3 and 5 select; others may import a rule
        assert {"03", "05"} <= set(why(finished)) < set(NUMBERS)
    else:
        assert why(finished) == numbers


def test_the_label_of_a_figure_redraws_the_figures_of_its_chapter_and_nothing_else(
    finished, source, monkeypatch
):
    source.edit("figures/filtering.py", "share of positions kept", "part of positions kept")
    assert why(finished) == []
    drawn = redraw_stale(finished, dry=True).drawn
    assert drawn and {name[:2] for name in drawn} == {"03"}
    monkeypatch.setattr(jobs, "_run_jobs", lambda *_: pytest.fail("a chapter was executed"))
    then = finished.path("figures", f"{drawn[0]}.png").stat().st_mtime_ns
    run_chapters(finished)
    assert finished.path("figures", f"{drawn[0]}.png").stat().st_mtime_ns > then
    assert not redraw_stale(finished, dry=True)


def delete(*parts):
    def change(run, monkeypatch):
        path = next(run.folder.glob("/".join(parts)))
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(*parts):
    def change(run, monkeypatch):
        path = next(run.folder.glob("/".join(parts)))
        path.write_bytes(path.read_bytes()[:-20])

    return change


def cut_states(run, monkeypatch):
    """Of the states that chapter 1 collected."""
    cut(run.results("01-hidden-states")["store"], "*.safetensors")(run, monkeypatch)


def by_hand(run, monkeypatch):
    """Somebody has executed chapter 5 with another k in Jupyter."""
    run.write_results("05-selection", {"chosen": {"layers": [1, 2]}})


def another_target(run, monkeypatch):
    inner = chapters.find_weights
    monkeypatch.setattr(
        chapters, "find_weights", lambda name: replace(inner(name), digest="retrained")
    )


def another_library(run, monkeypatch):
    monkeypatch.setattr(current, "version", lambda name: "99.0")


def another_reference(run, monkeypatch):
    monkeypatch.setattr(
        runs,
        "file_digest",
        lambda path: "edited" if "06-draft-head" in str(path) else current.file_digest(path),
    )


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        (delete("states"), ["01"]),
        (cut_states, ["01"]),
        (delete("heads"), ["06"]),
        (delete("results", "03-token-filtering.json"), ["03", "04", "05"]),
        (cut("results", "02-entropy.safetensors"), ["02", "03", "05"]),
        (delete("executed", "04-cka.ipynb"), ["04"]),
        (delete("executed", "04-cka.json"), ["04"]),
        (cut("executed", "04-cka.ipynb"), ["04"]),
        (delete("figures", "03-stability.safetensors"), ["03"]),
        (by_hand, ["05", "06"]),
        (another_target, NUMBERS),
        (another_library, NUMBERS),
        (another_reference, ["06"]),
    ],
)
def test_what_is_missing_or_different_is_seen(finished, monkeypatch, change, numbers):
    change(finished, monkeypatch)
    assert set(numbers) <= set(why(finished)) <= set(numbers) | {"06", "07"}


def test_a_picture_that_is_gone_is_drawn_again_without_its_chapter(finished):
    finished.path("figures", "03-stability.png").unlink()
    assert why(finished) == [] and redraw_stale(finished).drawn == ["03-stability"]
    assert finished.path("figures", "03-stability.png").exists()


def test_a_book_of_other_parameters_is_refused(finished, tmp_path):
    other = Run(RunSpec.make("tiny", "smoke", cka_threshold=0.8), tmp_path)
    with pytest.raises(BookError, match=r"05-selection \(parameters\.cka_threshold\)"):
        build_site(other)
    assert not other.path("site").exists()


def test_chapters_after_one_that_gave_the_same_results_are_not_executed(finished):
    """Damage to chapter 4's notebook costs chapter 4; its numbers are what they were."""
    path = finished.path("results", "04-cka.json")
    before = path.stat().st_mtime_ns
    finished.path("executed", "04-cka.ipynb").unlink()
    assert why(finished) == ["04"]
    with finished.hold():
        finished.begin()
        chapters.execute(finished, "04-cka")
    assert why(finished) == [] and up_to_date(finished)
    assert path.stat().st_mtime_ns > before  # written again, with the same numbers


@pytest.mark.slow  # the same through the command
def test_a_command_executes_only_the_chapter_that_is_damaged(finished, tmp_path):
    finished.path("executed", "04-cka.ipynb").unlink()
    done = command("run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[4/7] 04-cka\n" in done.stdout and "[5/7] 05-selection: unchanged" in done.stdout
    assert "[3/7]" not in done.stdout and "draft head 2-4-5-s0: unchanged" in done.stdout
    assert up_to_date(finished)


# --- Executing -----------------------------------------------------------------------------------


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A copy of the notebooks that a test may edit."""
    copy = tmp_path / "a 'checkout' {x}" / "notebooks"
    shutil.copytree(NOTEBOOKS, copy)
    monkeypatch.setattr(chapters, "NOTEBOOKS", copy)
    return copy


def edit(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def test_prose_changes_no_chapter_but_code_does(notebooks, finished):
    path = notebooks / "04-cka.ipynb"

    def reword(nb):
        next(c for c in nb["cells"] if c["cell_type"] == "markdown")["source"] = ["# New words"]

    edit(path, reword)
    assert why(finished) == []
    new = {"cell_type": "code", "id": "new", "source": ["1 + 1  # a remark"]}
    edit(path, lambda nb: nb["cells"].append(new))
    assert stale(finished, "04-cka") == ["code"]
    before = chapters.chapter_code(path)
    edit(path, lambda nb: nb["cells"][-1].update(source=["1 + 1"]))
    assert chapters.chapter_code(path) == before
    # The book finds outputs by cell id, so a renamed cell has to be executed again.
    edit(path, lambda nb: nb["cells"][-1].update(id="renamed"))
    assert chapters.chapter_code(path) != before


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("raise RuntimeError('deliberate')", r"RuntimeError: deliberate\n(.*\n)+the notebook up"),
        ("from draftlayers.project import UserError\nraise UserError('A mistake.')", "A mistake."),
        ("raise OSError(28, 'No space left on device')", None),
    ],
)
def test_a_failing_cell_is_named_and_the_good_notebook_stays(notebooks, run, cell, said):
    def broken(nb):
        first = next(c for c in nb["cells"] if c["cell_type"] == "code" and "open_chapter" in
                     "".join(c["source"]))  # fmt: skip
        first["source"] = [cell]

    good = run.path("executed", "01-hidden-states.ipynb")
    good.parent.mkdir(parents=True)
    good.write_text("the last good one")
    edit(notebooks / "01-hidden-states.ipynb", broken)
    if said:
        expected = rf"^chapter 01-hidden-states stopped in cell \d+: {said}"
    else:
        expected = "^there is no room left for chapter 01-hidden-states in .*"
    with pytest.raises(UserError, match=expected) as mistake:
        chapters.execute(run, "01-hidden-states")
    assert "RuntimeError" in cell or "\n" not in str(mistake.value)
    assert good.read_text() == "the last good one"
    assert run.path("executed", ".01-hidden-states.partial.ipynb").exists()


@pytest.mark.slow
def test_a_notebook_executed_by_hand_brings_earlier_chapters_up_to_date(tmp_path):
    """As ``jupyter execute`` does: no command holds the run, nothing is there yet."""
    script = f"""
import papermill
papermill.execute_notebook(
    {str(NOTEBOOKS / "02-entropy.ipynb")!r}, {str(tmp_path / "out.ipynb")!r},
    parameters=dict(model="tiny", profile="smoke"), cwd={str(NOTEBOOKS)!r}, progress_bar=False,
)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=PROJECT,
        env={**os.environ, "DRAFTLAYERS_RUNS": str(tmp_path / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = Run.stored(tmp_path / "runs" / "tiny" / "smoke")
    assert not stale(run, "01-hidden-states") and run.results("02-entropy")["rows"]
    assert stale(run, "02-entropy") == ["never made"]  # what a hand made is no part of a book
