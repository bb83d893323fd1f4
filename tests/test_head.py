"""The draft head: arithmetic against a naive reference, files, and what it takes from a target."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig, rope_of
from draftlayers.project import UserError
from draftlayers.start import start_at_random
from draftlayers.targets import Target, tiny_target, tiny_tokenizer
from tests.reference import naive_logits, naive_rms, naive_step

SHAPE = {
    "target": "t",
    "n_layers": 8,
    "layers": (2, 4, 5),
    "d_model": 32,
    "vocab_size": 64,
    "draft_vocab_size": 20,
    "intermediate_size": 48,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope": {"rope_type": "default", "rope_theta": 500.0},
    "max_positions": 128,
}


def make_head(fc_norm: bool = False, dtype=torch.float64, **changes) -> DraftHead:
    config = HeadConfig(**{**SHAPE, "fc_norm": fc_norm, **changes})
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(config.vocab_size, config.d_model, generator=generator)
    vocabulary = torch.randperm(config.vocab_size, generator=generator)
    head = DraftHead(config, embedding, vocabulary[: config.draft_vocab_size].sort().values)
    start_at_random(head, seed=0)
    with torch.no_grad():  # distinct norms, so that exchanging two of them would show
        for weight in head.parameters():
            if weight.ndim == 1:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            else:
                weight.mul_(10)
    return head.to(dtype).eval()


def inputs(head: DraftHead, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    c = head.config
    states = torch.randn(1, n, c.k * c.d_model, generator=generator).to(head.fc.weight.dtype)
    return states, torch.randint(c.vocab_size, (1, n), generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("head_layers", [1, 2, 3])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_forward_matches_naive_loops(fc_norm, head_layers):
    head = make_head(fc_norm, head_layers=head_layers)
    states, tokens = inputs(head, 7)
    cache = head.new_cache(7)
    out = head(head.fuse(states), tokens, torch.arange(7), cache)
    assert out.shape == (1, 7, 32) and head.logits(out).shape == (1, 7, 20)
    d, memory = head.config.d_model, [[] for _ in range(head_layers)]
    for p in range(7):
        parts = states[0, p].split(d)
        if fc_norm:
            parts = [
                naive_rms(x, n.weight, head.config.rms_norm_eps)
                for x, n in zip(parts, head.fc_norm, strict=True)
            ]
        hidden = head.fc.weight @ torch.cat(list(parts))
        expected = naive_step(head, memory, hidden, tokens[0, p], p)
        torch.testing.assert_close(out[0, p], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            head.logits(out)[0, p], naive_logits(head, expected), rtol=1e-6, atol=1e-6
        )


@torch.no_grad()
@pytest.mark.parametrize("head_layers", [1, 2])
def test_decoding_in_pieces_equals_one_pass(head_layers):
    head = make_head(head_layers=head_layers)
    states, tokens = inputs(head, 12)
    whole = head(head.fuse(states), tokens, torch.arange(12), head.new_cache(12))
    cache = head.new_cache(20)
    pieces = []
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        # What a rejected draft left behind is cut off again.
        head(head.fuse(states[:, :2]), tokens[:, :2], torch.arange(2), cache)
        cache.truncate(begin)
        pieces.append(
            head(head.fuse(states[:, begin:end]), tokens[:, begin:end],
                 torch.arange(begin, end), cache)
        )  # fmt: skip
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


@torch.no_grad()
def test_tree_mask_equals_separate_chains():
    head = make_head()
    states, tokens = inputs(head, 6)
    context = head.new_cache(16)
    root = head(head.fuse(states), tokens, torch.arange(6), context)[:, -1:]
    children = torch.tensor([[3, 9, 11]])
    # Three children of the root, then one grandchild below the second child.
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, 6:] = torch.eye(3, dtype=torch.bool)
    level = head(root.expand(1, 3, -1), children, torch.full((3,), 6), context, mask)
    below = torch.tensor([[True] * 6 + [False, True, False] + [True]])
    grandchild = head(level[:, 1:2], torch.tensor([[5]]), torch.tensor([7]), context, below)
    for i, child in enumerate(children[0]):
        alone = head.new_cache(16)
        head(head.fuse(states), tokens, torch.arange(6), alone)
        state = head(root, child.view(1, 1), torch.tensor([6]), alone)
        torch.testing.assert_close(state, level[:, i : i + 1])
        if i == 1:
            last = head(state, torch.tensor([[5]]), torch.tensor([7]), alone)
            torch.testing.assert_close(last, grandchild)


def test_cache_refuses_what_does_not_fit():
    head = make_head()
    states, tokens = inputs(head, 3)
    cache = head.new_cache(2)
    with pytest.raises(UserError, match="holds 2 entries and 3 are needed"):
        head(head.fuse(states), tokens, torch.arange(3), cache)
    with pytest.raises(UserError, match="cannot keep 5 of 0"):
        cache.truncate(5)


def test_weights_have_official_names():
    names = {n.removesuffix(".weight") for n in make_head().state_dict()}
    attention = {f"midlayer.self_attn.{p}_proj" for p in "qkvo"}
    mlp = {f"midlayer.mlp.{p}_proj" for p in ("gate", "up", "down")}
    norms = {
        f"midlayer.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    assert names == attention | mlp | norms | {"fc", "norm", "lm_head", "d2t", "t2d"}
    assert {n for n in make_head(fc_norm=True).state_dict() if "fc_norm" in n} == {
        f"fc_norm.{i}.weight" for i in range(3)
    }


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((24, 5, 13), "ascending"),
        ((5, 5, 13), "without repeats"),
        ((), "at least one"),
        ((2, 9), "from 0 to 8"),
        ((-1, 2), "from 0 to 8"),
    ],
)
def test_layers_are_checked(layers, message):
    with pytest.raises(UserError, match=message):
        HeadConfig(**{**SHAPE, "layers": layers})


def test_config_survives_json():
    config = HeadConfig(**SHAPE, fc_norm=True)
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UserError, match="without n_layers"):
        HeadConfig.from_dict({k: v for k, v in config.to_dict().items() if k != "n_layers"})
    with pytest.raises(UserError, match="unknown colour"):
        HeadConfig.from_dict({**config.to_dict(), "colour": 1})


def test_vocabulary_maps_are_offsets_and_a_mask():
    config = HeadConfig(**{**SHAPE, "draft_vocab_size": 3})
    head = DraftHead(config, torch.zeros(64, 32), torch.tensor([3, 7, 9]))
    assert head.d2t.tolist() == [3, 6, 7] and head.vocabulary.tolist() == [3, 7, 9]
    assert head.to_target(torch.tensor([[0, 2], [1, 1]])).tolist() == [[3, 9], [7, 7]]
    assert head.t2d.nonzero()[:, 0].tolist() == [3, 7, 9] and head.t2d.dtype == torch.bool
    for wrong in ([7, 3, 9], [3, 3, 9], [3, 7], [3, 7, 64]):
        with pytest.raises(UserError, match="ascending, distinct"):
            DraftHead(config, torch.zeros(64, 32), torch.tensor(wrong))
    with pytest.raises(UserError, match="all zeros"):
        DraftHead(config, torch.zeros(64, 32), torch.tensor([0, 1, 2]))
    whole = HeadConfig(**{**SHAPE, "draft_vocab_size": 64})
    assert not DraftHead(whole, torch.zeros(64, 32), torch.arange(64)).d2t.any()


@torch.no_grad()
@pytest.mark.parametrize(
    "shape", [{}, {"fc_norm": True}, {"head_layers": 2, "norm_output": True}], ids=str
)
@pytest.mark.parametrize("layers", [(5,), (2, 4, 5), (1, 3, 4, 6)])
def test_saved_head_comes_back(tmp_path, target, layers, shape):
    config = HeadConfig.for_target(target, layers, 100, **shape)
    vocabulary = torch.arange(100) * 3
    head = DraftHead(config, target.model.get_input_embeddings().weight, vocabulary)
    start_at_random(head, seed=3)
    head.save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert not any("embed" in name for name in load_file(tmp_path / "model.safetensors"))
    again = DraftHead.load(tmp_path, target)
    assert again.config == config
    assert again.embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    states, tokens = inputs(head, 5)
    one, two = (
        h.logits(h(h.fuse(states), tokens, torch.arange(5), h.new_cache(5))) for h in (head, again)
    )
    assert torch.equal(one, two)


@torch.no_grad()
def test_a_tied_output_matrix_is_not_in_the_file(tmp_path, target):
    """It is made again from the target; a file in half precision is read in the target's own."""
    config = HeadConfig.for_target(target, (2, 4, 5), 100, tied_output=True)
    head = DraftHead(config, target.model.get_input_embeddings().weight, torch.arange(100) * 3)
    start_at_random(head, seed=3)
    head.tie_output(target)
    rows = target.output_matrix.weight[torch.arange(100) * 3]
    assert torch.equal(head.lm_head.weight, rows) and not head.lm_head.weight.requires_grad
    rounded = head.to(torch.bfloat16)
    rounded.save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = DraftHead.load(tmp_path, target)
    assert again.fc.weight.dtype == torch.float32 and torch.equal(again.lm_head.weight, rows)
    assert torch.equal(again.fc.weight, rounded.fc.weight.float())
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.weight": rows}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tied to its target's"):
        DraftHead.load(tmp_path, target)


