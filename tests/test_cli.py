"""The command line: mistakes are answered in a sentence before any work, results are usable."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from draftlayers.cli import _check, app
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.targets import tiny_target


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def plain(result):
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


@pytest.mark.parametrize("name", ["models", "answer", "select", "run", "book", "bench"])
def test_every_command_explains_itself(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--model", "smol"], "unknown model 'smol'"),
        (["run", "--model", "tiny", "-p", "kk=3"], "unknown parameter 'kk'"),
        (["run", "--model", "tiny", "-p", "k=x"], "integer"),
        (["run", "--model", "tiny", "-p", "prompts=nowhere.jsonl"], "there is no prompt file"),
        (["run", "--model", "tiny", "--profile", "huge"], "huge"),
        (["run", "--model", "tiny", "--upto", "09"], "unknown chapter '09'"),
        (["run", "--model", "tiny", "-p", "k=8"], "k = 8"),
        (["book", "--model", "./nowhere"], "unknown model"),
        (["select", "nowhere"], "unknown model"),
        (["bench", "nothing"], "unknown benchmark"),
    ],
)
def test_wrong_requests_are_answered_before_any_work(arguments, words, tmp_path):
    more = [] if arguments[0] == "bench" else ["--runs", tmp_path]
    result = invoke(*arguments, *more)
    assert result.exit_code == 2, result.output
    assert words in plain(result)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_model_that_does_not_exist_leaves_no_folder(tmp_path):
    assert invoke("run", "--model", "smol", "--runs", tmp_path).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_shallow_target_is_refused_with_the_rule_named(tmp_path):
    shallow = tiny_target(n_layers=6)
    shallow.model.save_pretrained(tmp_path / "shallow")
    shallow.tokenizer.save_pretrained(tmp_path / "shallow")
    result = invoke("run", "--model", tmp_path / "shallow", "--runs", tmp_path / "runs")
    assert result.exit_code == 2 and "at least 7 layers" in plain(result)


def test_a_target_that_only_answers_is_held_to_nothing_more(tmp_path):
    target = tiny_target(n_layers=6)
    target.model.save_pretrained(tmp_path / "shallow")
    target.tokenizer.save_pretrained(tmp_path / "shallow")
    _check(Run(RunSpec.make(str(tmp_path / "shallow"), "smoke"), tmp_path), "write")
    target.tokenizer.chat_template = "{{ raise_exception('only tools may speak') }}"
    target.tokenizer.save_pretrained(tmp_path / "shallow")
    result = invoke("answer", "--model", tmp_path / "shallow", "--runs", tmp_path / "runs")
    assert result.exit_code == 2 and "cannot be used to write answers" in plain(result)


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("run", "--model", "tiny", "--runs", tmp_path / "file")
    assert result.exit_code == 2 and "cannot be written" in plain(result)


def test_models_are_listed_with_their_licences():
    result = invoke("models")
    assert result.exit_code == 0
    assert "smollm2-135m" in result.output and "Gemma Terms of Use" in plain(result)


def test_select_prints_layers_and_saves_the_picture(tmp_path):
    arguments = ["select", "tiny", "-k", 2, "--tokens", 600, "--runs", tmp_path]
    small = ["-p", "train_conversations=12", "-p", "answer_tokens=12", "-p", "bootstrap=10"]
    result = CliRunner().invoke(app, [str(a) for a in [*arguments, *small, "--json"]])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["chosen"]) == 2 and found["n_layers"] == 8
    names = {row["name"] for row in found["sets"]}
    assert "chosen" in names
    assert (tmp_path / "tiny" / "quick").exists()
    with open(found["picture"], "rb") as picture:
        assert picture.read(4) == b"\x89PNG"
