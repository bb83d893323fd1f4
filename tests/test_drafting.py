"""Drafts are what the head says, and its cache stays in step with what was accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import PROMPT, Oracle, build, greedy_reference, random_head
from transformers import DynamicCache

from draftlayers.decoding import GREEDY, ROOT, Chance, Draft, Sampling, acceptance_length, decode
from draftlayers.device import multiplies_bfloat16
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.project import UserError
from draftlayers.start import start_from_target


@pytest.fixture(scope="module")
def llama() -> Engine:
    return build("llama")


def test_bad_drafters_are_explained(llama: Engine) -> None:
    head = random_head(llama)
    with pytest.raises(UserError, match="can propose 100"):
        HeadDrafter(head, 3, top_k=101)
    with pytest.raises(UserError, match="expected 1 or more"):
        HeadDrafter(head, 0)
    with pytest.raises(UserError, match="in a chain"):
        HeadDrafter(head, 3, top_k=2, confidence=0.5)


class Watched(HeadDrafter):
    """Compares the target's and the head's caches, and the states, with fresh computations."""

    def watch(self, engine: Engine, prompt: list[int]) -> Watched:
        self.engine, self.tokens, self.checked = engine, prompt[:1], 0
        return self

    def observe(self, tokens, states) -> None:
        super().observe(tokens, states)
        self.tokens = [*self.tokens, *tokens]
        target, n = self.engine.target, len(self.tokens) - 1
        assert self.engine.length == n == self.cache.length
        fresh = DynamicCache()
        # The model's own linear layers, not the packed ones that are installed just now.
        packed = [m for m in target.model.modules() if "forward" in vars(m)]
        kept = [m.__dict__.pop("forward") for m in packed]
        with target.capture(self.boundaries) as own:
            target.model(torch.tensor([self.tokens[:-1]]), **{target.cache_name: fresh})
        for module, forward in zip(packed, kept, strict=True):
            module.forward = forward
        for layer, reference in zip(self.engine.kv.layers, fresh.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, :n], reference.keys, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(
                layer.values[:, :, :n], reference.values, atol=1e-4, rtol=1e-3
            )
        expected = torch.cat([own[b][0] for b in self.boundaries], dim=-1)
        torch.testing.assert_close(states, expected[-len(states) :], atol=1e-3, rtol=1e-3)
        alone = self.head.new_cache(n)
        after = torch.tensor([self.tokens[1:]])
        hidden = self.head(self.head.fuse(expected)[None], after, torch.arange(n), alone)
        torch.testing.assert_close(self.cache.keys[..., :n, :], alone.keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(self.hidden, hidden[:, -1:], atol=1e-3, rtol=1e-3)
        self.checked += 1


SHAPES = [{}, {"head_layers": 2}, {"norm_output": True, "fc_norm": True}]


@pytest.mark.parametrize("name, shape", [
    *((name, {}) for name in ("llama", "qwen3", "gemma3_text", "gpt2")),
    *(("llama", shape) for shape in SHAPES[1:]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tree", [False, True])
def test_caches_equal_a_fresh_forward_after_every_step(
    name: str, shape: dict[str, Any], tree: bool
) -> None:
    engine = build(name)
    # Half of the guesses must be accepted for this to prove anything: let the draft be overridden.
    width = 2 if tree else 1
    head = random_head(engine, **shape)
    drafter = Watched(head, depth=4, top_k=width, total=6, precision=torch.float32)
    drafter.watch(engine, PROMPT)
    expected = greedy_reference(engine, PROMPT, 24)
    oracle = Oracle(PROMPT + expected, depth=4, right=0.7, width=width)

    def propose(depth: int, sampling: Sampling, chance: Chance) -> Draft:
        HeadDrafter.propose(drafter, depth, sampling, chance)  # leaves drafted entries to undo
        oracle.known = len(drafter.tokens)
        return oracle.propose(depth, sampling, chance)

    drafter.propose = propose
    run = decode(engine, PROMPT, 24, drafter)
    assert run.tokens == expected
    assert drafter.checked == run.passes - (run.offered[-1] == 0)
    assert acceptance_length([run]) > 1.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("top_k, total", [(1, 4), (2, 6), (3, 12), (4, 60)])
def test_drafts_equal_drafting_without_a_cache(
    llama: Engine, top_k: int, total: int, shape: dict[str, Any]
) -> None:
    """EAGLE-2's tree by its definition: every path recomputed from the whole sequence."""
    depth, head = 4, random_head(llama, start=start_from_target, **shape)
    ids = torch.tensor([PROMPT])
    with llama.target.capture(head.config.layers) as states, torch.no_grad():
        best = int(llama.target.model(ids).logits[0, -1].argmax())
    fused = head.fuse(torch.cat([states[b] for b in head.config.layers], dim=-1))

    def after(path: tuple[int, ...]) -> torch.Tensor:
        """The head's log-probabilities after the prompt, the target's token and a path."""
        cache = head.new_cache(64)
        tokens = torch.tensor([[*PROMPT[1:], best]])
        hidden = head(fused, tokens, torch.arange(len(PROMPT)), cache)[:, -1:]
        for i, token in enumerate(path):
            position = torch.tensor([len(PROMPT) + i])
            hidden = head(head.again(hidden), torch.tensor([[token]]), position, cache)
        return head.logits(hidden)[0, 0].log_softmax(-1)

    frontier, nodes = [((), 0.0)], []
    for _ in range(depth):
        grown = []
        for path, score in frontier:
            top = after(path).topk(top_k)
            for value, i in zip(top.values.tolist(), top.indices, strict=True):
                grown.append(((*path, int(head.to_target(i))), score + value))
        nodes += grown
        frontier = sorted(grown, key=lambda node: -node[1])[:top_k]
    expected = {path for path, _ in sorted(nodes, key=lambda node: -node[1])[:total]}

    drafter = HeadDrafter(head, depth, top_k, total, precision=torch.float32)
    with torch.no_grad(), drafter.session(64):
        concatenated = torch.cat([states[b][0] for b in head.config.layers], dim=-1)
        drafter.observe([*PROMPT[1:], best], concatenated)
        draft = drafter.propose(depth, GREEDY, Chance(0))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append(((*paths[parent], token)) if parent != ROOT else (token,))
    assert len(set(paths)) == len(paths)
    assert set(paths) == expected
    assert drafter.cache.length == len(PROMPT)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 products here")
