"""All chapters, executed in the smoke profile on a tiny random model, and the book built of them.

The run is made once, through the command a user gives; each test looks at another side of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise

import nbformat
import pytest

from draftlayers import chapters
from draftlayers.chapters import NOTEBOOKS, chapter_stamp, modules_stamp, notebook_code
from draftlayers.spec import CHAPTERS, PROFILES, Run, RunSpec, UserError


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A finished smoke run, and what the command printed."""
    root = tmp_path_factory.mktemp("runs")
    run = Run(RunSpec.make("tiny", "smoke"), root)
    done = command("book", root)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done


def command(name, root, *more):
    arguments = ["--model", "tiny", "--profile", "smoke", "--runs", str(root), *more]
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


def test_a_parameter_reruns_its_chapter_and_the_later_ones_only(smoke):
    run, _ = smoke
    changed = Run(RunSpec.make("tiny", "smoke", decode_tokens=6), run.folder.parents[1])
    stamps = {c: run.path("executed", f"{c}.stamp").read_text() for c in CHAPTERS}
    different = [c for c in CHAPTERS if chapter_stamp(changed, c) != stamps[c]]
    assert different == ["07-speedup"]
    changed = Run(RunSpec.make("tiny", "smoke", bootstrap=11), run.folder.parents[1])
    different = [c for c in CHAPTERS if chapter_stamp(changed, c) != stamps[c]]
    assert different == list(CHAPTERS[2:])


def test_work_of_another_day_is_forgotten(smoke, tmp_path):
    """Marks decide, not dates or a record of the engine: a mark that does not fit is removed."""
    run, _ = smoke
    shutil.copytree(run.folder / "executed", tmp_path / "tiny" / "smoke" / "executed")
    shutil.copytree(
        run.folder / "heads",
        tmp_path / "tiny" / "smoke" / "heads",
        ignore=lambda folder, names: [n for n in names if not n.endswith(".stamp")],
    )
    same = Run(run.spec, tmp_path)
    chapters.forget_stale(same)
    assert len(list(same.folder.glob("executed/*.stamp"))) == len(CHAPTERS)
    heads = len(list(same.folder.glob("heads/*.stamp")))
    assert heads == 2
    changed = Run(RunSpec.make("tiny", "smoke", learning_rate=1e-4), tmp_path)
    chapters.forget_stale(changed)
    left = sorted(path.stem for path in same.folder.glob("executed/*.stamp"))
    assert left == list(CHAPTERS[:5]) and not list(same.folder.glob("heads/*.stamp"))


def test_every_parameter_belongs_to_a_chapter():
    fields = [name for names in chapters._FIRST_USE.values() for name in names.split()]
    assert sorted(fields) == sorted(set(RunSpec.model_fields) - {"profile"})
    assert set(PROFILES["quick"]) <= set(fields)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the notebooks and modules that a test may edit."""
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks")
    shutil.copytree(chapters.SOURCE, tmp_path / "draftlayers")
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(chapters, "SOURCE", tmp_path / "draftlayers")
    return tmp_path


def edit(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def test_prose_and_comments_change_no_stamp_but_code_does(sources, run):
    chapter = "04-cka"
    notebook = sources / "notebooks" / f"{chapter}.ipynb"
    before = chapter_stamp(run, chapter)

    def reword(nb):
        next(c for c in nb["cells"] if c["cell_type"] == "markdown")["source"] = ["# New words"]

    edit(notebook, reword)
    module = sources / "draftlayers" / "cka.py"
    module.write_text(module.read_text() + "\n# a remark\n")
    assert chapter_stamp(run, chapter) == before

    module.write_text(module.read_text() + "\nANOTHER = 1\n")
    assert chapter_stamp(run, chapter) != before

    before = chapter_stamp(run, chapter)
    new = {"cell_type": "code", "id": "new", "source": ["1 + 1"]}
    edit(notebook, lambda nb: nb["cells"].append(new))
    assert chapter_stamp(run, chapter) != before

    # The book finds outputs by cell id, so a renamed cell has to be executed again.
    before = chapter_stamp(run, chapter)
    edit(notebook, lambda nb: nb["cells"][-1].update(id="renamed"))
    assert chapter_stamp(run, chapter) != before


def test_a_new_reference_result_changes_the_stamp_of_its_chapter(run, tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "REFERENCE", tmp_path)
    before = {c: chapter_stamp(run, c) for c in CHAPTERS}
    (tmp_path / "06-draft-head.json").write_text("{}")
    changed = [c for c in CHAPTERS if chapter_stamp(run, c) != before[c]]
    assert changed == ["06-draft-head", "07-speedup"]


def test_a_stamp_follows_imports_through_modules():
    code = notebook_code(NOTEBOOKS / "05-selection.ipynb")
    assert modules_stamp("from draftlayers.states import collect") == modules_stamp(
        "import draftlayers.states"
    )
    assert modules_stamp(code) != modules_stamp("import draftlayers.spec")


def test_a_failing_cell_is_named_and_the_good_notebook_stays(sources, run):
    def broken(nb):
        cell = next(c for c in nb["cells"] if c["cell_type"] == "code" and "open_chapter" in
                    "".join(c["source"]))  # fmt: skip
        cell["source"] = ["raise RuntimeError('deliberate')"]

    good = run.path("executed", "01-hidden-states.ipynb")
    good.write_text("the last good one")
    edit(sources / "notebooks" / "01-hidden-states.ipynb", broken)
    with pytest.raises(UserError, match=r"01-hidden-states stopped in cell \d+.*deliberate"):
        chapters.execute(run, "01-hidden-states")
    assert good.read_text() == "the last good one"
    assert run.path("executed", ".01-hidden-states.partial.ipynb").exists()
