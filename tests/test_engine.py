"""The engine's passes equal the model's own, and leave the model as it was."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from oracle import Oracle, build, greedy_reference, random_head
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoConfig,
    MptConfig,
)
from transformers.models.llama.modeling_llama import LlamaModel

from draftlayers import capabilities
from draftlayers.contexts import own_windows
from draftlayers.decoding import decode
from draftlayers.device import multiplies_bfloat16
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine, decodable
from draftlayers.passes import ChainPass, HuggingFacePass, KVCache, LlamaPass
from draftlayers.project import UserError
from draftlayers.targets import Target, tiny_target, tiny_tokenizer

PROMPT = [5, 17, 200, 33, 8, 91, 4, 300, 12]


def test_the_model_is_left_as_it_was() -> None:
    target = tiny_target(architecture="gemma3_text")
    engine = Engine(target)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), engine.session(20):
        engine.prefill(PROMPT)
        assert any("forward" in vars(m) for m in target.model.modules())
        raise RuntimeError("stop")
    assert not any("forward" in vars(m) for m in target.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "architecture, lean",
    [("llama", True), ("qwen2", True), ("qwen3", True), ("mistral", True),
     ("gemma3_text", False), ("gpt2", False), ("granite", False)],
)  # fmt: skip
def test_which_way_a_pass_is_run(architecture: str, lean: bool) -> None:
    config = {"residual_multiplier": 0.5} if architecture == "granite" else {}
    engine = Engine(tiny_target(architecture=architecture, **config))
    assert engine.way.startswith("lean" if lean else "Hugging Face")


@pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 products here")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_packed_passes_in_bfloat16(architecture: str) -> None:
    """No further from the float32 model than the bfloat16 model itself is, but for rounding."""
    target = tiny_target(architecture=architecture)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        exact = target.model(ids).logits[0, -1]
        target.model.to(torch.bfloat16)
        own = target.model(ids).logits[0, -1].float()
    engine = Engine(target)
    assert engine.packed and engine.way.endswith("packed weights")
    with engine.session(20, (2, 5)):
        logits, states = engine.prefill(PROMPT)
    assert logits.dtype == torch.float32 and states.dtype == torch.bfloat16
    assert (logits - exact).norm() < 2 * (own - exact).norm()


def test_a_lean_pass_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite's parts look like Llama's, but it scales its residual stream."""
    monkeypatch.setattr(LlamaPass, "fits", staticmethod(lambda target, packed: True))
    for architecture in ("granite", "gemma", "olmo"):  # the last two stumble over their norms
        config = {"residual_multiplier": 0.5} if architecture == "granite" else {}
        engine = Engine(tiny_target(architecture=architecture, **config))
        assert engine.way.startswith("Hugging Face")


