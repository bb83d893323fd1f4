"""Shared by all tests: few threads, tiny targets made once, runs in temporary folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from draftlayers import current
from draftlayers.examples import TrainingData
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.targets import Target, tiny_target
from tests.helpers import training_data

# One model of each way that architectures differ where it matters here: plain, biased, norms
# round the layers and a scaled embedding, soft-capping, learned positions, another output scale.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "cohere")


# Files that take longest, so that they start first and no worker ends up alone with one of them.
LONGEST = ("test_chapters", "test_jobs", "test_families", "test_faults", "test_processes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def tiny() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny target of a module's own, which its tests may change and restore."""
    return tiny_target()


@pytest.fixture(scope="module")
def data(target, tmp_path_factory) -> TrainingData:
    """What heads of this target learn from."""
    return training_data(target, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(architecture=request.param)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(RunSpec.make("tiny", "smoke"), tmp_path)


class Source:
    """A copy of the package's source in the place of the original, to be edited."""

    def __init__(self, folder: Path):
        self.folder = folder

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that is there; the file's time moves on, however coarse the clock."""
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text, (name, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
        then = path.stat().st_mtime_ns + 1_000_000
        os.utime(path, ns=(then, then))


@pytest.fixture
def source(tmp_path, monkeypatch) -> Source:
    folder = tmp_path / "source" / "draftlayers"
    shutil.copytree(current.SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(current, "SOURCE", folder)
    return Source(folder)
