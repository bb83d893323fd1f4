"""Each kind of work against each kind of cause: made again, or used again.

Chapters and the site have such tables of their own in ``test_chapters`` and ``test_booksite``,
converted weights in ``test_weights``, single answers in ``test_answers``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftlayers import answers, current, states, training
from draftlayers.answers import answer_prompts
from draftlayers.examples import TrainingData
from draftlayers.prompts import TRAIN, Conversation, read_prompts
from draftlayers.states import collect
from draftlayers.targets import tiny_target
from draftlayers.training import TrainingSettings, train_head

SETTINGS = TrainingSettings(epochs=1.0, batch_tokens=64, learning_rate=1e-3, ttt_steps=2, depth=2)
TALK = [
    Conversation(str(i), "x", tuple(range(3, 9 + i)), tuple(range(40 + i, 60 + i)))
    for i in range(8)
]


class World:
    """Everything that determines the work, to be changed one piece at a time."""

    def __init__(self, folder, source, monkeypatch):
        self.folder, self.source, self.monkeypatch = folder, source, monkeypatch
        self.target = tiny_target()
        self.prompts, self.limit, self.seed = read_prompts(TRAIN)[:4], 6, 0
        self.talk, self.boundaries = TALK, [2, 4, 5, 8]
        self.layers, self.settings, self.vocabulary = (2, 4, 5), SETTINGS, 200

    def answers(self):
        answer_prompts(
            self.target, self.prompts, self.limit, 500, self.folder / "answers", self.seed
        )

    def states(self):
        return collect(
            self.target, self.talk, self.boundaries, self.folder / "states",
            predict="answer", top=16,
        )  # fmt: skip

    def head(self):
        data = TrainingData.split(self.states(), 2, self.vocabulary)
        train_head(data, self.layers, self.target, self.settings, self.seed, self.folder / "head")


# A piece of the world: (kinds of work that are made again, change).
def constant(module, old, new):
    return lambda world: world.source.edit(f"{module}.py", old, new)


def weight(world):
    world.target.layers[3].mlp.down_proj.weight.data[0, 0] += 0.01


def setting(world):
    world.target.model.config.rms_norm_eps = 1e-3


def template(world):
    world.target.tokenizer.chat_template = "Please. " + world.target.tokenizer.chat_template


def precision(world):
    world.target.model.bfloat16()


def library(world):
    world.monkeypatch.setattr(current, "version", lambda name: "99.0")


def field(name, value):
    return lambda world: setattr(world, name, value)


def trained(**changes):
    return lambda world: setattr(world, "settings", replace(world.settings, **changes))


ANSWERS, STATES, HEAD = "answers", "states", "head"
CAUSES = {
    "nothing": (set(), lambda world: None),
    # the target
    "a weight": ({ANSWERS, STATES, HEAD}, weight),
    "a setting": ({ANSWERS, STATES, HEAD}, setting),
    "the template": ({ANSWERS, STATES, HEAD}, template),
    "the precision": ({ANSWERS, STATES, HEAD}, precision),
    # parameters and data
    "another seed": ({ANSWERS, HEAD}, field("seed", 1)),
    "a higher limit": ({ANSWERS}, field("limit", 9)),
    "a lower limit": (set(), field("limit", 4)),
    "conversations": ({STATES, HEAD}, field("talk", TALK[:-1])),
    "a further boundary": ({STATES}, field("boundaries", [1, 2, 4, 5, 8])),
    "fewer boundaries": (set(), field("boundaries", [2, 4, 5, 8][:4])),
    "other layers": ({HEAD}, field("layers", (2, 4, 8))),
    "a smaller vocabulary": ({HEAD}, field("vocabulary", 100)),
    "a training setting": ({HEAD}, trained(learning_rate=2e-3)),
    "the depth of validation": ({HEAD}, trained(depth=3)),
    # code
    "weight of a step in the loss": ({HEAD}, constant("ttt", "= 0.8  #", "= 0.7  #")),
    "start of a head": ({HEAD}, constant("start", "SELF_SCORE = 10.0", "SELF_SCORE = 9.0")),
    "share of sampled answers": ({ANSWERS}, constant("answers", "TURE = 3, 0.5", "TURE = 3, 0.6")),
    "how entropies are taken": ({STATES, HEAD}, constant("entropy", "1 << 19", "1 << 18")),
    "a remark": (set(), constant("ttt", "# weight of step i", "# a weight of step i")),
    "a docstring": (set(), constant("states", '"""Hidden-state collection:', '"""Collection:')),
    "code of other work": (set(), constant("selection", "EXHAUSTIVE_K = 4", "EXHAUSTIVE_K = 3")),
    "looks of a figure": (set(), constant("figures/style", "#6B6B6B", "#6B6B6C")),
    "a new default of a parameter": (set(), constant("spec", 'epochs": (1.0', 'epochs": (2.0')),
    # libraries
    "a library": ({STATES, HEAD}, library),
}  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """Kinds of work that were done rather than found, as they happen."""
    done = []

    def spy(module, name, kind):
        inner = getattr(module, name)

        def noted(*args, **kwargs):
            done.append(kind)
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    spy(answers.Writer, "write", ANSWERS)
    spy(states, "_collect_shard", STATES)
    spy(training.Trainer, "step", HEAD)
    return done


@pytest.mark.parametrize("cause", CAUSES)
def test_work_is_made_again_exactly_when_a_cause_changes(
    tmp_path, source, monkeypatch, made, cause
):
    expected, change = CAUSES[cause]
    world = World(tmp_path / "work", source, monkeypatch)
    for kind in (ANSWERS, HEAD):  # a head collects its states
        getattr(world, kind)()
    assert set(made) == {ANSWERS, STATES, HEAD}
    made.clear()
    change(world)
    for kind in (ANSWERS, HEAD):
        getattr(world, kind)()
    assert set(made) == expected