def test_no_error_of_a_way_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one in asking whether it fits, nor one in building it."""

    def broken(*anything):
        raise AttributeError("no such part")

    monkeypatch.setattr(LlamaPass, "fits", broken)
    monkeypatch.setattr(HuggingFacePass, "_inputs", broken)
    monkeypatch.setattr(ChainPass, "_inputs", lambda way, tokens, *others: [tokens, None, None])
    assert Engine(tiny_target(n_layers=4)).way.endswith("its own masks")


@pytest.mark.parametrize("limit", range(13, 17))
def test_a_very_short_context(limit: int) -> None:
    engine = build("gpt2", n_layers=2, n_positions=limit)
    assert engine.trees and len(decode(engine, PROMPT, 9).tokens) == limit - len(PROMPT)


def test_an_engine_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "move", lambda cache, sources, to: None)
    monkeypatch.setattr(KVCache, "get_seq_length", lambda cache, layer=0: 0)
    monkeypatch.setattr("draftlayers.passes.windows", lambda target: {"all": 2})
    with pytest.raises(UserError, match="cannot be decoded here"):
        Engine(tiny_target(architecture="gpt2"))


@pytest.mark.parametrize("architecture", ["gemma", "olmo"])
def test_norms_that_are_not_llamas(architecture: str) -> None:
    """Gemma's adds one to the weight and calls its epsilon otherwise; OLMo's has no weight."""
    engine = build(architecture)
    assert engine.way.startswith("Hugging Face") and engine.trees
    expected = greedy_reference(engine, PROMPT, 20)
    assert decode(engine, PROMPT, 20, Oracle(PROMPT + expected, 4, 0.8, 2)).tokens == expected


def test_a_norm_that_only_looks_like_llamas() -> None:
    """The names agree, and what is computed does not: the numbers decide."""
    target = tiny_target()
    assert LlamaPass.fits(target, True)
    norm = type(target.layers[3].input_layernorm)
    centred = type(
        "Centred", (norm,), {"forward": lambda self, x: norm.forward(self, x - x.mean())}
    )
    target.layers[3].input_layernorm.__class__ = centred
    assert not LlamaPass.fits(target, True)


def test_settings_that_hardly_show_rule_the_lean_pass_out() -> None:
    """A cap of 1000 changes small logits by less than the comparison sees."""
    target = tiny_target()
    target.config.final_logit_softcapping = 1000.0
    assert not LlamaPass.fits(target, True)


@pytest.mark.parametrize("original", [32, 4096])
def test_queries_scaled_beyond_the_original_context(original: int) -> None:
    """Ministral 3's, whether the length lies within reach of a check or far beyond."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    target = tiny_target(
        architecture="ministral3", n_layers=4, sliding_window=None, rope_parameters=rope,
        max_position_embeddings=16 * original,
    )  # fmt: skip
    engine = Engine(target)
    assert not engine.way.startswith("lean")
    prompt = [(7 * i) % 500 for i in range(2 * original if original < 100 else 50)]
    with engine.session(len(prompt)):
        logits, _ = engine.prefill(prompt)
    with torch.no_grad():
        expected = target.model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_rotary_embeddings_that_turn_by_length(architecture: str) -> None:
    """Exact up to the length at which they change; refused beyond, with the reason."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    engine = build(
        architecture, n_layers=4, max_position_embeddings=128, rope_parameters=rope | factors,
        original_max_position_embeddings=32,
    )  # fmt: skip
    assert engine.limit == 32 and "up to 32 tokens" in engine.way
    plain = decode(engine, PROMPT, 60)
    assert plain.stop == "context" and len(PROMPT + plain.tokens) == 32
    assert plain.tokens == greedy_reference(engine, PROMPT, len(plain.tokens))
    for width in (1, 3):
        run = decode(engine, PROMPT, 60, Oracle(PROMPT + plain.tokens + [1] * 9, 4, 0.9, width))
        assert run.tokens == plain.tokens and run.stop == "context"
    with pytest.raises(UserError, match=r"32 tokens up to which .* longrope"):
        decode(engine, [5] * 40, 5)


def test_a_rope_by_length_that_never_changes_has_no_limit_of_its_own() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    engine = build(
        "phi3", n_layers=4, max_position_embeddings=64, rope_parameters=rope | factors,
        original_max_position_embeddings=64,
    )  # fmt: skip
    assert engine.limit == 64 and "up to" not in engine.way
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    engine = build("llama", n_layers=4, max_position_embeddings=32, rope_parameters=dynamic)
    plain = decode(engine, PROMPT, 60)
    assert len(PROMPT + plain.tokens) == 32
    assert plain.tokens == greedy_reference(engine, PROMPT, len(plain.tokens))


def without_masks(name: str) -> Target:
    """Models that place or mask tokens by themselves."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "initializer_range": 0.15}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = {
        "bloom": lambda: BloomConfig(**sizes, **ends, n_layer=4, n_head=4),
        "mpt": lambda: MptConfig(
            vocab_size=512, d_model=64, n_layers=4, n_heads=4, max_seq_len=256, expansion_ratio=2,
            initializer_range=0.15, **ends,
        ),
        "gpt_neo": lambda: GPTNeoConfig(
            **sizes, **ends, num_layers=4, num_heads=4, window_size=16,
            attention_types=[[["global", "local"], 2]], max_position_embeddings=256,
        ),
        "gpt_neo, far window": lambda: GPTNeoConfig(
            **sizes, **ends, num_layers=4, num_heads=4, window_size=900,
            attention_types=[[["global", "local"], 2]], max_position_embeddings=1024,
        ),
        "falcon": lambda: AutoConfig.for_model(
            "falcon", **sizes, **ends, num_hidden_layers=4, num_attention_heads=4, alibi=True
        ),
    }[name]()  # fmt: skip
    torch.manual_seed(0)
    return Target(name, AutoModelForCausalLM.from_config(config).float(), tiny_tokenizer())


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt_neo", "gpt_neo, far window", "falcon"])
def test_models_that_mask_by_themselves_decode_chains_and_refuse_trees(name: str) -> None:
    engine = Engine(without_masks(name))
    engine.eos_ids = frozenset()
    expected = greedy_reference(engine, PROMPT, 60)
    assert not engine.trees and engine.way.endswith("its own masks")
    assert decode(engine, PROMPT, 60).tokens == expected
    run = decode(engine, PROMPT, 60, Oracle(PROMPT + expected, 4, 0.8))
    assert run.tokens == expected and run.passes < 40
    head = random_head(engine, layers=(1, 2, 3))
    assert decode(engine, PROMPT, 20, HeadDrafter(head, 3)).tokens == expected[:20]
    engine.session = None  # refused before anything is run
    with pytest.raises(UserError, match="chains, not trees"):
        decode(engine, PROMPT, 60, HeadDrafter(head, 3, top_k=2))


