"""What a head learns from: draft vocabulary, truncated distributions, batches of every answer."""

from __future__ import annotations

import collections
from dataclasses import fields, replace

import pytest
import torch

from draftlayers import examples as examples_module
from draftlayers import states, store
from draftlayers.examples import TrainingData, answer_rows, draft_vocabulary, truncation_error
from draftlayers.project import UserError
from draftlayers.states import collect
from draftlayers.targets import tiny_target
from tests.helpers import LAYERS, STEPS, InMemory, answered, rows_of, training_data, view


def test_vocabulary_is_what_the_target_expects_most(data):
    store = data.store
    ids = torch.tensor([[9, 4, 2], [4, 7, 9]])
    log_p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    # In all 0.75 for 9 and 4, 0.25 for 7 and 2; of two that tie, the lower id goes in.
    assert draft_vocabulary(ids, log_p, 1).tolist() == [4]
    assert draft_vocabulary(ids, log_p, 3).tolist() == [2, 4, 9]
    assert draft_vocabulary(ids, log_p, 50).tolist() == [2, 4, 7, 9]
    expected: collections.Counter = collections.Counter()
    for sequence in data.train.tolist():
        for row in rows_of(store, sequence).tolist():
            if store.meta["answer"][row]:
                for token, log_p in zip(store.top_ids[row], store.top_logprobs[row], strict=True):
                    expected[int(token)] += float(log_p.double().exp())
    best = sorted(expected, key=lambda t: (-expected[t], t))[:60]
    assert data.vocabulary.tolist() == sorted(best)
    assert sorted([*data.train.tolist(), *data.validation.tolist()]) == list(range(14))


def test_truncation_error_against_dense_distributions():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 40, generator=generator)
    vocabulary = torch.arange(0, 40, 2)
    found = truncation_error(logits, vocabulary, 8)
    rest, variation, changed = [], [], []
    for row in logits.double().softmax(-1):
        order = sorted(range(40), key=lambda t: -row[t])
        whole = {t: float(row[t]) for t in vocabulary.tolist()}
        inside = {t: p if t in order[:8] else 0.0 for t, p in whole.items()}
        rest.append(1 - sum(float(row[t]) for t in order[:8]))
        variation.append(
            sum(
                abs(whole[t] / sum(whole.values()) - inside[t] / sum(inside.values()))
                for t in whole
            )
            / 2
        )
        changed.append(max(whole, key=whole.get) != max(inside, key=inside.get))
    assert found["rest"] == pytest.approx(sum(rest) / 6)
    assert found["total_variation"] == pytest.approx(sum(variation) / 6)
    assert found["top_changed"] == pytest.approx(sum(changed) / 6)
    assert truncation_error(logits, vocabulary, 40)["total_variation"] == pytest.approx(0, abs=1e-9)


def test_every_conversation_once_an_epoch(target, data):
    examples = view(target, data, data.train)
    plan = examples.epoch_batches(30, seed=1)
    assert sorted(c for batch in plan for c in batch) == list(range(len(data.train)))
    assert plan == examples.epoch_batches(30, seed=1) != examples.epoch_batches(30, seed=2)


@torch.no_grad()
def test_a_small_vocabulary_fills_no_distribution(tmp_path):
    """A target with fewer tokens than a store keeps: what fills the rows up weighs nothing."""
    target = tiny_target(vocab_size=40)
    conversations = answered(target, 5, 10)
    store = collect(target, conversations, LAYERS, tmp_path, predict="answer", top=64)
    data = TrainingData.split(store, validation=2, draft_vocab=64)
    assert data.vocabulary.tolist() == list(range(40))
    some = TrainingData(store, data.train, data.validation, torch.arange(1, 40, 2))
    examples = view(target, some, some.train)
    for c, conversation in enumerate(conversations[:3]):
        logits = target.model(input_ids=torch.tensor([conversation.tokens])).logits[0]
        expected = logits[:, some.vocabulary].softmax(-1)
        batch = examples.batch([c], STEPS)
        assert batch.draft_ids.shape[1] == 64
        found = torch.zeros(len(batch.draft_ids), 20)
        found.scatter_add_(1, batch.draft_ids, batch.probabilities)
        for i in range(STEPS):
            asked = batch.in_answer[i]
            place = batch.positions[batch.active[asked]] + 1 + i
            torch.testing.assert_close(
                found[batch.labels[i, asked]], expected[place], rtol=1e-2, atol=1e-3
            )
    cut = truncation_error(logits, some.vocabulary, 64)
    assert cut == {"rest": pytest.approx(0, abs=1e-9), "total_variation": 0, "top_changed": 0}


