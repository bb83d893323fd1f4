"""The engine's passes equal the model's own, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftlayers.engine import (
    Engine,
    HuggingFacePass,
    LlamaPass,
    PackedLinear,
    PackedLinears,
    fastest_rows,
)
from draftlayers.spec import UserError, multiplies_bfloat16
from draftlayers.targets import tiny_target

PROMPT = [5, 17, 200, 33, 8, 91, 4, 300, 12]


native_bfloat16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 products here"),
)


@pytest.mark.parametrize("precision", [torch.float32, native_bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products(rows: int, bias: bool, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(48, 20, bias=bias), nn.Linear(48, 33, bias=bias)]
    packed = PackedLinear(parts, rows, precision)
    tolerance = 1e-5 if precision == torch.float32 else 2e-2
    for shape in [(1, 48), (3, 48), (2, 5, 48), (70, 48)]:
        x = torch.randn(shape)
        expected = torch.cat([part.double()(x.double()) for part in parts], dim=-1)
        found = packed(x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert packed(x).shape == (*shape[:-1], 53)
        for part in parts:
            part.float()


def test_fastest_rows_is_measured_once() -> None:
    weight = torch.randn(64, 32)
    assert fastest_rows(weight) in (1, 2, 4)
    assert fastest_rows(weight) == fastest_rows(torch.randn(64, 32))


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


def test_packed_linears_are_restored_after_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    expected, packed = module(x), PackedLinears(module)
    with torch.no_grad(), packed.installed():
        torch.testing.assert_close(module(x), expected)
    with pytest.raises(ValueError, match="stop"), packed.installed():
        raise ValueError("stop")
    assert "forward" not in vars(module[0])


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
    monkeypatch.setattr(LlamaPass, "fits", staticmethod(lambda target: True))
    target = tiny_target(architecture="granite", residual_multiplier=0.5)
    engine = Engine(target)
    assert engine.way.startswith("Hugging Face")


def test_an_engine_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "draftlayers.engine._windows", lambda config: {"all": 2}
    )  # a mask that hides too much
    with pytest.raises(UserError, match="cannot be decoded here"):
        Engine(tiny_target(architecture="gpt2"))


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
        monkeypatch.setattr("draftlayers.engine.GraphedPass", Replayed)
        engine._pass = HuggingFacePass(target, packed=False)
        engine._pass.graphed = True
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
        assert sorted(engine._pass.graphs) == [(boundaries, 2), (boundaries, 4)]
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

    monkeypatch.setattr("draftlayers.engine.GraphedPass", Counted)
    engine = Engine(tiny_target())
    engine._pass = HuggingFacePass(engine.target, packed=False)
    engine._pass.graphed = engine.kv.fixed = True
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