def test_a_window_under_another_name_is_found_by_its_form() -> None:
    """Doge sees itself and its cache differently past ``keep_window_size``."""
    target = tiny_target(architecture="doge", n_layers=8, keep_window_size=16)
    assert own_windows(target.config) == {"keep_window_size": 16}
    with pytest.raises(UserError, match=r"DogeForCausalLM .* cannot be decoded"):
        Engine(target)
    assert "not its own" in str(capabilities._wrong_answers(target))


def test_the_check_tells_slots_from_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the configuration names otherwise is found by the numbers alone."""
    monkeypatch.setattr(HuggingFacePass, "fits", staticmethod(lambda target, packed: True))
    assert not Engine(without_masks("gpt_neo")).trees


def test_the_limit_is_the_targets() -> None:
    target = without_masks("bloom")
    target.context_limit = 30
    engine = Engine(target)
    engine.eos_ids = frozenset()
    run = decode(engine, PROMPT, 100)
    assert run.stop == "context" and len(PROMPT + run.tokens) == 30


class Older(LlamaModel):
    """A decoder as remote code has it, with the cache under its older name."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        inputs_embeds=None, use_cache=None, **others,
    ):  # fmt: skip
        named = (
            "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
        )
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **{named: past_key_values},
        )  # fmt: skip


def test_a_decoder_that_knows_the_older_name_of_the_cache() -> None:
    expected = greedy_reference(build("llama", n_layers=4), PROMPT, 20)
    target = tiny_target(n_layers=4)
    target.decoder.__class__ = Older
    engine = Engine(target, packed=False)
    engine.eos_ids = frozenset()
    assert decode(engine, PROMPT, 20, Oracle(PROMPT + expected, 4, 0.8, 2)).tokens == expected


def test_a_decoder_without_a_cache_is_refused_by_name() -> None:
    target = tiny_target(n_layers=4)
    target.decoder.__class__ = type("Cacheless", (LlamaModel,), {"forward": lambda self, x: x})
    with pytest.raises(UserError, match="Cacheless takes no key-value cache"):
        Engine(target, packed=False)