def test_guesses_in_bfloat16_are_nearly_the_same(llama: Engine) -> None:
    """Half the bytes are read for each guess; the head itself and its cache stay as they are."""
    head = random_head(llama, start=start_from_target)
    states = torch.randn(len(PROMPT), 3 * head.config.d_model)
    scores = []
    for precision in (None, torch.float32):
        drafter = HeadDrafter(head, 1, precision=precision)
        with torch.no_grad(), drafter.session(64):
            drafter.observe(PROMPT, states)
            scores.append(head.logits(drafter.hidden)[0, 0])
            assert drafter.cache.keys.dtype == drafter.hidden.dtype == torch.float32
    error = (scores[0] - scores[1]).norm() / scores[1].norm()
    assert 0 < error < 0.02
    assert head.fc.weight.dtype == torch.float32


def test_heads_are_drafted_with_where_nothing_can_be_packed(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of torch without oneDNN, as on Apple's processors."""
    expected = decode(llama, PROMPT, 12).tokens
    monkeypatch.setattr("torch.ops.mkldnn", object())
    engine = build("llama")
    assert not engine.packed
    for top_k in (1, 3):
        drafter = HeadDrafter(random_head(engine), 3, top_k)
        assert drafter.linears is None
        assert decode(engine, PROMPT, 12, drafter).tokens == expected


def test_a_chain_ends_when_the_head_is_unsure(llama: Engine) -> None:
    head = random_head(llama, start=start_from_target)
    fixed = decode(llama, PROMPT, 30, HeadDrafter(head, 5))
    for confidence in (0.05, 0.3, 0.9):
        drafter, drafts = HeadDrafter(head, 5, confidence=confidence), []
        propose = drafter.propose

        def noted(depth, *rest, propose=propose, drafts=drafts, drafter=drafter):
            draft = propose(depth, *rest)
            cache, hidden, reached = head.new_cache(200), drafter.hidden, [1.0]
            n = drafter.cache.length
            cache.keys[..., :n, :] = drafter.cache.keys[..., :n, :]
            cache.values[..., :n, :] = drafter.cache.values[..., :n, :]
            cache.length = n
            for i, token in enumerate(draft.tokens):
                q = head.logits(hidden)[0, 0].softmax(-1)
                assert int(head.to_target(q.argmax())) == token
                reached.append(reached[-1] * q.max().item())
                hidden = head(hidden, torch.tensor([[token]]), torch.tensor([n + i]), cache)
            drafts.append((min(depth, 5), reached))
            return draft

        drafter.propose = noted
        assert decode(llama, PROMPT, 30, drafter).tokens == fixed.tokens
        for depth, reached in drafts:
            *before, last = reached
            assert min(before) >= confidence
            assert len(before) == depth or last < confidence
        assert any(len(before) < depth for depth, (*before, _) in drafts)
