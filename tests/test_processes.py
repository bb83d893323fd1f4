"""Two processes under torchrun share the work and end with what one would have made."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import LAYERS, answered, settings
from safetensors.torch import load_file

from draftlayers import states, ttt
from draftlayers.examples import TrainingData
from draftlayers.states import collect
from draftlayers.training import train_head

BOUNDARIES = [1, *LAYERS, 8]
SCRIPT = """
import sys
from pathlib import Path
from draftlayers import states, ttt
from draftlayers.examples import TrainingData
from draftlayers.prompts import Conversation
from draftlayers.targets import tiny_target
from draftlayers.training import TrainingSettings, train_head

folder, conversations = Path(sys.argv[1]), eval(sys.argv[2])
target, said = tiny_target(), []
states.SHARD, states.BATCH = 2, 16
how = {"predict": "answer", "top": 64}
store = states.collect(target, conversations, [1, 2, 4, 5, 8], folder, say=said.append, **how)
assert store.n == sum(len(c.tokens) for c in conversations)
assert 0 < len(said) < len(states._shards(conversations))  # each made some, neither all
ttt.multiplies_bfloat16 = lambda: False  # AdamW magnifies its rounding
data = TrainingData.split(store, validation=3, draft_vocab=60)
settings = TrainingSettings(epochs=1.0, batch_tokens=30, learning_rate=2e-3, ttt_steps=3)
train_head(data, (2, 4, 5), target, settings, 0, folder / "head")
"""


@pytest.fixture(scope="module")
def conversations(tiny):
    return answered(tiny, 14, 12)


@pytest.fixture(scope="module")
def two(conversations, tmp_path_factory):
    """Folder of states that two ranks collected, and of the head that they trained on them."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(folder / "script.py"), str(folder), repr(conversations)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def collected(target, conversations, folder):
    """All states, read from the folder where they are there."""
    return collect(target, conversations, BOUNDARIES, folder, predict="answer", top=64)


def test_they_share_the_shards(tiny, conversations, two, tmp_path, monkeypatch):
    """Each writes other shards, waits for the other, and reads the whole."""
    monkeypatch.setattr(states, "SHARD", 2)
    monkeypatch.setattr(states, "BATCH", 16)
    together = collected(tiny, conversations, two)
    alone = collected(tiny, conversations, tmp_path)
    for b in BOUNDARIES:
        assert torch.equal(together.load(b), alone.load(b))


def test_they_train_the_same_head(tiny, conversations, two, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "SHARD", 2)
    monkeypatch.setattr(ttt, "multiplies_bfloat16", lambda: False)
    data = TrainingData.split(collected(tiny, conversations, two), validation=3, draft_vocab=60)
    train_head(data, LAYERS, tiny, settings(epochs=1.0), 0, tmp_path / "head")
    one, both = (load_file(n / "head" / "model.safetensors") for n in (tmp_path, two))
    for name in one:
        torch.testing.assert_close(one[name], both[name], rtol=1e-3, atol=1e-4)
