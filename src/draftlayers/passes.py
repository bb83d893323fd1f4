"""Ways to run one pass of the target over new tokens, and the cache they read and fill.

Used in chapters 01 and 07: by ``engine``, which chooses among them and checks what they give, and
by ``writing``, which runs ``LlamaPass`` over many sequences. All take the new tokens, their
positions, and who may see whom, and give logits and the residual stream at the boundaries of the
session. ``HuggingFacePass`` runs the model's own code with masks of ours, and as CUDA graphs where
it can; ``ChainPass`` leaves the masks to the model; ``LlamaPass`` is a lean twin of one family for
a CPU, which also reads several sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from draftlayers.contexts import FIXED_ROPE, own_windows, ropes
from draftlayers.packing import PackedLinear, PackedLinears, fastest_rows
from draftlayers.targets import Target

# Settings that change what Llama's parts compute. Small values would not show in a comparison.
UNLIKE_LLAMA = (
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling",
    "clip_qkv",
)  # fmt: skip

# Logits of a pass, and the boundaries' states if the session asks for any.
Result = tuple[Tensor, Tensor | None]


class KVCache(Cache):
    """Keys and values of all layers in memory allocated once, in a cache Hugging Face can fill.

    A pass writes its tokens behind the first `length` entries, which are the accepted ones, and
    may read those and its own. With ``fixed`` it is given whole buffers, whose shape never changes,
    and the attention mask hides what lies beyond.
    """

    def __init__(self, fixed: bool):
        # What makes a layer is only ever called, so it need not be a class.
        layer = cast("type[CacheLayerMixin]", lambda: LayerSlots(self))
        super().__init__(layer_class_to_replicate=layer)
        self.fixed, self.capacity, self.length = fixed, 0, 0
        self.slots: Tensor | None = None  # int64 [n]: where a pass writes, for fixed shapes

    def start(self, capacity: int) -> None:
        """Forget everything and make room for `capacity` entries."""
        self.length = 0
        if capacity > self.capacity:
            self.capacity = 1 << (capacity - 1).bit_length()
            self.layers.clear()

    def move(self, sources: Sequence[int], to: int) -> None:
        """Copy entries `sources` to the places from `to` on."""
        for layer in cast("list[LayerSlots]", self.layers):
            index = torch.tensor(sources, device=layer.keys.device)
            for buffer in (layer.keys, layer.values):
                buffer[:, :, to : to + len(sources)] = buffer[:, :, index]


class LayerSlots(CacheLayerMixin):
    """One layer's buffers ``[1, heads, capacity, head_dim]`` of a ``KVCache``."""

    keys: Tensor  # none before ``lazy_initialization``, which ``update`` calls first
    values: Tensor

    def __init__(self, cache: KVCache):
        CacheLayerMixin.__init__(self)
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (*key_states.shape[:2], self.cache.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache.fixed:
            assert self.cache.slots is not None  # a pass of fixed shape names its places
            slots = self.cache.slots.to(key_states.device)
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
            return self.keys, self.values
        start, end = self.cache.length, self.cache.length + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = self.cache.capacity if self.cache.fixed else self.cache.length + query_length
        return columns, 0


class HuggingFacePass:
    """A pass through the Hugging Face decoder with masks of ours, for most architectures."""

    trees = True

    def __init__(self, target: Target, packed: bool):
        self.target, self.windows = target, windows(target)
        self.cache_name = target.cache_name
        self.linears = PackedLinears(target.model) if packed else None
        self.way = "Hugging Face decoder" + (", packed weights" if packed else "")
        self.boundaries: tuple[int, ...] = ()
        self.states: dict[int, Tensor] = {}
        # By boundaries and size, so that methods which take turns need not record again.
        self.graphs: dict[tuple[tuple[int, ...], int], GraphedPass] = {}
        # A graph lives on one device and never looks at a value to decide what to do.
        devices = {p.device for p in target.model.parameters()}
        self.graphed = self.trees and target.device.type == "cuda" and len(devices) == 1
        self.graphed &= {rope["rope_type"] for rope in ropes(target.config)} <= FIXED_ROPE
        self.capacity = 0
        if self.graphed:
            self.way += ", CUDA graphs"

    @staticmethod
    def fits(target: Target, packed: bool) -> bool:
        """Whether every window is one that a mask can show."""
        kinds = getattr(target.config, "layer_types", None) or ()
        return "chunked_attention" not in kinds and not own_windows(target.config)

    @contextmanager
    def session(self, boundaries: Sequence[int]) -> Iterator[None]:
        """Give the states of these boundaries, with packed weights in place if there are any."""
        self.boundaries = tuple(sorted(boundaries))
        packed = self.linears.installed() if self.linears else nullcontext()
        with packed, self.target.capture(self.boundaries) as self.states:
            yield

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, kv: KVCache, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        n = len(tokens)
        if not self.graphed or rows < n:  # a prompt is read once, in a shape of its own
            return self._run(self._inputs(tokens, positions, visible, kv.length), kv, rows)
        # One graph serves all passes up to the next power of two; what fills up sees only itself.
        size = 1 << (n - 1).bit_length()
        tokens, positions = (F.pad(t, (0, size - n)) for t in (tokens, positions))
        visible = F.pad(visible, (0, 0, 0, size - n))
        own = torch.arange(n, size, device=tokens.device)
        visible[own, kv.length + own] = True
        inputs = self._inputs(tokens, positions, visible, kv.length)
        if kv.capacity != self.capacity:  # the buffers were allocated anew
            self.graphs.clear()
            self.capacity = kv.capacity
        kind = self.boundaries, size
        if kind not in self.graphs:
            self.graphs[kind] = GraphedPass(lambda static: self._run(static, kv, size), inputs)
        logits, states = self.graphs[kind](inputs)
        return logits[:n], None if states is None else states[:n]

    def _run(self, inputs: list[Tensor], kv: KVCache, rows: int) -> tuple[Tensor, Tensor | None]:
        tokens, positions, kv.slots, *masks = inputs
        placed = {}
        if self.trees:
            named = dict(zip(self.windows, masks, strict=True))
            placed = {"position_ids": positions[None], "attention_mask": named.get("all", named)}
        last = self.target.decoder(
            input_ids=tokens[None], use_cache=True, **placed, **{self.cache_name: kv}
        ).last_hidden_state
        logits = self.target.output_logits(last[0, -rows:])
        if not self.boundaries:
            return logits, None
        device = logits.device
        return logits, torch.cat([self.states[b][0].to(device) for b in self.boundaries], dim=-1)

    def _inputs(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, before: int
    ) -> list[Tensor]:
        """Tokens, positions, cache places, and an additive mask ``[1, 1, n, columns]`` for each
        kind of layer."""
        slots = before + torch.arange(len(tokens), device=tokens.device)
        masks, dtype = [], self.target.dtype
        for window in self.windows.values():
            seen = visible
            if window:
                places = torch.arange(visible.shape[1], device=visible.device)
                places[slots] = positions
                seen = visible & (positions[:, None] - places < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            masks.append(mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None])
        return [tokens, positions, slots, *masks]


class ChainPass(HuggingFacePass):
    """A pass through the Hugging Face decoder as it is, masks included, which knows only chains."""

    trees = False

    def __init__(self, target: Target, packed: bool):
        super().__init__(target, packed)
        self.windows = {}
        self.way += ", its own masks"

    @staticmethod
    def fits(target: Target, packed: bool) -> bool:
        """Always: the decoder is taken as it is."""
        return True


class GraphedPass:
    """A pass of one shape, recorded as a CUDA graph: all its kernels are launched at once."""

    def __init__(self, run: Callable[[list[Tensor]], Result], inputs: list[Tensor]):
        self.inputs = [t.clone() for t in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # allocations and library set-up must happen before recording
                run(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = run(self.inputs)

    def __call__(self, inputs: list[Tensor]) -> Result:
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.outputs


class LlamaPass:
    """A pass through a decoder of Llama's shape with packed weights and few operations a layer.

    Query, key and value weights are one product, gate and up another; queries that share a key
    head attend as more rows of the same head, so keys are never copied. Llama, Mistral, Qwen 2,
    Qwen 3 and their like have this shape.
    """

    way, trees, graphed = "lean Llama decoder, packed weights", True, False

    def __init__(self, target: Target, packed: bool):
        config = target.config
        self.target = target
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.head_dim = getattr(config, "head_dim", None) or (
            target.d_model // config.num_attention_heads
        )
        rows = fastest_rows(target.output_matrix.weight)
        self.unembed = PackedLinear([target.output_matrix], rows)
        layers: Iterable[Any] = target.layers  # what a layer holds is only known by name
        self.layers = [
            (
                layer,
                PackedLinear([getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], rows),
                PackedLinear([layer.self_attn.o_proj], rows),
                PackedLinear([layer.mlp.gate_proj, layer.mlp.up_proj], rows),
                PackedLinear([layer.mlp.down_proj], rows),
            )
            for layer in layers
        ]
        self.boundaries: tuple[int, ...] = ()

    @staticmethod
    def fits(target: Target, packed: bool) -> bool:
        """Whether every layer is built from Llama's parts, and nothing beside them takes part."""
        layer_parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        attention_parts = {"q_proj", "k_proj", "v_proj", "o_proj"}
        norms = [target.final_norm]
        if not packed:
            return False
        for layer in target.layers:
            parts = dict(layer.named_children())
            if set(parts) != layer_parts:
                return False
            attention, mlp = (dict(parts[x].named_children()) for x in ("self_attn", "mlp"))
            if set(attention) - {"q_norm", "k_norm"} != attention_parts:
                return False
            if set(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
                return False
            own = [m for m in (layer, parts["self_attn"], parts["mlp"]) if any(m.parameters(False))]
            if own or not hasattr(parts["self_attn"], "scaling"):
                return False
            norms += [parts["input_layernorm"], parts["post_attention_layernorm"]]
            norms += [attention[x] for x in ("q_norm", "k_norm") if x in attention]
        unlike = any(getattr(target.config, name, None) for name in UNLIKE_LLAMA)
        windowed = not HuggingFacePass.fits(target, packed) or any(windows(target).values())
        return not unlike and not windowed and all(map(_is_rms_norm, norms))

    @contextmanager
    def session(self, boundaries: Sequence[int]) -> Iterator[None]:
        """Give the states of these boundaries; the model itself stays as it is."""
        self.boundaries = tuple(sorted(boundaries))
        yield

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, kv: KVCache, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        seen = visible[None] if len(tokens) > 1 else None
        states = self.run(tokens[None], positions[None], seen, kv)
        logits = self.logits(states[-1][0, -rows:])
        wanted = [states[b][0] for b in self.boundaries]
        return logits, torch.cat(wanted, dim=-1) if wanted else None

    def logits(self, x: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of states ``[..., d]`` that leave the last layer."""
        return self.unembed(_rms_norm(x, self.target.final_norm)).float()

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: Cache,
        pieces: Sequence[tuple[slice, int]] = ((slice(None), 0),),
    ) -> list[Tensor]:
        """Read new tokens of one sequence or of several.

        Parameters
        ----------
        tokens, positions
            int64 ``[B, n]``.
        visible
            bool ``[B, n, columns]``: what each token sees of the cache, itself included; None when
            all see all.
        cache
            Takes the keys and values of a layer and gives those of all columns.
        pieces
            Rows that attend together, and the first column that any of them sees: what lies before
            it is never read.

        Returns
        -------
        list of Tensor
            The residual stream ``[B, n, d]`` at every boundary.
        """
        (size, n), groups, heads = tokens.shape, self.group, self.kv_heads
        dim, half, mask = self.head_dim, self.head_dim // 2, None
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=self.target.dtype)
            mask = mask.masked_fill_(~visible, float("-inf")).repeat(1, groups, 1)[:, None]
        x = self.target.embed_tokens(tokens)
        rotary_embedding: Any = self.target.decoder.rotary_emb
        cos, sin = (t[:, :, None] for t in rotary_embedding(x, positions))
        # The minus of "rotate half" goes into the table once, not into every layer.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        states = [x]
        for b, (layer, qkv, output, gate_up, down) in enumerate(self.layers):
            attention = layer.self_attn
            mixed = qkv(_rms_norm(x, layer.input_layernorm)).view(size, n, -1, dim)
            queries, keys, values = mixed.split((groups * heads, heads, heads), dim=2)
            if hasattr(attention, "q_norm"):
                queries = _rms_norm(queries, attention.q_norm)
                keys = _rms_norm(keys, attention.k_norm)
                turned = torch.cat((queries, keys), dim=2)
            else:
                turned = mixed[:, :, : (groups + 1) * heads]
            swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
            queries, keys = (turned * cos + swapped * sin).split((groups * heads, heads), dim=2)
            keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), b)
            # [B, n, heads * groups, dim] -> [B, heads, groups * n, dim]: a group is more rows.
            queries = queries.view(size, n, heads, groups, dim).permute(0, 2, 3, 1, 4)
            queries = queries.reshape(size, heads, groups * n, dim)
            parts = [
                F.scaled_dot_product_attention(
                    queries[rows],
                    keys[rows, :, first:],
                    values[rows, :, first:],
                    attn_mask=None if mask is None else mask[rows, ..., first:],
                    scale=attention.scaling,
                )
                for rows, first in pieces
            ]
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
            attended = attended.view(size, heads, groups, n, dim).permute(0, 3, 1, 2, 4)
            x = x + output(attended.reshape(size, n, -1))
            gate, up = gate_up(_rms_norm(x, layer.post_attention_layernorm)).chunk(2, dim=-1)
            x = x + down(layer.mlp.act_fn(gate) * up)
            states.append(x)
        return states


def windows(target: Target) -> dict[str, int | None]:
    """Kinds of layers as the decoder's masks name them, with their sliding window if any.

    ``{"all": ...}`` stands for a single mask.
    """
    kinds = getattr(target.config, "layer_types", None)
    window = getattr(target.config, "sliding_window", None)
    if window and window >= target.context_limit:
        window = None
    if kinds is None:
        return {"all": window}
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm computes what Llama's does, as shown by rows of very different lengths."""
    weight = getattr(norm, "weight", None)
    if weight is None or not hasattr(norm, "variance_epsilon"):
        return False
    lengths = torch.tensor([[1e-3], [1.0], [30.0]], dtype=weight.dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[-1], generator=generator).to(weight.dtype) * lengths + lengths
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    return torch.allclose(norm(x), _rms_norm(x, norm), rtol=tolerance, atol=tolerance)


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
