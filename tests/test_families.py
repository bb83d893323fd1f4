"""Tiny models of many architectures, each through everything that the book does with a target.

A row of ``FAMILIES`` is one way in which architectures differ where it matters here: norms, biases,
output scales, windows, positions, experts, caches, and what cannot be done by name and reason.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftlayers import writing
from draftlayers.capabilities import ABILITIES, capabilities_of, check_target
from draftlayers.decoding import decode
from draftlayers.engine import Engine
from draftlayers.examples import TrainingData
from draftlayers.head import DraftHead
from draftlayers.project import UserError
from draftlayers.prompts import Conversation
from draftlayers.states import collect
from draftlayers.targets import Target, tiny_tokenizer
from draftlayers.training import TrainingSettings, train_head
from draftlayers.writing import Request, Writer
from tests.oracle import PROMPT, Oracle

TOKENIZER = tiny_tokenizer()
LAYERS = 4
SHORT = [9, 8, 7, 6]
BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = {**BASE, "num_key_value_heads": 2}
USUAL = {**GROUPED, "head_dim": 16}
GPT = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
OPT = {**BASE, "ffn_dim": 96, "init_std": 0.15}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **BASE, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 24,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# Name: model type, settings, and what cannot be done with a part of the reason.
FAMILIES: dict[str, tuple[str, dict, dict[str, str]]] = {
    "llama": ("llama", USUAL, {}),
    "mistral, window": ("mistral", {**USUAL, "sliding_window": 8}, {}),
    "ministral, windows": ("ministral", {**USUAL, "sliding_window": 8}, {}),
    "ministral 3, scaled queries": (
        "ministral3", {**USUAL, "sliding_window": None, "rope_parameters": YARN}, {},
    ),
    "qwen 2, windows above": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {},
    ),
    "qwen 3": ("qwen3", USUAL, {}),
    "qwen 2 moe": (
        "qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 48}, {},
    ),
    "qwen 3 moe": ("qwen3_moe", {**USUAL, **EXPERTS}, {}),
    "qwen 3 next": (
        "qwen3_next",
        {
            **USUAL, **EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        {"decode": "linear_attention", "trees": "linear_attention"},
    ),
    "gemma": ("gemma", USUAL, {}),
    "gemma 2": ("gemma2", {**USUAL, "sliding_window": 8, "query_pre_attn_scalar": 16}, {}),
    "gemma 3": ("gemma3_text", {**USUAL, "sliding_window": 8, "query_pre_attn_scalar": 16}, {}),
    "gemma 3, nested": (
        "gemma3",
        {
            "text_config": {
                **USUAL, "sliding_window": 8, "query_pre_attn_scalar": 16, "vocab_size": 512,
                "initializer_range": 0.15,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        {},
    ),
    "phi": ("phi", GROUPED, {}),
    "phi 3, window": ("phi3", {**GROUPED, "sliding_window": 8}, {}),
    "phi 3, longrope": (
        "phi3",
        {
            **GROUPED, "rope_parameters": LONGROPE, "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
        },
        {},
    ),
    "olmo": ("olmo", GROUPED, {}),
    "olmo 2": ("olmo2", GROUPED, {}),
    "olmo 3": ("olmo3", {**GROUPED, "sliding_window": 8}, {}),
    "granite": (
        "granite",
        {
            **GROUPED, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "logits_scaling": 6.0, "attention_multiplier": 0.1,
        },
        {},
    ),
    "hyperclova x": ("hyperclovax", {**GROUPED, "logits_scaling": 0.37}, {}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.8333}, {}),
    "cohere 2": ("cohere2", {**USUAL, "sliding_window": 8}, {}),
    "gpt-2": ("gpt2", GPT, {}),
    "gpt-neo": (
        "gpt_neo",
        {
            "hidden_size": 64, "num_layers": LAYERS, "num_heads": 4, "window_size": 16,
            "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 256,
        },
        {"trees": "chains, not trees"},
    ),
    "gpt-neox": ("gpt_neox", BASE, {}),
    "gpt-j": ("gptj", {**GPT, "rotary_dim": 8, "tie_word_embeddings": False}, {}),
    "gpt-oss": (
        "gpt_oss",
        {**USUAL, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "falcon": ("falcon", {**BASE, "alibi": False}, {}),
    "falcon, alibi": ("falcon", {**BASE, "alibi": True}, {"trees": "chains, not trees"}),
    "falcon, grouped": (
        "falcon", {**BASE, "num_kv_heads": 2, "new_decoder_architecture": True}, {},
    ),
    "bloom": (
        "bloom", {"hidden_size": 64, "n_layer": LAYERS, "n_head": 4},
        {"trees": "chains, not trees"},
    ),
    "mpt": (
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 256, "expansion_ratio": 2},
        {"trees": "chains, not trees"},
    ),
    "opt": ("opt", {**OPT, "word_embed_proj_dim": 64}, {}),
    "opt, projected": ("opt", {**OPT, "word_embed_proj_dim": 32}, {"train": "32 numbers"}),
    "opt, norms behind": (
        "opt",
        {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        {"train": "32 numbers"},
    ),
    "stablelm": ("stablelm", GROUPED, {}),
    "starcoder 2": ("starcoder2", {**GROUPED, "sliding_window": 8}, {}),
    "deepseek 3": ("deepseek_v3", LATENT, {}),
    "mixtral": ("mixtral", {**USUAL, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "llama 4, chunks": (
        "llama4_text",
        {**USUAL, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},
        {"trees": "chains, not trees"},
    ),
}  # fmt: skip


def build(kind: str, settings: dict):
    """A model with random weights, large enough that layers differ and tokens are preferred."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        kind, **{"vocab_size": 512, "initializer_range": 0.15, **ids, **settings}
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> tuple[str, Target, dict[str, str]]:
    kind, settings, cannot = FAMILIES[request.param]
    return request.param, Target(request.param, build(kind, settings), TOKENIZER), cannot


