"""A checkpoint is loaded whole and from its files alone, or refused in one sentence."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlayers.capabilities import check
from draftlayers.checkpoints import INDEX, SINGLE, load_checkpoint, read_config
from draftlayers.project import UserError
from draftlayers.targets import load_target, tiny_target

LAYER = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Small checkpoints on disk by their settings, each made once."""
    made = {}

    def one(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            target = tiny_target(n_layers=4, **settings)
            target.model.save_pretrained(made[key])
            target.tokenizer.save_pretrained(made[key])
        return made[key]

    return one


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved(), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    target = tiny_target(n_layers=4)
    target.model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    target.tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    return tmp_path / "shards"


def weights(folder, change):
    held = load_file(folder / SINGLE)
    change(held)
    save_file(held, folder / SINGLE, {"format": "pt"})


def config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load(folder, dtype=torch.float32, say=lambda text: None):
    where = {"pretrained_model_name_or_path": str(folder)}
    return load_checkpoint(where, str(folder), "cpu", dtype, False, say)[0]


def refused(folder, match, before=True):
    """The folder is refused, if it can be before its weights are read, in one line."""
    with pytest.raises(UserError, match=match) as loading:
        load_target(str(folder))
    assert "\n" not in str(loading.value)
    if before:
        with pytest.raises(UserError, match=match):
            check(str(folder))


# --- Weights and configuration belong together ---------------------------------------------------


def test_missing_weights_are_named_and_never_filled_in(folder, capfd):
    weights(folder, lambda held: held.pop(f"{LAYER}.weight"))
    refused(folder, rf"1 of its weights are missing \({LAYER}\.weight\)", before=False)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_many_missing_weights_are_counted(folder):
    config(folder, num_hidden_layers=6)
    refused(folder, r"18 of its weights are missing \(.* and 14 more\)", before=False)


def test_tied_weights_are_not_missing(folder):
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    target = tiny_target(n_layers=4)
    assert torch.equal(load(folder).lm_head.weight, target.model.lm_head.weight)


def test_an_output_matrix_that_is_not_tied_is_missing(folder):
    config(folder, tie_word_embeddings=False)
    refused(folder, r"missing \(lm_head\.weight\)", before=False)


def test_a_lost_expert_is_named(saved, tmp_path):
    folder = shutil.copytree(saved(architecture="mixtral", num_local_experts=4), tmp_path / "m")
    load(folder)
    expert = next(name for name in load_file(folder / SINGLE) if "experts.2.w1" in name)
    weights(folder, lambda held: held.pop(expert))
    refused(folder, r"all parts of model\.layers\.0\.mlp\.experts\.gate_up_proj", before=False)


def test_another_vocabulary_is_told_in_tokens(folder):
    config(folder, vocab_size=508)
    refused(folder, "config.json says 508 tokens, the weights have 512", before=False)


def test_another_shape_is_told(folder):
    config(folder, intermediate_size=96)
    refused(
        folder, r"mlp\.down_proj\.weight has shape \(64, 128\), expected \(64, 96\)", before=False
    )


@pytest.mark.parametrize(
    "name",
    [f"{LAYER}.bias", f"{LAYER}.SCB", f"{LAYER}.lora_A.weight", "model.layers.4.mlp.up.weight"],
)
def test_a_weight_of_a_layer_that_has_no_place_is_refused(folder, name):
    weights(folder, lambda held: held.update({name: torch.ones(3)}))
    refused(folder, "have no place in the model", before=False)


def test_weights_of_something_else_are_left_out_and_said(folder):
    extra = {
        "vision_tower.patch.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    weights(folder, lambda held: held.update(extra))
    said = []
    load(folder, say=said.append)
    assert len(said) == 1 and "left out 1 weights" in said[0] and "vision_tower" in said[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers_are_named(folder, value):
    weights(folder, lambda held: held[f"{LAYER}.weight"].view(-1)[3].fill_(value))
    refused(folder, rf"NaN or infinite in float32 \({LAYER}", before=False)


def test_weights_too_large_for_a_precision_are_named(folder):
    weights(folder, lambda held: held[f"{LAYER}.weight"].mul_(1e6))
    load(folder, torch.bfloat16)
    with pytest.raises(UserError, match="infinite in float16"):
        load(folder, torch.float16)


# --- Files ---------------------------------------------------------------------------------------


def point(path):
    oid = "oid sha256:" + "0" * 64
    path.write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 538090408\n")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:500])


def fill(path):
    path.write_bytes(b"\xff" * 64)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (point, "model.safetensors in .* is a Git LFS pointer.*; run git lfs pull"),
        (cut, "damaged or not whole"),
        (cut_in_the_header, "damaged or not whole"),
        (fill, "damaged or not whole"),
        (empty, "is empty"),
    ],
)
def test_weights_that_are_not_whole_are_refused_before_they_are_read(folder, damage, match):
    damage(folder / SINGLE)
    refused(folder, match)


def test_safetensors_without_weights_are_refused(folder):
    save_file({}, folder / SINGLE, {"format": "pt"})
    refused(folder, "holds no weights")


def test_a_pointer_in_the_place_of_the_tokenizer_is_refused(folder):
    point(folder / "tokenizer.json")
    refused(folder, "tokenizer.json in .* Git LFS pointer")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"[" * 200_000, b'{"a": 1'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_json_that_is_damaged_is_refused_by_name(folder, name, content):
    (folder / name).write_bytes(content)
    refused(folder, f"{name} in .* (is damaged|holds no JSON object)")


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "no-such-model"},
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"rope_parameters": 3},
        {"vocab_size": None},
    ],
)
def test_a_configuration_of_something_else_is_refused_in_a_sentence(folder, values):
    config(folder, **values)
    refused(folder, "cannot load|does not say", before=False)


