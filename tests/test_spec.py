"""Runs are described by types: values arrive as meant, and mistakes are refused in words."""

from __future__ import annotations

import pytest

from draftlayers.project import UserError
from draftlayers.spec import PROFILES, RunSpec


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
        ("model=x", ["model cannot be set with -p"]),
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
        ("profile=full", "the profile cannot be set with -p; --help says"),
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
