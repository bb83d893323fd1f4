"""Finished work is used again exactly while everything that determines it is the same."""

from __future__ import annotations

import ast
import doctest
import os
import time

import pytest

from draftlayers import current
from draftlayers.current import (
    CARRIERS,
    changed,
    code_digest,
    digest,
    file_digest,
    missing,
    read_record,
    sizes,
    write_record,
)
from draftlayers.project import UserError


def test_the_examples_hold():
    assert doctest.testmod(current).failed == 0


# --- Records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causes", "names"),
    [
        ({"code": "a", "parameters": {"k": 3, "seed": 0}}, []),
        ({"code": "b", "parameters": {"k": 3, "seed": 0}}, ["code"]),
        ({"code": "a", "parameters": {"k": 2, "seed": 1}}, ["parameters.k", "parameters.seed"]),
        ({"code": "a", "parameters": {"k": 3}}, ["parameters.seed"]),
        ({"code": "a", "parameters": {"k": 3, "seed": 0}, "target": "t"}, ["target"]),
        ({"parameters": {"k": 3, "seed": 0}}, ["code"]),
        ({"code": None, "parameters": {"k": 3, "seed": 0}}, ["code"]),
    ],
)
def test_what_changed_is_named(tmp_path, causes, names):
    record = {"code": "a", "parameters": {"k": 3, "seed": 0}}
    write_record(tmp_path / "record.json", record)
    assert changed(read_record(tmp_path / "record.json"), causes) == names


def test_without_a_whole_record_nothing_has_been_made(tmp_path):
    path = tmp_path / "record.json"
    assert changed(read_record(path), {"code": "a"}) == ["never made"]
    for damaged in (b"", b'{"code": "a"', b"[1]", b"\xff\xfe"):
        path.write_bytes(damaged)
        assert read_record(path) is None


def test_tuples_and_numbers_are_what_json_makes_of_them():
    assert changed({"layers": [1, 2]}, {"layers": (1, 2)}) == []
    assert digest((1, 2)) == digest([1, 2]) != digest([2, 1])


def test_files_that_later_work_relies_on_are_missed(tmp_path):
    (tmp_path / "states").mkdir()
    for name in ("a", "b"):
        (tmp_path / "states" / name).write_text("content")
    made = sizes(tmp_path / "states", tmp_path)
    assert made == {"states/a": 7, "states/b": 7} and missing(made, tmp_path) == []
    (tmp_path / "states" / "a").write_text("cut")
    (tmp_path / "states" / "b").unlink()
    (tmp_path / "states" / "c").write_text("more does no harm")
    assert missing(made, tmp_path) == ["states/a", "states/b"]


# --- Files ---------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(current, "REMEMBERED_BYTES", 4)
    return tmp_path / "cache" / "digests.json"


def settled(path, text):
    """A file that was written a while ago."""
    path.write_text(text)
    then = time.time() - 60
    os.utime(path, (then, then))
    return path


def test_a_large_file_is_read_once(tmp_path, memory, monkeypatch):
    path = settled(tmp_path / "weights", "a large file")
    first = file_digest(path)
    assert str(path) in read_record(memory)
    monkeypatch.setattr(current.hashlib, "file_digest", None)  # reading it again would fail
    assert file_digest(path) == first


def test_a_changed_file_is_read_again(tmp_path, memory):
    path = settled(tmp_path / "weights", "a large file")
    first = file_digest(path)
    settled(path, "b large file")
    assert file_digest(path) != first
    settled(path, "a large file")
    assert file_digest(path) == first


def test_a_file_that_has_just_been_written_is_not_remembered(tmp_path, memory):
    """Within the clock's resolution it could change again, and size and time would not tell."""
    (tmp_path / "weights").write_text("a large file")
    file_digest(tmp_path / "weights")
    assert not memory.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, memory):
    path = settled(tmp_path / "weights", "a large file")
    memory.parent.write_text("a file where the folder should be")
    assert file_digest(path) == file_digest(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="nothing"):
        file_digest(tmp_path / "nothing")