@pytest.mark.parametrize("content", ["{}", '{"model": {}}', '{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_is_none_is_refused(folder, content):
    (folder / "tokenizer.json").write_text(content)
    refused(folder, "cannot load")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_folder_without_a_tokenizer_is_refused(saved, tmp_path, architecture):
    folder = shutil.copytree(saved(architecture=architecture), tmp_path / "m")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(folder, "cannot load")


def test_a_folder_without_weights_is_refused(folder):
    (folder / SINGLE).unlink()
    refused(folder, "has no weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "only pickled weights")
    (folder / "pytorch_model.bin").unlink()
    (folder / "small.gguf").write_bytes(b"GGUF")
    refused(folder, "small.gguf")


def test_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "adapter")


# --- Shards --------------------------------------------------------------------------------------


def test_shards_are_read_as_one(sharded, folder):
    ids = torch.arange(10)[None]
    assert torch.equal(load(sharded)(ids).logits, load(folder)(ids).logits)


def test_shards_that_are_lost_or_damaged_are_refused(sharded):
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    cut(first)
    refused(sharded, f"{first.name} in .* is damaged")
    first.unlink()
    refused(sharded, rf"1 of \d+ files that {INDEX} names .*{first.name}")
    first.symlink_to(sharded / "nowhere")
    refused(sharded, f"{first.name}")
    point(second)
    refused(sharded, "Git LFS pointer")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors", "x.bin", 3],
)
def test_an_index_leads_only_to_safetensors_of_its_own_folder(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "as a file of weights; expected a .safetensors file in the same folder")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{"])
def test_an_index_that_names_nothing_is_refused(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


def test_weights_under_a_name_that_the_configuration_gives(folder):
    (folder / SINGLE).rename(folder / "other.safetensors")
    config(folder, transformers_weights="other.safetensors")
    assert load_target(str(folder)).n_layers == 4
    config(folder, transformers_weights="../other.safetensors")
    refused(folder, "in the same folder")
    config(folder, transformers_weights="gone.safetensors")
    refused(folder, "gone.safetensors")


# --- Quantised -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4", "hqq", "torchao"],
)
def test_quantised_weights_are_refused_by_the_name_of_their_method(folder, method):
    config(folder, quantization_config={"quant_method": method, "bits": 4})
    refused(folder, rf"quantised \({method}\)")


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": {}}, "a method without a name"),
    ],
)
def test_quantised_weights_are_recognised_in_every_form(folder, values, method):
    config(folder, **values)
    refused(folder, method)


def test_notes_of_quantisers_are_recognised(folder):
    (folder / "hf_quant_config.json").write_text("{}")
    refused(folder, "modelopt")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_weights_stored_as_integers_are_refused(folder, dtype):
    def store(held):
        held[f"{LAYER}.weight"] = held[f"{LAYER}.weight"].to(dtype)

    weights(folder, store)
    refused(folder, rf"quantised weights \({LAYER}")


def test_weights_of_double_precision_are_read(folder):
    def store(held):
        for name in held:
            held[name] = held[name].double()

    weights(folder, store)
    assert load_target(str(folder)).dtype == torch.float32


def test_a_link_that_leads_nowhere_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "pruned")
    refused(folder, "model.safetensors in .* leads to a file that is not there")


# --- Code ----------------------------------------------------------------------------------------


def test_code_in_a_folder_is_not_run_unless_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config(folder, model_type="new", auto_map=auto)
    refused(folder, r"add -p trust_remote_code=true")
    assert not ran.exists()


def test_pickled_weights_under_another_name_are_not_run(folder, tmp_path):
    import os
    import pickle

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / SINGLE).write_bytes(pickle.dumps(Attack()))
    refused(folder, "damaged or not whole")
    assert not (tmp_path / "ran").exists()


# --- Hub -----------------------------------------------------------------------------------------


def test_a_model_in_the_cache_of_the_hub_is_checked_as_far_as_it_is_there(
    saved, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "a" * 40
    place = tmp_path / "models--org--small" / "snapshots" / commit
    shutil.copytree(saved(), place)
    where = {"pretrained_model_name_or_path": "org/small", "revision": commit}
    (place / SINGLE).rename(place / "kept")
    read_config(where, "org/small", False)  # the weights come later
    with pytest.raises(UserError, match="cannot load 'org/small'"):
        load_checkpoint(where, "org/small", "cpu", torch.float32, False)
    (place / "kept").rename(place / SINGLE)
    assert load_checkpoint(where, "org/small", "cpu", torch.float32, False)
    cut(place / SINGLE)
    with pytest.raises(UserError, match="damaged or not whole"):
        read_config(where, "org/small", False)