@pytest.mark.parametrize(
    "kind",
    ["mamba", "mamba2", "rwkv", "jamba", "bamba", "falcon_h1", "granitemoehybrid", "qwen3_next",
     "recurrent_gemma", "zamba2"],
)  # fmt: skip
def test_states_that_cannot_forget_are_refused_from_the_configuration(kind: str) -> None:
    assert "rejected ones cannot be taken back" in decodable(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "mixtral", "bloom", "phi3"])
def test_what_can_be_decoded(kind: str) -> None:
    assert decodable(AutoConfig.for_model(kind)) is None


def test_states_that_cannot_be_taken_back_are_refused() -> None:
    target = tiny_target(architecture="qwen3")
    target.config.layer_types = ["linear_attention", "full_attention"] * 4
    with pytest.raises(UserError, match="linear_attention"):
        Engine(target)


class Replayed:
    """What a CUDA graph does, without CUDA: the same buffers are computed with again."""

    def __init__(self, run, inputs):
        self.run, self.inputs = run, [t.clone() for t in inputs]

    def __call__(self, inputs):
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        return self.run(self.inputs)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("fixed", [False, True])
def test_passes_give_the_states_of_boundaries(
    architecture: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In growing and in fixed shapes, as CUDA graphs need them."""
    config = {"sliding_window": 5} if architecture == "gemma3_text" else {}
    target = tiny_target(architecture=architecture, **config)
    engine = Engine(target)
    if fixed:
        monkeypatch.setattr("draftlayers.passes.GraphedPass", Replayed)
        engine.passes = HuggingFacePass(target, packed=False)
        engine.passes.graphed = True
        engine.kv.layers.clear()
        engine.kv.fixed = True
    boundaries = (1, 4, 8)
    more = torch.tensor([40, 41, 42])
    with engine.session(12, boundaries, new=3):
        logits, states = engine.prefill(PROMPT)
        engine.forward(torch.tensor([3, 9]))
        engine.keep([])  # both rejected
        after, new_states = engine.forward(more)
        engine.keep([0, 1])
        assert engine.length == len(PROMPT) + 2
    if fixed:
        # 2 tokens, and 3 filled up.
        assert sorted(engine.passes.graphs) == [(boundaries, 2), (boundaries, 4)]
    ids = torch.tensor([[*PROMPT, *more.tolist()]])
    with torch.no_grad(), target.capture(boundaries) as own:
        expected = target.model(ids).logits[0]
    torch.testing.assert_close(logits, expected[len(PROMPT) - 1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(after, expected[len(PROMPT) :], atol=1e-3, rtol=1e-3)
    wanted = torch.cat([own[b][0] for b in boundaries], dim=-1)
    torch.testing.assert_close(torch.cat([states, new_states]), wanted, atol=1e-3, rtol=1e-3)


def test_methods_that_take_turns_record_their_passes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph recorded anew at every change of the method would be timed as decoding."""
    recorded = []

    class Counted(Replayed):
        def __init__(self, run, inputs):
            recorded.append(len(inputs[0]))
            super().__init__(run, inputs)

    monkeypatch.setattr("draftlayers.passes.GraphedPass", Counted)
    engine = Engine(tiny_target())
    engine.passes = HuggingFacePass(engine.target, packed=False)
    engine.passes.graphed = engine.kv.fixed = True
    engine.kv.layers.clear()
    for _ in range(3):
        for boundaries in ((), (1, 4), (2,)):
            with engine.session(20, boundaries, new=2):
                engine.prefill(PROMPT)
                logits, states = engine.forward(torch.tensor([3, 9]))
            assert logits.shape[0] == 2
            assert (states is None) == (not boundaries)
            if boundaries:
                assert states.shape == (2, len(boundaries) * engine.target.d_model)
    assert recorded == [2, 2, 2]


def test_the_cache_grows_when_asked_for_more() -> None:
    engine = Engine(tiny_target())
    for capacity in (10, 300, 20):
        with engine.session(capacity):
            assert engine.kv.capacity >= capacity
            engine.prefill(PROMPT)
            keys = engine.kv.layers[0].keys
        assert keys.shape[2] == engine.kv.capacity