def generated(target: Target, prompt: list[int], n: int, eos: list[int] | None) -> list[int]:
    """Hugging Face's own greedy answer."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
        eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def test_boundaries_are_what_enters_each_layer(family):
    _, target, _ = family
    n = target.n_layers
    with target.capture(range(n + 1)) as states:
        output = target.model(torch.tensor([PROMPT]), output_hidden_states=True)
    for b in range(n):
        assert torch.equal(states[b], output.hidden_states[b]), b
    left: list[torch.Tensor] = []
    hook = target.layers[-1].register_forward_hook(
        lambda module, args, out: left.append((out[0] if isinstance(out, tuple) else out).clone())
    )
    target.model(torch.tensor([PROMPT]))
    hook.remove()
    assert torch.equal(states[n], left[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_the_last_boundary_unembeds_to_the_logits(family, dtype):
    name, target, _ = family
    if dtype != torch.float32:
        target = Target(name, copy.deepcopy(target.model).to(dtype), TOKENIZER)
    with target.capture([target.n_layers]) as states:
        logits = target.model(torch.tensor([PROMPT])).logits.float()
    error = (target.unembed(states[target.n_layers]) - logits).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * max(1.0, logits.abs().max())


def test_conversations_of_unequal_length_give_the_states_of_single_ones(family, tmp_path):
    _, target, _ = family
    talks = [
        Conversation("a", "x", tuple(PROMPT), tuple(range(20, 31))),
        Conversation("b", "x", tuple(SHORT), (60, 61, 62)),
    ]
    boundaries = [0, 2, target.n_layers]
    both = collect(target, talks, boundaries, tmp_path, top=4)
    alone = [collect(target, [talk], boundaries, tmp_path, top=4) for talk in talks]
    for b in boundaries:
        single = torch.cat([store.load(b) for store in alone]).float()
        assert (both.load(b).float() - single).abs().max() <= 0.01 * single.abs().max()
    entropies = torch.cat([store.meta["predictive_entropy"] for store in alone])
    torch.testing.assert_close(both.meta["predictive_entropy"], entropies, atol=1e-3, rtol=1e-3)


def test_answers_are_those_of_generate(family, monkeypatch):
    monkeypatch.setattr(writing, "ENTER_TOGETHER", 1)
    _, target, cannot = family
    requests = [Request(PROMPT, 32), Request(SHORT, 32)]
    writer = Writer(target)
    answers = dict(writer.write(requests))
    assert answers == dict(Writer(target, packed=False).write(requests))
    # The third enters beside the second when the first has ended.
    writer.streams = 2
    three = dict(writer.write([Request(SHORT, 3), *requests]))
    assert three == {0: answers[1][:3], 1: answers[0], 2: answers[1]}
    # Where the rotary embedding changes with the length of the text, an answer may end there.
    limit = target.context_limit if "decode" in cannot else Engine(target).limit
    for number, prompt in enumerate((PROMPT, SHORT)):
        own = generated(target, prompt, 32, sorted(target.eos_ids))
        answer = answers[number]
        assert answer == own[: len(answer)]
        assert len(answer) in (len(own), limit - len(prompt))


def test_speculative_decoding_changes_nothing(family):
    _, target, cannot = family
    if "decode" in cannot:
        with pytest.raises(UserError, match=cannot["decode"]):
            Engine(target)
        return
    engine = Engine(target)
    engine.eos_ids = frozenset()
    plain = decode(engine, PROMPT, 40)
    assert plain.tokens == generated(target, PROMPT, 40, None)[: len(plain.tokens)]
    assert len(plain.tokens) == min(40, engine.limit - len(PROMPT))
    whole = PROMPT + plain.tokens
    assert decode(engine, PROMPT, 40, Oracle(whole, 4, 0.8)).tokens == plain.tokens
    tree = Oracle(whole, 3, 0.8, width=3)
    if "trees" in cannot:
        with pytest.raises(UserError, match=cannot["trees"]):
            decode(engine, PROMPT, 40, tree)
    else:
        assert decode(engine, PROMPT, 40, tree).tokens == plain.tokens


def test_a_head_learns_and_loads(family, tmp_path):
    _, target, cannot = family
    generator = torch.Generator().manual_seed(0)
    talks = [
        Conversation(str(i), "x", tuple(ids[:5].tolist()), tuple(ids[5:].tolist()))
        for i, ids in enumerate(torch.randint(3, 500, (6, 13), generator=generator))
    ]
    store = collect(target, talks, [1, 2, 3, LAYERS], tmp_path, predict="answer", top=64)
    data = TrainingData.split(store, validation=2, draft_vocab=60)
    settings = TrainingSettings(epochs=0.1, batch_tokens=30, learning_rate=1e-3, ttt_steps=2)
    if "train" in cannot:
        with pytest.raises(UserError, match="embedding of shape"):
            train_head(data, (1, 2, 3), target, settings, 0, tmp_path / "head")
        return
    trained = train_head(data, (1, 2, 3), target, settings, 0, tmp_path / "head")
    assert [record["update"] for record in trained.history] == [1]
    head = DraftHead.load(tmp_path / "head", target)
    logits = head.logits(torch.randn(2, target.d_model))
    assert logits.isfinite().all() and logits.abs().max() > 0


def test_what_cannot_be_done_is_known_before_weights_are_read(family):
    name, target, cannot = family
    # Four layers are too few for the book's comparison and enough for everything here.
    config = copy.deepcopy(target.model.config)
    config.get_text_config().num_hidden_layers = 8
    early = capabilities_of(config, TOKENIZER, target.model.generation_config, name)
    for ability in ABILITIES:
        why = getattr(early, ability)
        assert (cannot[ability] in why) if ability in cannot else why is None, (ability, why)
    late = check_target(target)
    for ability in ("decode", "trees"):
        why = getattr(late, ability)
        assert (cannot[ability] in why) if ability in cannot else why is None, (ability, why)


REFUSED = {
    "mamba": ({"state_size": 8}, "no attention"),
    "falcon_mamba": ({"state_size": 8}, "no attention"),
    "rwkv": ({"attention_hidden_size": 64}, "no attention"),
    "t5": ({}, "encoder with a decoder"),
    "bart": ({}, "encoder with a decoder"),
    "vit": ({}, "knows no causal language model"),
    "gemma3n_text": ({}, "residual streams"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_target_is_refused_by_name_and_reason(kind):
    settings, reason = REFUSED[kind]
    found = capabilities_of(AutoConfig.for_model(kind, **settings), TOKENIZER)
    assert all(getattr(found, ability) for ability in ABILITIES)
    assert reason in found.select
    with pytest.raises(UserError, match=r"choose layers .*" + reason):
        found.require("select", "train")
