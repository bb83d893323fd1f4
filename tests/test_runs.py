"""Opening a run reads, one command writes at a time, and files are whole or absent."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest
import torch

from draftlayers import runs
from draftlayers.project import UserError
from draftlayers.runs import HOLDER, Run
from draftlayers.spec import RunSpec

# --- Opening and writing -------------------------------------------------------------------------


def test_opening_a_run_changes_nothing(tmp_path):
    run = Run(RunSpec.make("tiny", "smoke"), tmp_path / "runs")
    run.path("results", "01-hidden-states.json")
    assert run.spec.k == 3 and run.day
    with pytest.raises(UserError, match="no results"):
        run.results("01-hidden-states")
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_stored_when_a_command_begins(run):
    with pytest.raises(UserError, match="no run was begun"):
        Run.stored(run.folder)
    with run.hold():
        run.begin()
    stored = Run.stored(run.folder)
    assert stored.folder == run.folder
    assert stored.spec.model_dump() == {**run.spec.model_dump(), "day": run.day}


def test_a_second_writer_is_refused_and_changes_nothing(run, tmp_path):
    other = Run(RunSpec.make("tiny", "smoke", k=2), tmp_path)
    with run.hold():
        run.begin()
        before = run.path("spec.json").read_bytes()
        with pytest.raises(UserError, match="another process is working"), other.hold():
            other.begin()
        with pytest.raises(UserError, match="another process is working"):
            other.write_results("01-hidden-states", {"x": 1})
        assert run.path("spec.json").read_bytes() == before
        assert not run.path("results").exists()
    with other.hold():
        other.begin()
    assert Run.stored(run.folder).spec.k == 2


def test_processes_below_the_holder_may_write(run, tmp_path, monkeypatch):
    below = Run(RunSpec.make("tiny", "smoke"), tmp_path)
    with run.hold():
        monkeypatch.setenv(HOLDER, str(run.folder))
        below.write_results("01-hidden-states", {"x": 1})
    assert run.results("01-hidden-states")["x"] == 1


def test_a_hold_ends_with_its_process(run):
    """A killed command must not lock the run for ever."""
    code = f"""
import os
from pathlib import Path
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
with Run(RunSpec.make("tiny", "smoke"), Path({str(run.folder.parents[1])!r})).hold():
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with run.hold():
        pass


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    run = Run(RunSpec.make("tiny", "smoke"), tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"), run.hold():
        pass


def test_the_day_is_that_on_which_the_run_began(run, tmp_path, monkeypatch):
    with run.hold():
        run.begin()

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return datetime.date(2099, 1, 1)

    monkeypatch.setattr(runs.datetime, "date", Tomorrow)
    assert Run(RunSpec.make("tiny", "smoke"), tmp_path).day == run.day != "2099-01-01"
    assert Run(RunSpec.make("tiny", "smoke", day="2026-01-31"), tmp_path).day == "2026-01-31"
    assert Run(RunSpec.make("tiny", "smoke"), tmp_path / "other").day == "2099-01-01"


# --- What is read --------------------------------------------------------------------------------


def test_what_is_read_is_noted(run, tmp_path):
    assert run.reading.parameters == {}  # opening reads for itself only
    assert (run.spec.k, run.spec.keep) == (3, None)
    assert run.reading.parameters == {"k": 3, "keep": None}
    assert run.parameter("seed") == 0 and run.spec.overrides == {}
    assert set(run.reading.parameters) == {"k", "keep"}
    (tmp_path / "input").write_text("text")
    run.uses(tmp_path / "input")
    run.uses(tmp_path / "absent")
    assert run.reading.files[str(tmp_path / "absent")] == "absent"
    assert len(run.reading.files) == 2


def test_runs_may_move_with_what_they_share(run, tmp_path):
    shared = run.folder.parent / "corpus" / "asked.json"
    assert run.uses(shared) == shared
    assert run.reading.files == {"beside:corpus/asked.json": "absent"}
    shared.parent.mkdir(parents=True)
    shared.write_text("{}")
    moved = tmp_path / "moved"
    (tmp_path / "tiny").rename(tmp_path / "away")
    moved.mkdir()
    (tmp_path / "away").rename(moved / "tiny")
    there = Run(RunSpec.make("tiny", "smoke"), moved)
    assert there.input_digest("beside:corpus/asked.json") != "absent"


def test_results_that_are_read_are_noted_by_their_content(run):
    run.write_results("02-entropy", {"x": 1})
    run.results("02-entropy")
    first = run.reading.results["02-entropy"]
    run.write_arrays("02-entropy", {"cka": torch.eye(2)})
    run.arrays("02-entropy")
    second = run.reading.results["02-entropy"]
    run.write_results("02-entropy", {"x": 1})  # later, perhaps from another commit
    assert first != second == run.results_digest("02-entropy")


def test_files_for_later_work_are_noted_with_their_size(run):
    run.path("states", "a").mkdir(parents=True)
    run.path("states", "a", "shard").write_text("content")
    run.made(run.path("states", "a"))
    assert run.reading.made == {"states/a/shard": 7}


# --- Results -------------------------------------------------------------------------------------


def test_results_are_plain_and_say_where_they_come_from(run):
    run.write_results("02-entropy", {"scores": torch.tensor([1.0, 2.0]), "layers": (1, 2)})
    stored = run.results("02-entropy")
    assert stored["scores"] == [1.0, 2.0] and stored["layers"] == [1, 2]
    assert {"model", "profile", "device", "date", "versions", "seconds", "commit", "clean"} <= set(
        stored["_run"]
    )


@pytest.mark.parametrize("value", [float("nan"), torch.tensor([float("inf")])])
def test_a_number_that_does_not_exist_is_no_result(run, value):
    with pytest.raises(ValueError, match=r"02-entropy\.x"):
        run.write_results("02-entropy", {"x": value})
    assert not run.path("results", "02-entropy.json").exists()


def test_missing_results_name_the_command(run):
    with pytest.raises(UserError, match="draftlayers run"):
        run.results("04-cka")


def test_arrays_come_back(run):
    run.write_arrays("04-cka", {"cka": torch.eye(3)[:, :2]})
    assert torch.equal(run.arrays("04-cka")["cka"], torch.eye(3)[:, :2])


def test_progress_goes_where_the_runner_listens(run, tmp_path, monkeypatch, capsys):
    run.say("to the terminal")
    monkeypatch.setenv("DRAFTLAYERS_PROGRESS", str(tmp_path / "lines"))
    run.say("to the runner")
    assert capsys.readouterr().out == "to the terminal\n"
    assert (tmp_path / "lines").read_text() == "to the runner\n"
