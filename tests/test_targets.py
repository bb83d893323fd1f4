"""A target reads its own layers right: boundaries as declared, logits from boundary N."""

from __future__ import annotations

import datetime
import inspect
import json
import subprocess
import sys

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from draftlayers.chat import SYSTEM, stopped
from draftlayers.contexts import NO_LIMIT
from draftlayers.project import UserError
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.targets import Target, load_target, open_target, tiny_target
from draftlayers.writing import Request, Writer

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
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, target.model(IDS).logits)
    assert loaded.render(["What is a boundary?"]) == target.render(["What is a boundary?"])
    assert loaded.eos_ids == target.eos_ids


def test_a_pickled_checkpoint_is_not_opened(checkpoint, tmp_path):
    folder, target = checkpoint
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(target.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_target(str(tmp_path))


def copied(folder, to):
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def edit_weights(folder):
    """A fine-tune that leaves the output matrix and the start of the last layer alone."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if ".layers.1." in name and "proj" in name:
            weights[name] = -weights[name]
    save_file(weights, file, {"format": "pt"})


def edit_config(**changes):
    def edit(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def edit_text(name, old, new):
    def edit(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("edit", "another"),
    [
        (edit_weights, True),
        (edit_config(rms_norm_eps=1e-3), True),
        (edit_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), True),
        (edit_text("chat_template.jinja", "assistant", "helper"), True),
        (edit_text("tokenizer.json", "<|endoftext|>", "<|end-of-text|>"), True),
        (lambda folder: (folder / "README.md").write_text("a note"), False),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"state"), False),
    ],
)
def test_the_digest_changes_with_what_the_model_is(checkpoint, tmp_path, edit, another):
    folder = copied(checkpoint[0], tmp_path / "model")
    before = load_target(str(folder)).digest
    edit(folder)
    assert (load_target(str(folder)).digest != before) is another


def test_the_digest_of_a_target_in_memory_sees_every_weight(tiny):
    other = tiny_target()
    assert other.digest == tiny.digest
    other.layers[3].mlp.down_proj.weight.data[0, 0] += 1e-3
    assert other.digest != tiny.digest
    assert tiny_target(rms_norm_eps=1e-4).digest != tiny.digest


def test_a_template_that_prints_a_date_prints_that_of_the_run(tmp_path):
    run = Run(RunSpec.make("tiny", "smoke", day="2026-01-31"), tmp_path)
    target = open_target(run)
    assert run.reading.parameters["day"] == "2026-01-31"
    target.tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M:%S') }}\n" + (
        target.tokenizer.chat_template
    )
    assert target.tokenizer.decode(target.render(["?"])).startswith("31 Jan 2026 00:00:00")
    assert tiny_target().day == datetime.date.today().isoformat()


CLOCKS = [
    "{% set f = '%d %b %Y %H:%M:%S' %}{{ strftime_now(f) }}",
    "{{ strftime_now('%d %b' ~ ' %Y %H:%M:%S') }}",
    "{{ strftime_now(format='%d %b %Y %H:%M:%S') }}",
    "{{ strftime_now ('%d %b %Y %H:%M:%S',) }}",
    "{% set s = strftime_now %}{{ s('%d %b %Y %H:%M:%S') }}",
    "{% macro now(f) %}{{ strftime_now(f) }}{% endmacro %}{{ now('%d %b %Y %H:%M:%S') }}",
]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_clock_stands_however_it_is_asked(clock):
    target = tiny_target()
    target.chat.day = "2026-01-31"
    target.tokenizer.chat_template = clock + target.tokenizer.chat_template
    assert target.tokenizer.decode(target.render(["?"])).startswith("31 Jan 2026 00:00:00")


@pytest.mark.parametrize("form", [*(f"<%{x}>" for x in "aAbBdDHIjmMpSUwyY%"), "%-d.%-m.", "%%d"])
def test_a_clock_says_what_strftime_says(form):
    written = jinja2.Template(stopped("{{ strftime_now(form) }}", "2026-03-07")).render(form=form)
    assert written == datetime.datetime(2026, 3, 7).strftime(form)


def test_a_template_with_a_clock_is_left_as_it_is_elsewhere():
    """A text that only looks like the clock, and a first line that is blank."""
    like = "\n{{ 'strftime_now(\"%d\")' }}"
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    written = environment.from_string(stopped(like, "2026-03-07")).render()
    assert written == "\n" + 'strftime_now("%d")'


def test_a_template_that_demands_a_date_gets_that_of_the_run():
    target = tiny_target()
    target.chat.day = "2026-01-31"
    target.tokenizer.chat_template = (
        "{% if date_string is not defined %}{{ raise_exception('a date is needed') }}{% endif %}"
        "{{ date_string }}|" + target.tokenizer.chat_template
    )
    assert target.tokenizer.decode(target.render(["?"])).startswith("31 Jan 2026|")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_layers_that_add_nothing_are_read_like_others(architecture):
    """As in a download that was begun, or before a training."""
    target = tiny_target(architecture=architecture)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    again = Target("zeros", target.model, target.tokenizer)
    states = torch.randn(3, again.d_model)
    expected = again.model.lm_head(again.model.model.norm(states))
    torch.testing.assert_close(again.unembed(states), expected)


def test_the_end_of_a_turn_is_an_end_even_if_no_setting_says_so():
    target = tiny_target()
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    target.tokenizer.eos_token = "<|endoftext|>"
    target.model.generation_config.eos_token_id = target.tokenizer.eos_token_id
    assert target.eos_ids == {end, target.tokenizer.eos_token_id}
    plain = tiny_target()
    plain.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    assert plain.eos_ids == {plain.tokenizer.eos_token_id}  # a newline ends nothing
    model = tiny_target()
    model.tokenizer.eos_token = "<|endoftext|>"
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] not in ('user', 'model') %}"
        "{{ raise_exception('who?') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    assert end in model.eos_ids
    refusing = tiny_target()
    refusing.tokenizer.chat_template = "{{ raise_exception('no assistant, please') }}"
    assert refusing.eos_ids == {refusing.tokenizer.eos_token_id}


def test_the_context_limit_has_many_names(tiny):
    assert tiny.context_limit == 1024
    assert tiny_target(architecture="gpt2").context_limit == 1024
    model = BloomForCausalLM(BloomConfig(vocab_size=512, hidden_size=64, n_layer=8, n_head=4))
    assert Target("bloom", model, tiny.tokenizer).context_limit == NO_LIMIT


def test_a_decoder_may_name_its_cache_as_it_likes(tiny):
    from transformers.models.llama.modeling_llama import LlamaModel

    class Older(LlamaModel):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, **others):
            others[tiny.cache_name] = past_key_values
            return super().forward(input_ids=input_ids, use_cache=use_cache, **others)

    class Newer(LlamaModel):
        def forward(self, input_ids=None, cache=None, use_cache=None, **others):
            others[tiny.cache_name] = cache
            return super().forward(input_ids=input_ids, use_cache=use_cache, **others)

    class Without(LlamaModel):
        def forward(self, input_ids=None):
            return super().forward(input_ids=input_ids)

    def written(target):
        request = Request(IDS[0].tolist(), 12)
        return list(Writer(target, packed=False).write([request]))

    assert tiny.cache_name in inspect.signature(LlamaModel.forward).parameters
    expected = written(tiny)
    target = tiny_target()
    for kind, name in ((Older, "past_key_values"), (Newer, "cache")):
        target.model.model.__class__ = kind
        assert target.cache_name == name
        assert written(target) == expected
    target.model.model.__class__ = Without
    with pytest.raises(UserError, match="Without takes no key-value cache"):
        _ = target.cache_name


# --- What is found when a model is opened --------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gemma2", {}),
        ("cohere", {"logit_scale": 0.8333}),
        ("granite", {"logits_scaling": 6.0}),
        ("hyperclovax", {"logits_scaling": 0.37}),
        ("nanochat", {"final_logit_softcapping": 5.0}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.inference_mode()
def test_logits_are_scaled_and_capped_as_the_model_does(tmp_path, architecture, settings, dtype):
    made = tiny_target(architecture=architecture, n_layers=2, **settings)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=dtype)
    with target.capture([2]) as states:
        logits = target.model(IDS).logits.float()
    error = (target.unembed(states[2]) - logits).abs().max()
    assert error <= torch.finfo(dtype).eps * logits.abs().max()


def test_a_setting_that_the_model_passes_over_is_passed_over(tiny):
    settings = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "logit_scale": 0.5}
    model = MptForCausalLM(MptConfig(**settings))
    target = Target("mpt", model, tiny.tokenizer)
    with torch.inference_mode(), target.capture([2]) as states:
        logits = model(IDS).logits
    torch.testing.assert_close(target.unembed(states[2]), logits)


@torch.inference_mode()
def test_a_state_may_come_by_position_or_by_name(tiny):
    state = torch.randn(1, 3, tiny.d_model)
    turned = tiny.decoder.rotary_emb(state, torch.arange(3)[None])
    for args, kwargs in (((state,), {}), ((), {"hidden_states": state})):
        with tiny.capture([0]) as states:
            tiny.layers[0](*args, **kwargs, position_embeddings=turned)
        assert states[0] is state


def test_weights_that_are_no_numbers_are_named():
    model = tiny_target().model
    model.model.layers[3].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"damaged: model\.layers\.3\.mlp\.up_proj\.weight"):
        Target("diverged", model, tiny_target().tokenizer)


def test_logits_that_a_precision_cannot_hold_are_told_apart_from_damage():
    made = tiny_target()
    made.model.model.norm.weight.data.fill_(1e4)
    made.model.lm_head.weight.data.mul_(1e4)
    with pytest.raises(UserError, match=r"not finite in float16.*bfloat16"):
        Target("loud", made.model.half(), made.tokenizer)


def test_a_model_without_a_list_of_layers_is_refused_by_name(tiny):
    config = BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=96,
    )  # fmt: skip
    with pytest.raises(UserError, match="BertLMHeadModel has no list of 4 decoder layers"):
        Target("bert", BertLMHeadModel(config), tiny.tokenizer)


def test_a_model_that_sees_later_tokens_is_refused(tiny, monkeypatch):
    model = tiny_target().model
    model.set_attn_implementation("eager")
    attend = type(model.model.layers[0].self_attn).forward

    def everywhere(self, *args, attention_mask=None, **others):
        return attend(self, *args, attention_mask=None, **others)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", everywhere)
    with pytest.raises(UserError, match="no causal language model"):
        Target("both ways", model, tiny.tokenizer)


# --- Prompts -------------------------------------------------------------------------------------


def adding(tokenizer):
    """The tokenizer, which now puts marks of its own around every text."""
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=marks
    )
    return [number for _, number in marks]


@pytest.fixture
def roomy():
    """A target with more embeddings than its tokenizer has tokens."""
    return tiny_target(n_layers=2, vocab_size=520)


def test_a_begin_token_stands_once_and_an_end_token_never(roomy):
    template = roomy.tokenizer.chat_template
    begin, end = adding(roomy.tokenizer)
    every = roomy.tokenizer("x")["input_ids"]
    assert (every[0], every[-1]) == (begin, end)
    for written in (None, template, "{{ bos_token }}" + template):
        roomy.tokenizer.chat_template = written
        ids = roomy.render(["How far?"])
        assert ids[0] == begin and ids.count(begin) == 1 and end not in ids
        assert "How far?" in roomy.tokenizer.decode(ids)


def test_a_template_that_wants_a_system_message_gets_one(roomy):
    roomy.tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + roomy.tokenizer.chat_template
    )
    text = roomy.tokenizer.decode(roomy.render(["How far?"]))
    assert text.index("system\n" + SYSTEM) < text.index("user\nHow far?")
    assert roomy.tokenizer.convert_tokens_to_ids("<|im_end|>") in roomy.eos_ids
    assert any("wants a system message" in note for note in roomy.chat.notes())


def test_a_template_that_refuses_a_system_message_gets_none(roomy):
    plain = roomy.render(["How far?"])
    roomy.tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + roomy.tokenizer.chat_template
    )
    assert roomy.render(["How far?"]) == plain


def test_a_template_that_reads_parts_gets_parts(roomy):
    plain = roomy.render(["How far?"])
    roomy.tokenizer.chat_template = roomy.tokenizer.chat_template.replace(
        "{{ message['content'] }}",
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
    )
    assert roomy.render(["How far?"]) == plain


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only tools may speak') }}", "only tools may speak"),
        ("nothing of it", "leaves the message out"),
        ("{% if %}", "Expected an expression"),
        ({"rag": "{{ messages }}", "tool_use": "{{ messages }}"}, "cannot be chosen"),
    ],
)
def test_a_template_that_cannot_write_a_question_is_refused(roomy, template, reason):
    roomy.tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"tiny: its chat template.*{reason}"):
        roomy.render(["How far?"])


def test_an_end_of_turn_may_stand_between_messages_only(roomy):
    end = roomy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    roomy.tokenizer.eos_token = "<|endoftext|>"
    roomy.model.generation_config.eos_token_id = None
    roomy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    assert end in roomy.eos_ids


def test_a_token_that_the_model_does_not_know_is_named(tiny):
    target = tiny_target(n_layers=2)
    target.tokenizer.add_tokens(["<|beyond|>"])
    assert target.render(["How far?"]) == tiny.render(["How far?"])
    with pytest.raises(UserError, match=r"token 512 \(<\|beyond\|>\).*512 tokens only"):
        target.render(["How <|beyond|> far?"])


def test_a_target_without_template_uses_the_plain_format(tiny):
    bare = tiny_target()
    bare.tokenizer.chat_template = None
    text = bare.tokenizer.decode(bare.render(["How far?"]))
    assert not bare.has_chat_template and "Question:\nHow far?" in text
    assert text.endswith("Answer:\n")


def test_importing_the_package_loads_no_model_library():
    code = "import sys, draftlayers.spec, draftlayers.cli; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