# --- Code ----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in the place of this one: work imports part, part imports a package."""
    source = tmp_path / "draftlayers"
    files = {
        "__init__.py": '"""Package."""\n',
        "work.py": (
            '"""Work."""\nfrom draftlayers.part import CONSTANT\n'
            "from draftlayers import runs, spec\n"
        ),
        "part.py": "import draftlayers.deep.inner\nCONSTANT = 1  # a remark\n",
        "other.py": "X = 1\n",
        "spec.py": "FIELDS = 3\n",
        "runs.py": "WHERE = 3\n",
        "typed.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from draftlayers.other import X\n"
        ),
        "deep/__init__.py": "from .side import Y\n",
        "deep/inner.py": "def f():\n    '''Say.'''\n    return 2\n",
        "deep/side.py": "Y = 1\n",
        "figures/__init__.py": "",
        "figures/style.py": "RED = 1\n",
        "figures/cka.py": "from draftlayers.figures.style import RED\nLABEL = 'one'\n",
        "figures/entropy.py": "LABEL = 'two'\n",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    monkeypatch.setattr(current, "SOURCE", source)
    return source


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))


@pytest.mark.parametrize(
    ("file", "old", "new", "again"),
    [
        ("part.py", "CONSTANT = 1", "CONSTANT = 2", True),
        ("deep/inner.py", "return 2", "return 3", True),
        ("deep/side.py", "Y = 1", "Y = 2", True),  # the package's __init__ runs before inner
        ("part.py", "# a remark", "# another remark", False),
        ("deep/inner.py", "'''Say.'''", "'''Say more.'''", False),
        ("work.py", '"""Work."""', '"""More work."""', False),
        ("other.py", "X = 1", "X = 2", False),
        ("spec.py", "FIELDS = 3", "FIELDS = 4", False),  # what it carries is a cause of its own
        ("runs.py", "WHERE = 3", "WHERE = 4", False),
    ],
)
def test_code_counts_where_it_computes(package, file, old, new, again):
    before = code_digest("work")
    edit(package / file, old, new)
    assert (code_digest("work") != before) is again


def test_what_is_imported_for_its_type_counts(package):
    before = code_digest("typed")
    edit(package / "other.py", "X = 1", "X = 2")
    assert code_digest("typed") != before


def test_a_program_text_counts_with_what_it_imports(package):
    program = "from draftlayers.work import CONSTANT\nCONSTANT + 1\n"
    before = code_digest(source=program)
    assert code_digest(source=program + "# a remark\n") == before
    assert code_digest(source=program.replace("+ 1", "+ 2")) != before
    edit(package / "deep" / "side.py", "Y = 1", "Y = 2")
    assert code_digest(source=program) != before


def test_how_a_figure_looks_is_part_of_the_figure_and_of_no_number(package):
    program = "from draftlayers.figures import cka\n"
    number, figure, other = (
        code_digest(source=program), code_digest("figures.cka"), code_digest("figures.entropy"),
    )  # fmt: skip
    edit(package / "figures" / "style.py", "RED = 1", "RED = 2")
    assert code_digest(source=program) == number
    assert code_digest("figures.cka") != figure
    assert code_digest("figures.entropy") == other


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import draftlayers.nothing", "draftlayers.nothing"),
        ("from draftlayers import nothing", "draftlayers.nothing"),
        ("from draftlayers.nothing import x", "draftlayers.nothing"),
        ("import importlib\nimportlib.import_module('draftlayers.' + 'other')", "only known while"),
        ("__import__('draftlayers.other')", "only known while"),
    ],
)
def test_an_import_that_cannot_be_followed_is_an_error(package, line, words):
    (package / "other.py").write_text(line + "\n")
    with pytest.raises(UserError, match=words):
        code_digest("other")


def test_every_module_of_the_package_can_be_followed():
    for path in sorted(current.SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(current.SOURCE).with_suffix("").parts)
        # Drawing looks functions up by name, which is no part of what a figure shows.
        if name not in ("figures.calls", "figures.drawing"):
            assert code_digest(name.removesuffix(".__init__"))


def test_modules_that_are_left_out_compute_nothing():
    """A carrier may move data about; torch or numpy in it would be a number without a cause."""
    for name in CARRIERS - {"figures"}:  # figures draw, and are causes of their own
        path = current.SOURCE / f"{name}.py"
        files = [path] if path.exists() else list((current.SOURCE / name).rglob("*.py"))
        assert files, name
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                modules = [alias.name for alias in getattr(node, "names", [])]
                modules += [getattr(node, "module", None) or ""]
                roots = {module.split(".")[0] for module in modules}
                assert not roots & {"torch", "numpy", "scipy"}, file
