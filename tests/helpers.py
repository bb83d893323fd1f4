"""What several tests of training share: answers of the tiny target, and heads made on the spot."""

from __future__ import annotations

import torch

from draftlayers.examples import Examples, TrainingData
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.prompts import Conversation
from draftlayers.start import start_at_random, start_from_target
from draftlayers.states import collect
from draftlayers.training import TrainingSettings
from draftlayers.writing import Request, Writer

LAYERS = (2, 4, 5)
STEPS = 3


def answered(target, n, length, seed=0):
    """Conversations of random prompts and the target's greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, target.vocab_size, (5 + i % 4,), generator=generator).tolist()
        for i in range(n)
    ]
    answers = dict(Writer(target).write([Request(ids, length) for ids in prompts]))
    return [
        Conversation(str(i), "x", tuple(prompts[i]), tuple(answers[i][: length - i % 3]))
        for i in range(n)
    ]


def training_data(target, folder, draft_vocab=60) -> TrainingData:
    """Fourteen conversations, three of them for validation."""
    conversations = answered(target, 14, 12)
    store = collect(target, conversations, [1, *LAYERS, 8], folder, predict="answer", top=64)
    return TrainingData.split(store, validation=3, draft_vocab=draft_vocab)


def by_heart(target, folder, conversations) -> TrainingData:
    """All of the conversations for training and for validation, and all tokens but the first."""
    store = collect(target, conversations, [*LAYERS, 8], folder, predict="answer", top=64)
    everything = torch.arange(len(conversations))
    return TrainingData(store, everything, everything, 1 + torch.arange(target.vocab_size - 1))


def settings(**changes) -> TrainingSettings:
    values = {"epochs": 3.0, "batch_tokens": 30, "learning_rate": 2e-3, "ttt_steps": STEPS}
    return TrainingSettings(**{**values, **changes})


def new_head(target, data, start="random", dtype=torch.float32, **shape) -> DraftHead:
    config = HeadConfig.for_target(target, LAYERS, len(data.vocabulary), **shape)
    head = DraftHead(config, target.model.get_input_embeddings().weight, data.vocabulary)
    if start == "random":
        start_at_random(head, seed=0)
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(5 if weight.ndim > 1 else 1)
    else:
        start_from_target(head, target, seed=0)
    return head.to(dtype)


def view(target, data, part) -> Examples:
    return Examples(data.store, LAYERS, part, data.vocabulary, target.vocab_size)


class InMemory:
    """All of a store read at once, and used like it."""

    def __init__(self, store):
        self.folder, self.boundaries, self.meta = store.folder, store.boundaries, store.meta
        self.states = {b: store.load(b).clone() for b in store.boundaries}
        self.top_ids, self.top_logprobs = store.top_ids, store.top_logprobs

    def load(self, boundary, rows):
        return self.states[boundary][rows]

    def gather(self, rows, boundaries):
        return torch.stack([self.load(b, rows) for b in boundaries])

    def distributions(self, rows):
        return self.top_ids[rows], self.top_logprobs[rows]


def rows_of(store, sequence):
    return (store.meta["sequence"] == sequence).nonzero()[:, 0]