def test_damaged_heads_are_refused(tmp_path, target):
    with pytest.raises(UserError, match="holds no draft head"):
        DraftHead.load(tmp_path / "nowhere", target)
    config = HeadConfig.for_target(target, (2, 4, 5), 100)
    embedding = target.model.get_input_embeddings().weight
    head = DraftHead(config, embedding, torch.arange(100) + 1)
    start_at_random(head, seed=0)

    def spoil(message, weights=lambda w: w, config=lambda c: c):
        head.save(tmp_path)
        changed = weights(load_file(tmp_path / "model.safetensors"))
        save_file(changed, tmp_path / "model.safetensors")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config(json.loads(path.read_text()))))
        with pytest.raises(UserError, match=message):
            DraftHead.load(tmp_path, target)

    spoil("no d2t", lambda w: {k: v for k, v in w.items() if k != "d2t"})
    spoil("all zeros", lambda w: {**w, "d2t": torch.zeros_like(w["d2t"])})
    spoil("different draft vocabularies", lambda w: {**w, "t2d": w["t2d"].roll(1)})
    spoil("misshapen weights: fc.weight", lambda w: {**w, "fc.weight": w["fc.weight"][1:]})
    spoil("misshapen weights: extra", lambda w: {**w, "extra": torch.zeros(1)})
    spoil("norm.weight holds values", lambda w: {**w, "norm.weight": w["norm.weight"] / 0})
    spoil("without rope", config=lambda c: {k: v for k, v in c.items() if k != "rope"})
    spoil("has 8", config=lambda c: {**c, "n_layers": 30})
    spoil("is not a draftlayers-head", config=lambda c: {**c, "format": "other"})
    for name in ("model.safetensors", "config.json"):
        head.save(tmp_path)
        data = (tmp_path / name).read_bytes()
        for junk in (data[: len(data) // 2], b"junk", b""):
            (tmp_path / name).write_bytes(junk)
            with pytest.raises(UserError, match="holds no draft head"):
                DraftHead.load(tmp_path, target)


def test_rope_settings_are_carried():
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = tiny_target(rope_parameters=scaling)
    config = HeadConfig.for_target(target, (2, 4, 5), 100)
    assert config.rope == scaling
    head = DraftHead(config, target.model.get_input_embeddings().weight, torch.arange(100) + 1)
    head.ensure_positions(50)
    cos, sin = target.decoder.rotary_emb(torch.zeros(1), torch.arange(50)[None])
    torch.testing.assert_close(head.cos[:50], cos[0])
    torch.testing.assert_close(head.sin[:50], sin[0])


def tables(rope: dict, count: int, **changes) -> torch.Tensor:
    head = make_head(rope=rope, **changes)
    head.ensure_positions(count)
    return torch.stack((head.cos, head.sin))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(("rope", "limit"), [(LONGROPE, 128), (DYNAMIC, 32)])
def test_rotary_tables_do_not_depend_on_earlier_texts(rope, limit):
    """A head that once read a long text reads a short one as before."""
    short, long = (tables(rope, n, max_positions=limit) for n in (20, 120))
    assert short.shape[1] >= 20 and long.shape[1] >= 120
    assert torch.equal(short[:, :20], long[:, :20])
    head = make_head(rope=rope, max_positions=limit)
    for count in (5, 100, 20):
        head.ensure_positions(count)
    assert torch.equal(torch.stack((head.cos, head.sin))[:, :20], short[:, :20])
    # In the length that the target was first trained on they turn as the target does.
    factors = torch.tensor(rope.get("short_factor", [1.0] * 4)).double()
    angles = torch.arange(32).double()[:, None] / (factors * 1e4 ** (torch.arange(4) / 4))
    scale = (1 + math.log(4) / math.log(32)) ** 0.5 if rope is LONGROPE else 1.0
    expected = scale * torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)
    torch.testing.assert_close(long[:, :32], expected.float(), rtol=1e-5, atol=1e-5)


def test_longrope_for_part_of_a_head_gives_the_plain_base():
    rope = {**LONGROPE, "rope_theta": 5e3, "partial_rotary_factor": 0.5, "long_factor": [4.0, 8.0]}
    config = SimpleNamespace(rope_parameters={**rope, "short_factor": [1.0, 1.5]})
    assert rope_of(config) == {"rope_type": "default", "rope_theta": 5e3}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("bloom", {"n_layer": 8, "n_head": 4}),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 8, "max_seq_len": 256}),
    ],
)
def test_context_under_any_name(architecture, sizes):
    tokenizer = tiny_tokenizer()
    settings = AutoConfig.for_model(
        architecture, **{"vocab_size": len(tokenizer), "hidden_size": 64, **sizes}
    )
    model = AutoModelForCausalLM.from_config(settings)
    target = Target("t", model, tokenizer)
    config = HeadConfig.for_target(target, (2, 4, 5), 100)
    assert config.max_positions == target.context_limit and config.rope["rope_type"] == "default"
