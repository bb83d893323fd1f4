"""Training: learning by heart, resuming, stopping, sharing out, and when a head is used again."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from draftlayers import current, training, ttt
from draftlayers.project import UserError
from draftlayers.states import collect
from draftlayers.targets import tiny_target
from draftlayers.training import train_head
from tests.helpers import LAYERS, STEPS, InMemory, answered, by_heart, settings


@pytest.mark.parametrize("start", ["target", "random"])
def test_two_conversations_are_learned_by_heart(target, tmp_path, start):
    conversations = answered(target, 2, 24, seed=2)
    data = by_heart(target, tmp_path / "s", conversations)
    thorough = settings(
        epochs=150.0, batch_tokens=48, start=start, learning_rate=5e-3, train_lm_head=True
    )
    trained = train_head(data, LAYERS, target, thorough, 0, tmp_path / "h")
    assert min(trained.best["agreement"][:STEPS]) > 0.9
    assert trained.best["tau"] > 3
    records = trained.history
    # The loss cannot fall below the entropy of its targets, which is large for a random model.
    assert records[-1]["train_loss"] < 0.9 * records[0]["train_loss"]


def same_head(a, b) -> bool:
    one, two = (load_file(folder / "model.safetensors") for folder in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_killed_training_resumes_to_the_same_numbers(target, data, tmp_path, monkeypatch):
    whole = train_head(data, LAYERS, target, settings(), 0, tmp_path / "whole")
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    plain_step = training.Trainer.step
    for last in (2, 7):

        def dying_step(self, last=last):
            if self.update == last:
                raise KeyboardInterrupt
            plain_step(self)

        monkeypatch.setattr(training.Trainer, "step", dying_step)
        with pytest.raises(KeyboardInterrupt):
            train_head(data, LAYERS, target, settings(), 0, tmp_path / "killed")
        assert not (tmp_path / "killed" / "training.json").exists()
    monkeypatch.setattr(training.Trainer, "step", plain_step)
    said: list[str] = []
    again = train_head(data, LAYERS, target, settings(), 0, tmp_path / "killed", said.append)
    assert said[0].startswith("continuing at update 7 of")
    assert again.history == whole.history
    assert same_head(tmp_path / "whole", tmp_path / "killed")
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {
        "config.json", "model.safetensors", "training.json",
    }  # fmt: skip


# --- When a head is used again -----------------------------------------------------------------

SHORT = settings(epochs=0.3)


class Trained(Exception):
    """A training was about to begin."""


@pytest.fixture(scope="module")
def finished(target, data, tmp_path_factory):
    """Folder of a finished head, and its history."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train_head(data, LAYERS, target, SHORT, 0, folder).history


@pytest.fixture
def no_training(monkeypatch):
    def begin(*args):
        raise Trained

    monkeypatch.setattr(training, "Trainer", begin)


def again_because(finished, data, target, layers=LAYERS, changed=SHORT, seed=0) -> str | None:
    """What train_head says before it trains the finished head again; None when it reuses it."""
    folder, history = finished
    said: list[str] = []
    try:
        found = train_head(data, layers, target, changed, seed, folder, said.append)
    except Trained:
        assert said[0].startswith(f"training {folder.name} again, because of ")
        return said[0].partition("because of ")[2]
    assert found.history == history and not said
    return None


def test_finished_head_is_loaded(finished, data, target, no_training):
    assert again_because(finished, data, target) is None
    record = json.loads((finished[0] / "training.json").read_text())
    assert record["causes"]["settings"] == json.loads(json.dumps(asdict(SHORT)))
    assert record["causes"]["head"]["layers"] == list(LAYERS)


OTHER_SETTINGS = {
    "epochs": 0.4, "batch_tokens": 31, "learning_rate": 1e-3, "ttt_steps": 2, "start": "random",
    "train_lm_head": True, "fc_norm": True, "depth": 4, "warmup": 0.1, "clip": 1.0,
    "betas": (0.9, 0.99), "weight_decay": 0.1, "norm_output": True, "head_layers": 2,
    "optimizer": "muon", "sharpen": 1.5, "noise": 0.05,
}  # fmt: skip


def test_every_setting_is_tried():
    assert OTHER_SETTINGS.keys() == asdict(SHORT).keys()


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_another_setting_is_another_head(finished, data, target, no_training, name):
    changed = replace(SHORT, **{name: OTHER_SETTINGS[name]})
    assert f"settings.{name}" in again_because(finished, data, target, changed=changed)


