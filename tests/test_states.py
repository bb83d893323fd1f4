"""Collected rows equal what the model computes for each conversation alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load
from scipy.stats import entropy as scipy_entropy

from draftlayers import states
from draftlayers.project import UserError
from draftlayers.prompts import Conversation
from draftlayers.states import collect, duplicates
from draftlayers.store import StateStore, new_shard
from draftlayers.targets import tiny_target

CONVERSATIONS = [
    Conversation("a", "qa", (3, 4, 5), (60, 61, 62, 63)),
    Conversation("b", "qa", (3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (90, 91)),
    Conversation("c", "code", (40,), (41, 42, 43, 44, 45, 46)),
    Conversation("d", "code", (3, 4, 99), (60, 61)),
]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(states, "SHARD", 3)
    monkeypatch.setattr(states, "BATCH", 16)


def test_rows_equal_each_conversation_alone(any_target, tmp_path):
    """Padding, batching and sharding leave no trace (beyond bfloat16's rounding)."""
    n = any_target.n_layers
    store = collect(any_target, CONVERSATIONS, range(n + 1), tmp_path, top=5)
    for number, conversation in enumerate(CONVERSATIONS):
        rows = (store.meta["sequence"] == number).nonzero()[:, 0]
        assert store.meta["token"][rows].tolist() == conversation.tokens
        with torch.inference_mode(), any_target.capture(range(n + 1)) as alone:
            logits = any_target.model(torch.tensor([conversation.tokens])).logits[0]
        for b in range(n + 1):
            found = store.load(b, rows).float()
            close = 0.01 * alone[b].abs().max().item()
            torch.testing.assert_close(found, alone[b][0].float(), rtol=0.01, atol=close)
            torch.testing.assert_close(store.norms[b][rows], alone[b][0].norm(dim=-1), rtol=1e-4,
                                       atol=1e-5)  # fmt: skip
        p = torch.softmax(logits.double(), -1)
        expected = torch.tensor(scipy_entropy(p.numpy(), axis=-1))
        torch.testing.assert_close(
            store.meta["predictive_entropy"][rows].double(), expected, atol=1e-4, rtol=1e-4
        )
        best = p.topk(5)
        assert torch.equal(store.top_ids[rows].long(), best.indices)
        torch.testing.assert_close(
            store.top_logprobs[rows].double(), best.values.log(), atol=5e-3, rtol=2e-3
        )


def test_answer_rows_predict_exactly_the_answer(tiny, tmp_path):
    store = collect(tiny, CONVERSATIONS, [1], tmp_path)
    for number, conversation in enumerate(CONVERSATIONS):
        rows = (store.meta["sequence"] == number).nonzero()[:, 0]
        flagged = rows[store.meta["answer"][rows]]
        assert store.meta["token"][flagged + 1].tolist() == list(conversation.answer_ids)


def test_duplicate_rows_are_exact_copies(tiny, tmp_path):
    store = collect(tiny, CONVERSATIONS, [4], tmp_path)
    flags = [f.tolist() for f in duplicates(CONVERSATIONS)]
    assert flags[0] == [False] * 7 and flags[1] == [True] * 3 + [False] * 9
    assert flags[3] == [True] * 2 + [False] * 3
    assert store.meta["duplicate"].tolist() == [x for f in flags for x in f]


def test_a_killed_collection_goes_on_at_the_missing_shard(tiny, tmp_path):
    def killed(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(tiny, CONVERSATIONS, [2, 5], tmp_path, say=killed)
    (shard,) = tmp_path.rglob("*.safetensors")
    with pytest.raises(UserError, match="no finished collection"):
        StateStore(shard.parent)
    before = shard.stat().st_mtime_ns
    resumed = collect(tiny, CONVERSATIONS, [2, 5], tmp_path)
    assert shard.stat().st_mtime_ns == before
    whole = collect(tiny, CONVERSATIONS, [2, 5], tmp_path / "whole")
    assert torch.equal(resumed.load(5), whole.load(5))


def test_a_stopped_collection_of_other_boundaries_does_no_harm(tiny, tmp_path):
    def killed(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(tiny, CONVERSATIONS, [1, 2], tmp_path, say=killed)
    for boundaries in ([3, 4], [1, 2]):
        found = collect(tiny, CONVERSATIONS, boundaries, tmp_path)
        alone = collect(tiny, CONVERSATIONS, boundaries, tmp_path / str(boundaries))
        assert all(torch.equal(found.load(b), alone.load(b)) for b in boundaries)


@pytest.mark.parametrize("size", [0, 9, 2000, None])
def test_a_damaged_shard_is_made_again_and_the_others_stay(tiny, tmp_path, size):
    whole = collect(tiny, CONVERSATIONS, [2, 5], tmp_path)
    before = whole.load(5).clone(), whole.meta["predictive_entropy"].clone()
    first, second = sorted(tmp_path.rglob("*.safetensors"))
    then = second.stat().st_mtime_ns
    if size is None:
        first.unlink()
    else:
        first.write_bytes(first.read_bytes()[:size])
    mended = collect(tiny, CONVERSATIONS, [2], tmp_path)
    assert second.stat().st_mtime_ns == then and mended.boundaries == (2, 5)
    assert torch.equal(mended.load(5), before[0])
    assert torch.equal(mended.meta["predictive_entropy"].nan_to_num(), before[1].nan_to_num())


def test_a_vocabulary_smaller_than_what_is_kept_fills_up_with_nothing(tmp_path):
    few = tiny_target(vocab_size=600)
    store = collect(few, CONVERSATIONS, [1], tmp_path, predict="answer", top=700)
    mass = store.top_logprobs[store.meta["answer"]].float().exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=2e-3, rtol=0)
    assert (store.top_logprobs[:, 600:] == -torch.inf).all()


def test_further_boundaries_are_added_to_what_is_there(tiny, tmp_path):
    collect(tiny, CONVERSATIONS, [2], tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    store = collect(tiny, CONVERSATIONS, [2, 6], tmp_path)
    assert store.boundaries == (2, 6)
    assert all(path.stat().st_mtime_ns == then for path, then in files.items())
    assert torch.equal(store.load(6), collect(tiny, CONVERSATIONS, [6], tmp_path / "x").load(6))


def test_a_different_corpus_is_a_different_store(tiny, tmp_path):
    first = collect(tiny, CONVERSATIONS, [3], tmp_path)
    other = collect(tiny, CONVERSATIONS[:2], [3], tmp_path)
    assert first.folder != other.folder and other.n < first.n


def test_only_answer_rows_are_predicted_when_asked(tiny, tmp_path):
    store = collect(tiny, CONVERSATIONS, [3], tmp_path, predict="answer", top=3)
    known = ~store.meta["predictive_entropy"].isnan()
    assert torch.equal(known, store.meta["answer"])


def test_blocks_keep_the_order_of_their_rows(tiny, tmp_path):
    store = collect(tiny, CONVERSATIONS, [1, 3, 7], tmp_path)
    rows = torch.randperm(store.n, generator=torch.Generator().manual_seed(0))
    joined = torch.cat(list(store.blocks(rows, 4)), 1)
    for i, b in enumerate(store.boundaries):
        assert torch.equal(joined[i], store.load(b)[rows].float())
    with pytest.raises(UserError, match="boundary 2 was not collected"):
        store.load(2)


def test_massive_activations_survive_storage(tmp_path):
    target = tiny_target()
    target.embed_tokens(torch.tensor([0]))  # embeddings exist before they are scaled
    target.model.get_input_embeddings().weight.data[40] *= 1e6
    store = collect(target, CONVERSATIONS, [0], tmp_path)
    row = (store.meta["token"] == 40).nonzero()[0, 0]
    exact = target.model.get_input_embeddings().weight[40]
    assert exact.abs().max() > 65504  # beyond float16
    torch.testing.assert_close(store.load(0)[row].float(), exact, rtol=0.01, atol=1.0)


def test_nothing_to_collect_is_said(tiny, tmp_path):
    with pytest.raises(UserError, match="no conversations"):
        collect(tiny, [], [1], tmp_path)


def test_a_shard_lies_in_memory_as_in_its_file():
    shape = {
        "b3": (torch.bfloat16, (5, 3)),
        "answer": (torch.bool, (5,)),
        "n": (torch.float32, (5,)),
    }
    data, rows = new_shard(shape)
    assert {name: (rows[name].dtype, tuple(rows[name].shape)) for name in rows} == shape
    assert not any(tensor.any() for tensor in rows.values())
    for tensor in rows.values():
        tensor.copy_(torch.randn(tensor.shape))
    found = load(bytes(data))
    assert found.keys() == rows.keys() and all(torch.equal(found[n], rows[n]) for n in rows)
