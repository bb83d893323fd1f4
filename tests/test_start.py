"""Where a head stands before it learns: the target's own weights, norms, and the linear guess."""

from __future__ import annotations

import pytest
import torch

from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.start import fit_start, norm_weight, start_from_target
from draftlayers.targets import tiny_target
from draftlayers.ttt import ttt_loss
from tests.helpers import LAYERS, new_head, view


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_start_from_target(architecture):
    target = tiny_target(architecture=architecture)
    layers = (2, 4, 5)
    config = HeadConfig.for_target(target, layers, 100)
    vocabulary = torch.arange(100) * 2 + 1
    embedding = target.model.get_input_embeddings().weight
    head = DraftHead(config, embedding, vocabulary)
    taken = start_from_target(head, target, seed=0)
    d = config.d_model
    states = torch.randn(4, 3 * d)
    torch.testing.assert_close(head.fuse(states), states[:, 2 * d :])
    assert "lm_head.weight" in taken
    assert torch.equal(head.lm_head.weight, target.output_matrix.weight[vocabulary])
    if architecture != "gpt2":  # a head has RMSNorms and a SwiGLU; GPT-2 has neither
        x = torch.randn(3, d)
        torch.testing.assert_close(head.norm(x), target.final_norm(x), rtol=1e-4, atol=1e-4)
        up = target.layers[-1].mlp.up_proj.weight
        assert torch.equal(head.midlayer.mlp.up_proj.weight, up)
    attention = head.midlayer.self_attn
    assert ("midlayer.self_attn.q_proj.weight" in taken) == (architecture == "llama")
    if architecture == "llama":
        source = target.layers[-1].self_attn.k_proj.weight
        assert torch.equal(attention.k_proj.weight[:, d:], source)
        assert not attention.k_proj.weight[:, :d].any()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_further_layers_change_nothing_at_the_start(architecture):
    target = tiny_target(architecture=architecture)
    vocabulary = torch.arange(100) * 2 + 1
    embedding = target.model.get_input_embeddings().weight
    heads = []
    for head_layers in (1, 3):
        config = HeadConfig.for_target(target, (2, 4, 5), 100, head_layers=head_layers)
        head = DraftHead(config, embedding, vocabulary)
        taken = start_from_target(head, target, seed=0)
        states = torch.randn(1, 9, 3 * 64, generator=torch.Generator().manual_seed(3))
        hidden = head.fuse(states)
        fit_start(head, states[0], torch.arange(9), hidden[0] + 1, seed=0)
        heads.append(head(head.fuse(states), torch.arange(9)[None], torch.arange(9),
                          head.new_cache(9)))  # fmt: skip
    assert torch.equal(*heads)
    assert ("upper.1.self_attn.q_proj.weight" in taken) == (architecture == "llama")
    if architecture == "llama":
        source = target.layers[-1]
        assert torch.equal(head.upper[0].mlp.up_proj.weight, source.mlp.up_proj.weight)
        assert torch.equal(head.upper[1].self_attn.q_proj.weight, source.self_attn.q_proj.weight)
        norms = head.upper[0].input_layernorm, source.input_layernorm
        torch.testing.assert_close(*(norm(states[0, :, :64]) for norm in norms))


def test_linear_start_is_the_ridge_solution(target, data):
    """fc and the self-attending heads together are the regression, solved here another way."""
    examples = view(target, data, data.train)
    states, tokens, wanted = examples.first_guesses(8, 10**6)
    # Pairs by hand: index p and the row after it, where that row predicts an answer token.
    places = [
        f + p
        for f, n in zip(examples.first, examples.length, strict=True)
        for p in range(n - 1)
        if examples.answer[f + p + 1]
    ]
    rows = examples.rows[places]
    assert torch.equal(states, torch.cat([data.store.load(b, rows) for b in LAYERS], -1))
    assert torch.equal(wanted, data.store.load(8, rows + 1))
    assert len(examples.first_guesses(8, 20)[0]) == 20

    head = new_head(target, data, start="target")
    fit_start(head, states, tokens, wanted, seed=0, block=50)
    e = head.embedding[tokens].double()
    e = e / (e.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt()
    x = torch.cat([states.double(), e], 1)
    scale = x.pow(2).mean(0).sqrt()
    # Ridge regression as plain least squares with rows for the penalty.
    penalty = (0.03 * len(x)) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    rows = torch.cat([x / scale, penalty])
    y = torch.cat([wanted.double(), torch.zeros(len(penalty), 64, dtype=torch.float64)])
    solution = torch.linalg.lstsq(rows, y).solution / scale[:, None]
    a, b = solution[:-64], solution[-64:]
    torch.testing.assert_close(head.fc.weight.T.double(), a, rtol=1e-3, atol=1e-4)
    # One position alone attends to itself, so its attention is the embedding's linear map, cut to
    # rank 16: one key-value head of two.
    u, s, v = torch.linalg.svd(e @ b, full_matrices=False)
    best = (u[:, :16] * s[:16]) @ v[:16]
    mixed = head.midlayer.mix(head.embedding[tokens], head.fuse(states.float()))
    values = head.midlayer.self_attn.v_proj(mixed).unflatten(-1, (2, 16))
    out = (
        values[:, :1].repeat_interleave(2, 1).flatten(1)
        @ head.midlayer.self_attn.o_proj.weight[:, :32].T
    )
    torch.testing.assert_close(out.double(), best, rtol=1e-2, atol=1e-2)


def test_linear_start_attends_to_itself_and_learns_faster(target, data, tmp_path):
    examples = view(target, data, data.train)
    losses = {}
    for fitted in (False, True):
        head = new_head(target, data, start="target")
        if fitted:
            fit_start(head, *examples.first_guesses(8, 10**6), seed=0)
        counts = examples.loss_counts(range(11), 1)
        with torch.no_grad():
            losses[fitted] = ttt_loss(head, examples.batch(range(11), 1), counts)[0]
    assert losses[True] < losses[False]
    batch = examples.batch([0], 1)
    mixed = head.midlayer.mix(head.embedding[batch.tokens], head.fuse(batch.states))
    head.ensure_positions(64)
    rotary = head.cos[batch.positions], head.sin[batch.positions]
    q = head.midlayer.self_attn.queries(mixed, rotary)[:, 0]
    k = head.midlayer.self_attn.keys_values(mixed, rotary)[0][:, 0]
    # Among different tokens every position prefers itself.
    scores = q @ k.T / 16**0.5
    other = batch.tokens[:, None] != batch.tokens
    assert (scores.diagonal()[:, None] > scores)[other].all()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "cohere", "olmo", "gpt2"])
def test_norm_weight_is_what_the_norm_multiplies_by(architecture):
    """Plain, stored minus one, with the mean subtracted, without a weight, and with a bias."""
    target = tiny_target(architecture=architecture)
    norm, d = target.final_norm, target.d_model
    own = getattr(norm, "weight", None)
    if own is not None:
        own += torch.randn(d, generator=torch.Generator().manual_seed(0))
    found = norm_weight(norm, d)
    if architecture == "gpt2":
        assert found is None
    elif own is None:
        assert torch.equal(found, torch.ones(d))
    else:
        expected = own + 1 if architecture == "gemma3_text" else own
        torch.testing.assert_close(found, expected)
    assert norm_weight(None, d) is None