def one_weight_changed(target):
    other = tiny_target()
    with torch.no_grad():
        other.layers[3].mlp.up_proj.weight[0, 0] += 1
    return other


@pytest.mark.parametrize("cause", ["head.layers", "seed", "target", "libraries", "arithmetic"])
def test_another_cause_is_another_head(finished, data, target, no_training, monkeypatch, cause):
    fast = ttt.multiplies_bfloat16()
    changes = {
        "head.layers": lambda: {"layers": (1, 4, 5)},
        "seed": lambda: {"seed": 1},
        "target": lambda: {"target": one_weight_changed(target)},
        "libraries": lambda: monkeypatch.setattr(training, "libraries", lambda: {"torch": "0"}),
        "arithmetic": lambda: monkeypatch.setattr(ttt, "multiplies_bfloat16", lambda: not fast),
    }
    changed = changes[cause]() or {}
    why = again_because(finished, data, **{"target": target, **changed})
    assert why.partition(".")[0] == cause.partition(".")[0]


@pytest.mark.parametrize("part", ["store", "train", "validation", "vocabulary"])
def test_other_data_is_another_head(finished, data, target, no_training, part, tmp_path):
    if part == "store":
        conversations = answered(target, 14, 12, seed=1)
        boundaries = [1, *LAYERS, 8]
        store = collect(target, conversations, boundaries, tmp_path, predict="answer", top=64)
        other = replace(data, store=store)
    else:
        values = getattr(data, part)
        # Another token in the vocabulary, the same number of them.
        free = next(t for t in range(1, 500) if t not in data.vocabulary)
        fewer = torch.cat((values[1:], torch.tensor([free]))).sort().values
        other = replace(data, **{part: fewer if part == "vocabulary" else values[1:]})
    assert again_because(finished, other, target) == f"data.{part}"


