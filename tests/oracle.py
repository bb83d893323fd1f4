"""What the tests of decoding share: small engines, untrained heads, and drafters that know."""

from __future__ import annotations

import random
from contextlib import nullcontext

import torch

from draftlayers.decoding import ROOT, Chance, Draft, Sampling
from draftlayers.engine import Engine
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.start import start_at_random, start_from_target
from draftlayers.targets import tiny_target

ARCHITECTURES = {
    "llama": {},
    "llama-3 rope": {
        "architecture": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e5, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 7},
    "phi3": {},
    "gpt2": {},
}  # fmt: skip
PROMPT = [5, 17, 200, 33, 8, 91, 4, 300, 12, 45, 77]


def build(name: str, **config) -> Engine:
    """An engine of a tiny model in which no token ends an answer."""
    values = {"architecture": name, **ARCHITECTURES.get(name, {}), **config}
    engine = Engine(tiny_target(**values))
    engine.eos_ids = frozenset()
    return engine


def random_head(
    engine: Engine,
    layers=(2, 4, 5),
    start=start_at_random,
    vocabulary: torch.Tensor | None = None,
    **shape,
) -> DraftHead:
    """An untrained head for the engine's target."""
    vocabulary = torch.arange(3, 503, 5) if vocabulary is None else vocabulary
    config = HeadConfig.for_target(engine.target, layers, len(vocabulary), **shape)
    embedding = engine.target.model.get_input_embeddings().weight
    head = DraftHead(config, embedding, vocabulary).eval()
    if start is start_at_random:
        start_at_random(head, 1)
    else:
        start_from_target(head, engine.target, 1)
    return head.requires_grad_(False)


class Oracle:
    """Guesses the target's own continuation, right with a given probability at each place.

    As a tree, the right token stands at a random place among `width` siblings.
    """

    boundaries = ()

    def __init__(self, sequence: list[int], depth: int, right: float, width: int = 1, seed=0):
        self.sequence, self.depth, self.right, self.width = sequence, depth, right, width
        self.size, self.random = depth * width, random.Random(seed)

    def session(self, capacity: int):
        self.known = 1
        return nullcontext()

    def observe(self, tokens, states) -> None:
        self.known += len(tokens)

    def propose(self, depth: int, sampling: Sampling, chance: Chance) -> Draft:
        tokens, parents, node = [], [], ROOT
        for token in self.sequence[self.known : self.known + min(depth, self.depth)]:
            level = self.random.sample([t for t in range(500) if t != token], self.width)
            place = self.random.randrange(self.width)
            if self.random.random() < self.right:
                level[place] = token
            tokens += level
            parents += [node] * self.width
            node = len(tokens) - self.width + place
        return Draft(tokens, parents)


def greedy_reference(engine: Engine, prompt: list[int], n: int) -> list[int]:
    """Hugging Face's own greedy decoding."""
    model = engine.target.model
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()
