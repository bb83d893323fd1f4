"""Runs are described by types: mistakes are refused in words, files are whole or absent."""

from __future__ import annotations

import json
import os

import matplotlib.pyplot as plt
import pytest
import torch

from draftlayers.spec import (
    PROFILES,
    Run,
    RunSpec,
    UserError,
    fingerprint,
    slug,
    write_atomically,
)


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


def test_slug_is_a_plain_folder_name(tmp_path):
    folder = tmp_path / "My Model"
    folder.mkdir()
    assert slug("org/Name-1B") == "org-name-1b"
    assert slug(str(folder)) == "my-model"
    assert slug(f"{folder}/") == "my-model"


def test_fingerprint_sees_order_and_value():
    assert fingerprint(1, [2, 3]) == fingerprint(1, (2, 3))
    marks = {fingerprint(1, 2), fingerprint(2, 1), fingerprint([1, 2]), fingerprint("1", 2)}
    assert len(marks) == 4


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_results_are_plain_and_say_where_they_come_from(run):
    run.write_results("02-entropy", {"scores": torch.tensor([1.0, 2.0]), "layers": (1, 2)})
    stored = run.results("02-entropy")
    assert stored["scores"] == [1.0, 2.0] and stored["layers"] == [1, 2]
    assert {"model", "profile", "device", "date", "versions", "seconds"} <= set(stored["_run"])


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


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot be written"):
        Run(RunSpec.make("tiny", "smoke"), tmp_path / "file")


def test_figures_have_the_same_bytes_every_time(run):
    def draw():
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        run.save_figure(figure, "line")
        plt.close(figure)
        return [run.path("figures", f"line.{kind}").read_bytes() for kind in ("svg", "png")]

    assert draw() == draw()


def test_progress_goes_where_the_runner_listens(run, tmp_path, monkeypatch, capsys):
    run.say("to the terminal")
    monkeypatch.setenv("DRAFTLAYERS_PROGRESS", str(tmp_path / "lines"))
    run.say("to the runner")
    assert capsys.readouterr().out == "to the terminal\n"
    assert (tmp_path / "lines").read_text() == "to the runner\n"


def test_the_spec_is_kept_with_the_run(run):
    assert RunSpec.model_validate(json.loads(run.path("spec.json").read_text())) == run.spec
