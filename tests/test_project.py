"""Files are whole or absent, and a record can say at which commit it was made."""

from __future__ import annotations

import os
import subprocess

import pytest

from draftlayers import project
from draftlayers.project import cache_folder, code_state, versions, write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_an_empty_variable_is_no_folder(monkeypatch):
    monkeypatch.setenv("DRAFTLAYERS_CACHE", "")
    assert cache_folder().name == "draftlayers" and cache_folder().is_absolute()


def test_versions_are_those_that_decide_numbers():
    assert {"python", "torch", "transformers", "draftlayers"} <= set(versions())


def test_a_record_names_the_commit_and_whether_the_tree_was_clean(tmp_path, monkeypatch):
    def git(*arguments):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(project, "PROJECT", tmp_path.resolve())
    code_state.cache_clear()
    assert code_state() == {"commit": None, "clean": None}
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    code_state.cache_clear()
    first = code_state()
    assert len(first["commit"]) == 40 and first["clean"] is True
    (tmp_path / "file").write_text("2")
    code_state.cache_clear()
    assert code_state() == {**first, "clean": False}
    (tmp_path / "inside").mkdir()  # a copy without history, in somebody else's repository
    monkeypatch.setattr(project, "PROJECT", (tmp_path / "inside").resolve())
    code_state.cache_clear()
    assert code_state() == {"commit": None, "clean": None}
    code_state.cache_clear()
