"""What a target can do is known by name and reason before any work, and proved when it is open."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, MambaConfig, MambaForCausalLM

from draftlayers import capabilities
from draftlayers.capabilities import ABILITIES, Capabilities, capabilities_of, check, check_target
from draftlayers.decoding import decode
from draftlayers.engine import Engine
from draftlayers.project import PROJECT, UserError
from draftlayers.targets import Target, tiny_target, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
}  # fmt: skip


def of(kind: str = "llama", generation: GenerationConfig | None = None, **settings) -> Capabilities:
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    return capabilities_of(config, TOKENIZER, generation)


def cannot(found: Capabilities) -> set[str]:
    return {ability for ability in ABILITIES if getattr(found, ability)}


def test_the_tiny_target_can_do_everything(tiny):
    for found in (check("tiny"), check_target(tiny)):
        assert not cannot(found) and not found.notes
        assert (found.name, found.n_layers, found.context_limit) == ("tiny", 8, 1024)
        assert [row[1:] for row in found.rows()] == [("yes", "")] * len(ABILITIES)
        found.require(*ABILITIES)


def test_a_folder_is_checked_without_its_weights(tmp_path, monkeypatch):
    target = tiny_target()
    target.model.generation_config.repetition_penalty = 1.2
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(capabilities, "tiny_target", None)
    found = check(str(tmp_path))
    assert not cannot(found)
    assert "repetition_penalty=1.2" in found.notes[0] and "neither side" in found.notes[0]
    with pytest.raises(UserError, match="unknown model"):
        check(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("kind", "settings", "missing", "reason"),
    [
        ("llama", {"num_hidden_layers": 6}, {"select", "train"}, "at least 7 layers"),
        ("llama", {"vocab_size": 5}, {"select", "train"}, "5 tokens"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, set(ABILITIES),
         "gptq"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, set(ABILITIES),
         "LlamaForSequenceClassification"),
        ("t5", {}, set(ABILITIES), "t5 is an encoder with a decoder"),
        ("mamba", {}, set(ABILITIES), "no attention"),
        ("rwkv", {}, set(ABILITIES), "no attention"),
        ("jamba", {}, {"decode", "trees"}, "cannot be taken back"),
        ("opt", {"word_embed_proj_dim": 32}, {"train"}, "32 numbers and its layers 64"),
        ("gpt_neo", {"num_layers": 24}, {"trees"}, "window_size=256"),
        ("bloom", {}, {"trees"}, "ALiBi"),
        ("clip", {}, set(ABILITIES), "knows no causal language model of type clip"),
        ("gemma3n_text", {}, set(ABILITIES), "4 residual streams"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_has_a_name_and_a_reason(kind, settings, missing, reason):
    values = {**SIZES, **settings} if kind in ("llama", "opt", "bloom", "jamba") else settings
    found = capabilities_of(AutoConfig.for_model(kind, **values), TOKENIZER, name="mine")
    assert cannot(found) == missing
    assert any(reason in getattr(found, ability) for ability in missing)
    for ability in missing:
        with pytest.raises(UserError, match=f"mine cannot be used to {ABILITIES[ability][:9]}"):
            found.require(ability)
    found.require(*set(ABILITIES) - missing)
    assert [row[1] for row in found.rows()[: len(ABILITIES)]] == [
        "no" if ability in missing else "yes" for ability in ABILITIES
    ]


def test_a_context_must_hold_a_prompt_and_its_answer():
    found = of()
    found.require_room(200, 56)
    with pytest.raises(UserError, match=r"sequences of 256 tokens.*need 257.*answer_tokens"):
        found.require_room(200, 57)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1), ("encoder_repetition_penalty", 1.3), ("min_length", 20),
        ("min_new_tokens", 4), ("suppress_tokens", [7]), ("begin_suppress_tokens", [5, 6]),
        ("bad_words_ids", [[3, 4]]), ("forced_bos_token_id", 1), ("forced_eos_token_id", 2),
        ("no_repeat_ngram_size", 3), ("num_beams", 4),
    ],
)  # fmt: skip
def test_generation_settings_that_are_not_honoured_are_named(name, value):
    notes = of(generation=GenerationConfig(**{name: value})).notes
    assert len(notes) == 1 and f"{name}={value}" in notes[0]
    assert not of(generation=GenerationConfig()).notes


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "min_length": 30},
        {"suppress_tokens": list(range(100, 400)), "forced_eos_token_id": 7},
    ],
)
def test_generation_settings_are_honoured_by_neither_side_of_a_comparison(asked, monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    import decoding as benchmark

    target = tiny_target()
    prompt = [(7 * i + 3) % 500 for i in range(12)]
    plain = decode(Engine(target), prompt, 24).tokens
    target.model.generation_config.update(**asked)
    ids = torch.tensor([prompt])
    honoured = target.model.generate(ids, do_sample=False, max_new_tokens=24)[0, len(prompt) :]
    assert honoured.tolist() != plain
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 3}):
        assert benchmark.hugging_face(target, **options)(prompt, 24).tokens == plain
    assert all(getattr(target.model.generation_config, n) == value for n, value in asked.items())


def test_settings_that_change_no_greedy_decoding_are_not_named():
    assert not of(generation=GenerationConfig(temperature=0.6, top_p=0.9, do_sample=True)).notes


def test_prompts_and_experts_are_noted(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens(["<|beyond|>"])
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4)
    notes = " / ".join(capabilities_of(config, tokenizer).notes)
    assert "4 experts" in notes and "513 tokens and its embedding 512" in notes
    assert "plain question-and-answer format" in notes
    assert ("note", "", notes.split(" / ")[0]) in capabilities_of(config, tokenizer).rows()


def test_a_template_that_writes_no_question_is_refused_before_work():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only tools may speak') }}"
    found = capabilities_of(AutoConfig.for_model("llama", **SIZES), tokenizer)
    assert cannot(found) == {"write", "select", "train"}
    assert "only tools may speak" in found.select


# --- Open targets -------------------------------------------------------------------------------


def test_answers_that_are_not_the_models_own_are_found_out():
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=8, state_size=8, initializer_range=0.15
    )
    found = capabilities._wrong_answers(Target("m", MambaForCausalLM(config).float(), TOKENIZER))
    assert found is not None and ("not its own" in found or "cannot write answers" in found)
    assert capabilities._wrong_answers(tiny_target()) is None


def test_answers_need_less_than_a_choice_of_layers(monkeypatch):
    found = check_target(tiny_target(n_layers=3))
    assert cannot(found) == {"select", "train"} and found.write is None
    monkeypatch.setattr(capabilities, "_wrong_answers", lambda target: "it stutters")
    found = check_target(tiny_target())
    assert found.write == found.select == "it stutters"


def test_the_end_of_a_changing_rope_is_noted():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    target = tiny_target(max_position_embeddings=64, rope_parameters=rope)
    target.context_limit = 256
    assert any("decoding ends at the 64 tokens" in note for note in check_target(target).notes)


def test_a_quantised_or_damaged_folder_is_no_target(tmp_path):
    target = tiny_target()
    target.model.config.quantization_config = {"quant_method": "awq", "bits": 4}
    target.tokenizer.save_pretrained(tmp_path)
    target.model.config.save_pretrained(tmp_path)
    del target.model.config.quantization_config
    target.model.save_pretrained(tmp_path / "plain")
    save_file(
        load_file(tmp_path / "plain" / "model.safetensors"),
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match="awq"):
        check(str(tmp_path))