def test_fillers_are_no_tokens():
    ids = torch.tensor([[9, 4, 0, 0]])
    log_p = torch.tensor([[0.75, 0.25, 0.0, 0.0]]).log()
    assert draft_vocabulary(ids, log_p, 4).tolist() == [4, 9]


def test_what_cannot_serve_is_named(target, data):
    with pytest.raises(UserError, match="no answer tokens"):
        view(target, data, torch.tensor([], dtype=torch.long))


# --- Read when it is needed ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(target, tmp_path_factory):
    """The same conversations in shards of four, so that a batch reads several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "SHARD", 4)
        return training_data(target, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("held", [store.MAPPED, 0])
def test_batches_are_those_of_examples_in_memory(target, sharded, monkeypatch, held):
    """Also when all that was read is let go at once."""
    monkeypatch.setattr(store, "MAPPED", held)
    monkeypatch.setattr(examples_module, "BLOCK", 7)
    inside = replace(sharded, store=InMemory(sharded.store))
    for part in (sharded.train, sharded.validation, sharded.train[[1, 2, 6, 9]]):
        read, kept = view(target, sharded, part), view(target, inside, part)
        assert torch.equal(read.trainable, kept.trainable) and read.trainable.any()
        for steps in (1, STEPS):
            plans = read.epoch_batches(30, seed=steps), kept.epoch_batches(30, seed=steps)
            assert plans[0] == plans[1]
            for chosen in plans[0]:
                one, two = read.batch(chosen, steps), kept.batch(chosen, steps)
                for field in fields(one):
                    a, b = getattr(one, field.name), getattr(two, field.name)
                    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for limit in (10, 10**6):
            guesses = zip(read.first_guesses(8, limit), kept.first_guesses(8, limit), strict=True)
            assert all(torch.equal(a, b) for a, b in guesses)


def test_vocabulary_of_blocks_is_that_of_all_rows(sharded, monkeypatch):
    """The sums are the same to the last bit, so that ties are broken alike."""
    rows = answer_rows(sharded.store, sharded.train)
    ids, log_p = sharded.store.top_ids[rows], sharded.store.top_logprobs[rows]
    names, where = ids.flatten().long().unique(return_inverse=True)
    expected = torch.zeros(len(names), dtype=torch.float64)
    expected.index_add_(0, where, log_p.flatten().double().exp())
    best = names[expected.sort(descending=True, stable=True).indices[:60]].sort().values
    for block in (1, 5, 8192):
        monkeypatch.setattr(examples_module, "BLOCK", block)
        split = TrainingData.split(sharded.store, validation=3, draft_vocab=60)
        assert torch.equal(split.vocabulary, best)
    assert torch.equal(draft_vocabulary(ids, log_p, 60), best)


def test_a_few_numbers_of_each_position_are_held(target, sharded):
    held = view(target, sharded, sharded.train)
    tensors = [x for x in vars(held).values() if isinstance(x, torch.Tensor)]
    by_position = [x for x in tensors if x is not held.draft_of]
    assert all(x.shape == (len(held.rows),) for x in by_position)
    assert sum(x.nbytes for x in by_position) <= 24 * len(held.rows)
