"""Runs are described by types: mistakes are refused in words, files are whole or absent."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest
import torch

from draftlayers import spec
from draftlayers.project import UserError
from draftlayers.spec import HOLDER, PROFILES, Run, RunSpec


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_complete(profile):
    assert RunSpec.make("tiny", profile).profile == profile


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("kk=3", ["unknown parameter 'kk'", "draft_vocab"]),
        ("k=three", ["'k'", "integer"]),
        ("k=2.5", ["'k'", "integer"]),
        ("k=0", ["'k'", "greater than or equal to 1"]),
        ("keep=1.5", ["'keep'", "less than or equal to 1"]),
        ("entropy=shannon", ["'entropy'", "logit_lens"]),
        ("fc_norm=maybe", ["'fc_norm'", "boolean"]),
        ("seed=null", ["'seed'", "integer"]),
        ("k", ["no value"]),
        ("model=x", ["--model"]),
    ],
)
def test_wrong_parameters_are_explained(pair, words):
    with pytest.raises(UserError) as error:
        RunSpec.parse_overrides([pair])
    for word in words:
        assert word in str(error.value)


def test_parameters_arrive_with_their_types():
    values = RunSpec.parse_overrides(["learning_rate=1e-3", "k=4", "fc_norm=true", "keep=auto"])
    assert values == {"learning_rate": 1e-3, "k": 4, "fc_norm": True, "keep": None}
    assert type(values["k"]) is int


@pytest.mark.parametrize("value", ["3", 3.5, None])
def test_a_notebook_parameter_of_the_wrong_type_is_refused(value):
    with pytest.raises(UserError, match="'k'"):
        RunSpec.make("tiny", "smoke", k=value)


def test_overrides_are_what_differs_from_the_profile():
    assert RunSpec.make("tiny", "smoke", k=4, seed=0).overrides == {"k": 4}


def test_a_path_is_meant_from_where_it_is_typed(tmp_path, monkeypatch):
    (tmp_path / "models" / "ckpt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "models" / "ckpt")
    for typed in ("models/ckpt", "./models/ckpt", "models/../models/ckpt", whole):
        assert RunSpec.make(typed).model == whole
    assert RunSpec.make("org/name").model == "org/name"


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("draft_vocab=none", "parameter 'draft_vocab': should be a valid integer"),
        ("head_epochs=inf", "parameter 'head_epochs': should be a finite number, got 'inf'"),
        ("head_epochs=nan", "parameter 'head_epochs': should be a finite number"),
        ("head_epochs=1e-300", "parameter 'head_epochs': should be greater than"),
        ("head_epochs=1e9", "parameter 'head_epochs': should be less than"),
        ("keep=1e-400", "parameter 'keep': should be greater than 0, got '1e-400'"),
        ("keep=-inf", "parameter 'keep': should be a finite number"),
        ("learning_rate=nan", "parameter 'learning_rate': should be a finite number"),
        ("learning_rate=-0.1", "parameter 'learning_rate': should be greater than"),
        ("seed=-1", "parameter 'seed': should be greater than or equal to 0"),
        ("seed=4294967296", "parameter 'seed': should be less than 4294967296"),
        ("bootstrap=1000000000000", "parameter 'bootstrap': should be less than or equal"),
        ("k=" + "9" * 5000, "parameter 'k': Unable to parse"),
        ("fc_norm=2", "parameter 'fc_norm': should be a valid boolean"),
        ("k==3", "parameter 'k': should be a valid integer"),
        ("k=3=4", "parameter 'k': should be a valid integer"),
        ("k=", "parameter 'k=' has no value; write it as name=value"),
        ("=3", "parameter '=3' has no name; write it as name=value"),
        ("", "parameter '' has no name; write it as name=value"),
        ("learning-rate=1", "unknown parameter 'learning-rate'; did you mean 'learning_rate'? The"),
        ("heldout_prompt=1", "unknown parameter 'heldout_prompt'; did you mean 'heldout_prompts'?"),
        ("xyz=1", "unknown parameter 'xyz'; the parameters are answer_tokens, "),
        ("profile=full", "set the profile with --profile, not with -p"),
        ("day=2026-02-30", "parameter 'day': should be a date of the calendar as yyyy-mm-dd, got"),
        ("day=20260131", "parameter 'day': should be a date"),
        ("day=2026-W05-6", "parameter 'day': should be a date"),
        ("day=٢٠٢٦-01-31", "parameter 'day': should be a date"),
    ],
)
def test_a_mistake_is_one_line(pair, said):
    with pytest.raises(UserError) as error:
        RunSpec.parse_overrides([pair])
    assert str(error.value).startswith(said)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("text", "value"), [("YES", True), ("On", True), ("1", True), ("f", False), ("no", False)]
)
def test_booleans_are_spelled_in_many_ways(text, value):
    assert RunSpec.parse_overrides([f"fc_norm = {text} "]) == {"fc_norm": value}


def test_of_several_values_the_last_counts_and_every_mistake_has_a_line():
    assert RunSpec.parse_overrides(["k=2", "k=4", "day=None"]) == {"k": 4, "day": None}
    with pytest.raises(UserError) as error:
        RunSpec.parse_overrides(["k=x", "keep=2", "seed=1"])
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "parameter 'keep'", "parameter 'k'",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "values", "said"),
    [
        ("quick", {"keep": 1e-300}, "parameter 'keep': 1e-300 of 8000 positions are 0"),
        ("smoke", {"keep": 0.01}, "parameter 'keep': 0.01 of 1500 positions are 15, and stat"),
        ("quick", {"validation_conversations": 241}, "validation_conversations=241 exceeds train"),
        ("quick", {"k": 10**5000}, "parameter 'k': should be less than or equal to 8, got a num"),
        ("quick", {"k": True}, "parameter 'k': should be a valid integer, got True"),
        ("quick", {"nonsense\n": 1}, "unknown parameter 'nonsense\\n'; the parameters are"),
        ("quick", {"entropy": {"a": "x" * 999}}, "parameter 'entropy': should be 'logit_lens'"),
        ("slow", {}, "unknown profile 'slow'; the profiles are smoke, quick, full"),
    ],
)
def test_values_that_cannot_be_or_not_together_are_refused(profile, values, said):
    with pytest.raises(UserError) as error:
        RunSpec.make("tiny", profile, **values)
    assert str(error.value).startswith(said) and len(str(error.value).splitlines()) == 1


def test_what_is_too_few_in_one_profile_is_enough_in_another():
    values = RunSpec.parse_overrides(["keep=0.003"])
    assert RunSpec.make("tiny", "full", **values).keep == 0.003
    with pytest.raises(UserError, match="raise keep or stat_tokens"):
        RunSpec.make("tiny", "quick", **values)


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_no_model(name):
    with pytest.raises(UserError, match="'model'"):
        RunSpec.make(name)


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
from draftlayers.spec import Run, RunSpec
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

    monkeypatch.setattr(spec.datetime, "date", Tomorrow)
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