@pytest.mark.parametrize(
    ("module", "old", "new", "reused"),
    [
        ("ttt", "STEP_WEIGHT = 0.8", "STEP_WEIGHT = 0.1", False),
        ("start", "SELF_SCORE = 10.0", "SELF_SCORE = 5.0", False),
        ("training", "FIT_ROWS = 50_000", "FIT_ROWS = 20_000", False),
        ("head_layers", "return hidden + ", "return hidden - ", False),
        ("examples", "pool = 16 *", "pool = 8 *", False),
        ("ttt", "# weight of step i", "# how much step i weighs:", True),
        ("training", "One update.", "One update of all weights.", True),
        ("spec", '"head_epochs": (1.0', '"head_epochs": (2.0', True),
    ],
)
def test_code_is_a_cause(
    finished, data, target, no_training, tmp_path, monkeypatch, module, old, new, reused
):
    source = tmp_path / "draftlayers"
    shutil.copytree(current.SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    path = source / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(current, "SOURCE", source)
    assert again_because(finished, data, target) == (None if reused else "code")


@pytest.mark.parametrize("name", ["training.json", "model.safetensors", "config.json"])
@pytest.mark.parametrize("left", ["half", "junk", "nothing"])
def test_damaged_head_is_trained_again(finished, data, target, tmp_path, name, left):
    folder = tmp_path / "head"
    shutil.copytree(finished[0], folder)
    whole = (folder / name).read_bytes()
    damaged = {"half": whole[: len(whole) // 2], "junk": b"junk", "nothing": b""}
    (folder / name).write_bytes(damaged[left])
    said: list[str] = []
    again = train_head(data, LAYERS, target, SHORT, 0, folder, said.append)
    assert said[0].startswith("training head again, because of damage") and str(folder) in said[0]
    assert again.history == finished[1] and same_head(folder, finished[0])


def test_a_killed_training_with_every_choice_changed_goes_on_bit_for_bit(
    target, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    choices = {"optimizer": "muon", "head_layers": 2, "noise": 0.1, "sharpen": 1.5,
               "norm_output": True, "weight_decay": 0.1}  # fmt: skip
    args = (data, LAYERS, target, settings(**choices), 0)
    whole = train_head(*args, tmp_path / "whole")
    killed_at(monkeypatch, 5, *args, tmp_path / "killed")
    again = train_head(*args, tmp_path / "killed")
    assert again.history == whole.history and same_head(tmp_path / "whole", tmp_path / "killed")


def killed_at(monkeypatch, update, *args):
    """Train, and die before an update."""
    step = training.Trainer.step

    def dying(self):
        if self.update == update:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            train_head(*args)


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model.safetensors"])
def test_damaged_checkpoint_starts_over(target, data, tmp_path, monkeypatch, name):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training.Trainer, "validation_every", lambda self: 2)
    whole = train_head(data, LAYERS, target, settings(), 0, tmp_path / "whole")
    args = (data, LAYERS, target, settings(), 0, tmp_path / "killed")
    for junk in (None, b"junk"):
        killed_at(monkeypatch, 5, *args)
        path = tmp_path / "killed" / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if junk is None else junk)
        said: list[str] = []
        again = train_head(*args, said.append)
        assert said[0].startswith("starting killed over, because what was saved is damaged")
        assert again.history == whole.history and same_head(tmp_path / "whole", tmp_path / "killed")
        (tmp_path / "killed" / "training.json").unlink()


def test_weights_of_a_stopped_training_are_not_taken_for_the_finished_head(
    target, data, tmp_path, monkeypatch
):
    """A finished head, another one killed in its folder after its weights were saved, then back."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training.Trainer, "validation_every", lambda self: 2)
    folder = tmp_path / "head"
    first = train_head(data, LAYERS, target, settings(), 0, folder)
    shutil.copytree(folder, tmp_path / "kept")
    killed_at(monkeypatch, 5, data, LAYERS, target, settings(), 1, folder)
    assert not same_head(folder, tmp_path / "kept")
    again = train_head(data, LAYERS, target, settings(), 0, folder)
    assert again.history == first.history and same_head(folder, tmp_path / "kept")
    # Likewise when both were killed: the first does not go on with the weights of the second.
    (folder / "training.json").unlink()
    for seed in (0, 1):
        killed_at(monkeypatch, 5, data, LAYERS, target, settings(), seed, folder)
    train_head(data, LAYERS, target, settings(), 0, folder)
    assert same_head(folder, tmp_path / "kept")


def test_starts_and_output_matrices(target, data, tmp_path):
    def trained(name, **choice):
        return train_head(data, LAYERS, target, settings(epochs=1.0, **choice), 0, tmp_path / name)

    rows = target.output_matrix.weight[data.vocabulary]
    tied = trained("tied").head
    assert torch.equal(tied.lm_head.weight, rows)
    assert not torch.equal(tied.norm.weight, target.final_norm.weight)
    learned = trained("learned", train_lm_head=True).head
    assert not torch.equal(learned.lm_head.weight, rows)
    random = trained("random", start="random", train_lm_head=True)
    assert random.history[0]["loss"] != pytest.approx(
        json.loads((tmp_path / "learned" / "training.json").read_text())["history"][0]["loss"],
        rel=1e-3,
    )


@pytest.mark.parametrize("start", ["target", "random"])
def test_states_that_are_read_train_the_head_of_states_in_memory(
    target, data, tmp_path, monkeypatch, start
):
    monkeypatch.setattr(training, "FIT_ROWS", 50)
    asked = settings(start=start)
    read = train_head(data, LAYERS, target, asked, 0, tmp_path / "read")
    inside = replace(data, store=InMemory(data.store))
    kept = train_head(inside, LAYERS, target, asked, 0, tmp_path / "kept")
    assert read.history == kept.history
    assert same_head(tmp_path / "read", tmp_path / "kept")


def test_training_stops_when_the_loss_is_not_finite(target, data, tmp_path, monkeypatch):
    plain = training.Examples.batch

    def spoiled(self, chosen, steps):
        batch = plain(self, chosen, steps)
        batch.states[0] = float("nan")
        return batch

    monkeypatch.setattr(training.Examples, "batch", spoiled)
    with pytest.raises(UserError, match=r"stopped at update 1 of \d+.*not finite.*learning_rate"):
        train_head(data, LAYERS, target, settings(), 0, tmp_path)
    assert not (tmp_path / "training.json").exists()


def test_training_stops_when_validation_is_not_finite(target, data, tmp_path, monkeypatch):
    def spoiled(*arguments):
        return replace(ttt.validate(*arguments), loss=float("nan"))

    monkeypatch.setattr(training, "validate", spoiled)
    with pytest.raises(UserError, match=r"at update \d+ of \d+.*validation is nan.*learning_rate"):
        train_head(data, LAYERS, target, settings(), 0, tmp_path)


def test_missing_boundary_is_named(target, data, tmp_path):
    with pytest.raises(UserError, match=r"no states were collected at boundaries \[3\]"):
        train_head(data, (2, 3, 5), target, settings(), 0, tmp_path)
