"""Shared by all tests: few threads, tiny targets made once, runs in temporary folders."""

from __future__ import annotations

import pytest
import torch

from draftlayers.spec import Run, RunSpec
from draftlayers.targets import Target, tiny_target

# One model of each way that architectures differ where it matters here: plain, biased, norms
# round the layers and a scaled embedding, soft-capping, learned positions, another output scale.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "cohere")


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def tiny() -> Target:
    return tiny_target()


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(architecture=request.param)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(RunSpec.make("tiny", "smoke"), tmp_path)
