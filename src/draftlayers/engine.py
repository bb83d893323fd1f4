"""The engine: runs the target's passes for decoding, fast, with a cache that can forget.

Used by chapter 07. An ``Engine`` takes some new tokens, shaped as a chain or as a tree, and gives
the target's logits and the residual stream at chosen boundaries; afterwards it keeps the keys and
values of the accepted tokens and drops the others. What to draft and what to accept is left to
``decoding``; how long things take to ``speed``.

Small batches on a CPU are why this module exists. A pass over six tokens reads the same weights as
a pass over one and should cost about the same, but an ordinary matrix product of so few rows does
not come near the speed of memory. Weights that oneDNN has laid out once for its own kernels do, so
on a CPU the engine packs them (the model itself stays as it is, and memory for weights
doubles). Decoders of Llama's shape also get a pass of their own with few operations per layer; it
is compared with the Hugging Face model before it is used. On CUDA a pass of fixed size is captured
once as a CUDA graph and replayed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from draftlayers.spec import UserError, multiplies_bfloat16
from draftlayers.targets import Target

PREFILL = 256  # prompt tokens of one pass, which bounds the memory of its attention mask

# Rotary embeddings that depend on the position alone. "dynamic" and "longrope" also turn by the
# length of the sequence, which one table cannot.
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


class Engine:
    """Runs a target over new tokens and keeps its key-value cache in step with what is accepted.

    Parameters
    ----------
    target
        The model to run.
    packed
        Use packed weights where they can be: on a CPU that multiplies the target's precision,
        when memory allows.

    Attributes
    ----------
    limit
        Longest sequence the model was made for, in tokens.
    length
        Accepted tokens whose keys and values are in the cache.
    way
        How passes are run, in words.

    Raises
    ------
    UserError
        When the architecture's logits come out differently from its own forward pass.
    """

    def __init__(self, target: Target, packed: bool = True):
        self.target, self.device = target, target.device
        self.eos_ids, self.limit = target.eos_ids, target.config.max_position_embeddings
        self.packed = packed and _can_pack(target)
        self.kv = KVCache(fixed=self.device.type == "cuda")
        runners: list[type[HuggingFacePass] | type[LlamaPass]] = [HuggingFacePass]
        if self.packed and LlamaPass.fits(target):
            runners.insert(0, LlamaPass)
        for runner in runners:
            self._pass = runner(target, self.packed)
            if (error := self._error()) is None:
                break
        else:
            raise UserError(
                f"{target.name}: {type(target.model).__name__} does not give the same logits with "
                f"a cache and an attention mask as without ({error}), so it cannot be decoded here"
            )
        self.way = self._pass.way

    @property
    def length(self) -> int:
        return self.kv.length

    @contextmanager
    def session(
        self, capacity: int, boundaries: Sequence[int] = (), new: int = 1
    ) -> Iterator[None]:
        """Start an empty sequence; the model is only changed inside the ``with`` block.

        Parameters
        ----------
        capacity
            Accepted tokens it will have at most.
        boundaries
            Where passes give the residual stream.
        new
            Tokens of a pass at most, once the prompt is read.
        """
        capacity += 2 * new  # passes of fixed size are filled up to the next power of two
        self.kv.start(capacity)
        with torch.no_grad(), self._pass.session(capacity, boundaries):
            yield

    def reserve(self, capacity: int, new: int = 1) -> None:
        """Make room for such sequences now, so that none has to while it is timed."""
        with self.session(capacity, new=new):
            pass

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read a prompt: logits ``[V]`` after its last token, states ``[T, K*d]`` or None."""
        parts = []
        ids = torch.tensor(tokens, device=self.device)
        for chunk in ids.split(PREFILL):
            logits, states = self.forward(chunk, rows=1)
            self.keep(range(len(chunk)))
            parts.append(states)
        return logits[0], None if parts[0] is None else torch.cat(parts)

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor | None = None,
        sees: Tensor | None = None,
        rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One target pass over new tokens; every one of them sees all accepted tokens.

        Parameters
        ----------
        tokens
            int64 ``[n]``.
        depths
            int64 ``[n]``: place of each token after the accepted ones; default 0..n-1, a chain.
        sees
            bool ``[n, n]``: row i is true at token i's ancestors and itself; default a chain.
        rows
            Give logits of the last `rows` tokens only.

        Returns
        -------
        logits
            float32 ``[rows or n, V]``.
        states
            ``[n, K*d]``, the session's boundaries side by side in ascending order; None if none.
        """
        n, before = len(tokens), self.length
        if depths is None:
            depths = torch.arange(n, device=self.device)
        if sees is None:
            sees = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
        columns = self.kv.capacity if self.kv.fixed else before + n
        visible = torch.zeros(n, columns, dtype=torch.bool, device=self.device)
        visible[:, :before] = True
        visible[:, before : before + n] = sees
        return self._pass(tokens, before + depths, visible, self.kv, rows or n)

    def keep(self, rows: Sequence[int]) -> None:
        """Accept these tokens of the last pass (ascending indices); forget the others."""
        rows, first = list(rows), self.kv.length
        if rows != list(range(len(rows))):
            self.kv.move([first + row for row in rows], first)
        self.kv.length = first + len(rows)

    def _error(self) -> str | None:
        """Compare a cached pass over a tree with the model's own passes over its two branches."""
        ids = torch.arange(1, 13, device=self.device) * 7 % self.target.vocab_size
        window = [w for w in self._pass.windows.values() if w]
        # Where it is short enough, the prefix reaches past the sliding window.
        prefix = ids[:6].repeat(1 + (min(window) // 6 if window and min(window) < 512 else 0))
        prefix = prefix[: max(1, self.limit - 4)]
        branches = ids[[6, 7, 8]], ids[[6, 9]]  # token 6 with two children, one of them longer
        tree, depths = ids[[6, 7, 9, 8]], torch.tensor([0, 1, 1, 2], device=self.device)
        sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
        with self.session(len(prefix), new=4):
            self.prefill(prefix.tolist())
            found = self.forward(tree, depths, sees.to(self.device))[0]
        with torch.no_grad():
            own = [
                self.target.model(torch.cat([prefix, b])[None], use_cache=False).logits[0].float()
                for b in branches
            ]
        n = len(prefix)
        expected = torch.stack([own[0][n], own[0][n + 1], own[1][n + 1], own[0][n + 2]])
        error = (found - expected).abs().max().item()
        allowed = 1e-3 if self.target.dtype == torch.float32 else 0.1
        if error <= allowed * max(1.0, expected.abs().max().item()):
            return None
        return f"largest difference {error:.3g}"


class KVCache(Cache):
    """Keys and values of all layers in memory allocated once, in a cache Hugging Face can fill.

    A pass writes its tokens behind the first `length` entries, which are the accepted ones, and
    may read those and its own. With ``fixed`` it is given whole buffers, whose shape never changes,
    and the attention mask hides what lies beyond.
    """

    def __init__(self, fixed: bool):
        super().__init__(layer_class_to_replicate=lambda: LayerSlots(self))
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
        for layer in self.layers:
            index = torch.tensor(sources, device=layer.keys.device)
            for buffer in (layer.keys, layer.values):
                buffer[:, :, to : to + len(sources)] = buffer[:, :, index]


class LayerSlots(CacheLayerMixin):
    """One layer's buffers ``[1, heads, capacity, head_dim]`` of a ``KVCache``."""

    def __init__(self, cache: KVCache):
        super().__init__()
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
    """A pass through the Hugging Face decoder itself: any architecture, any device."""

    def __init__(self, target: Target, packed: bool):
        self.target, self.windows = target, _windows(target.config)
        self.linears = PackedLinears(target.model) if packed else None
        self.way = "Hugging Face decoder" + (", packed weights" if packed else "")
        self.boundaries: tuple[int, ...] = ()
        self.states: dict[int, Tensor] = {}
        # By boundaries and size, so that methods which take turns need not record again.
        self.graphs: dict[tuple[tuple[int, ...], int], GraphedPass] = {}
        # A graph lives on one device and never looks at a value to decide what to do.
        devices = {p.device for p in target.model.parameters()}
        self.graphed = target.device.type == "cuda" and len(devices) == 1
        self.graphed &= _rope_types(target.config) <= FIXED_ROPE
        self.capacity = 0
        if self.graphed:
            self.way += ", CUDA graphs"

    @contextmanager
    def session(self, capacity: int, boundaries: Sequence[int]) -> Iterator[None]:
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
        named = dict(zip(self.windows, masks, strict=True))
        last = self.target.decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=named.get("all", named),
            cache=kv,
            use_cache=True,
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


class GraphedPass:
    """A pass of one shape, recorded as a CUDA graph: all its kernels are launched at once."""

    def __init__(self, run: Callable[[list[Tensor]], tuple[Tensor, ...]], inputs: list[Tensor]):
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

    def __call__(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.outputs


class LlamaPass:
    """A pass through a decoder of Llama's shape with packed weights and few operations a layer.

    Query, key and value weights are one product, gate and up another; the rotary tables are
    computed once; queries that share a key head attend as more rows of the same head, so keys
    are never copied. Llama, Mistral, Qwen 2, Qwen 3 and their like have this shape.
    """

    way = "lean Llama decoder, packed weights"

    def __init__(self, target: Target, packed: bool):
        config = target.config
        self.target, self.windows = target, _windows(config)
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.head_dim = getattr(config, "head_dim", None) or (
            target.d_model // config.num_attention_heads
        )
        rows = fastest_rows(target.output_matrix.weight)
        self.unembed = PackedLinear([target.output_matrix], rows)
        self.layers = [
            (
                layer,
                PackedLinear([getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], rows),
                PackedLinear([layer.self_attn.o_proj], rows),
                PackedLinear([layer.mlp.gate_proj, layer.mlp.up_proj], rows),
                PackedLinear([layer.mlp.down_proj], rows),
            )
            for layer in target.layers
        ]
        self.boundaries: tuple[int, ...] = ()
        self.cos = self.sin = torch.empty(0, self.head_dim)

    @staticmethod
    def fits(target: Target) -> bool:
        """Whether every layer is built from Llama's parts, with full attention throughout."""
        layer_parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        attention_parts = {"q_proj", "k_proj", "v_proj", "o_proj"}
        for layer in target.layers:
            parts = dict(layer.named_children())
            if set(parts) != layer_parts:
                return False
            attention, mlp = (dict(parts[x].named_children()) for x in ("self_attn", "mlp"))
            if set(attention) - {"q_norm", "k_norm"} != attention_parts:
                return False
            if set(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
                return False
        rope = _rope_types(target.config)
        return bool(rope) and rope <= FIXED_ROPE and not any(_windows(target.config).values())

    @contextmanager
    def session(self, capacity: int, boundaries: Sequence[int]) -> Iterator[None]:
        self.boundaries = tuple(sorted(boundaries))
        if len(self.cos) < capacity:
            positions = torch.arange(1 << (capacity - 1).bit_length())
            like = torch.empty(0, dtype=self.target.dtype)
            cos, sin = self.target.decoder.rotary_emb(like, positions[None])
            self.cos = cos[0, :, None]
            # The minus of "rotate half" goes into the table once, not into every pass.
            self.sin = torch.cat((-sin[0, :, None, : sin.shape[-1] // 2],
                                  sin[0, :, None, sin.shape[-1] // 2 :]), dim=-1)  # fmt: skip
        yield

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, kv: KVCache, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        n, groups, heads, dim = len(tokens), self.group, self.kv_heads, self.head_dim
        cos, sin, half = self.cos[positions], self.sin[positions], self.head_dim // 2
        mask = None
        if n > 1:
            mask = torch.zeros(visible.shape, dtype=self.target.dtype)
            mask.masked_fill_(~visible, float("-inf"))
            mask = mask.repeat(groups, 1)
        states = {}
        x = self.target.embed_tokens(tokens)
        for b, (layer, qkv, output, gate_up, down) in enumerate(self.layers):
            states[b] = x
            attention = layer.self_attn
            mixed = qkv(_rms_norm(x, layer.input_layernorm)).view(n, -1, dim)
            queries, keys, values = mixed.split((groups * heads, heads, heads), dim=1)
            if hasattr(attention, "q_norm"):
                queries = _rms_norm(queries, attention.q_norm)
                keys = _rms_norm(keys, attention.k_norm)
                turned = torch.cat((queries, keys), dim=1)
            else:
                turned = mixed[:, : (groups + 1) * heads]
            swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
            queries, keys = (turned * cos + swapped * sin).split((groups * heads, heads), dim=1)
            keys, values = kv.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], b)
            # [n, heads * groups, dim] -> [heads, groups * n, dim]: the group's queries are rows.
            queries = queries.view(n, heads, groups, dim).permute(1, 2, 0, 3)
            queries = queries.reshape(1, heads, groups * n, dim)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=attention.scaling
            )
            attended = attended.view(heads, groups, n, dim).permute(2, 0, 1, 3)
            x = x + output(attended.reshape(n, -1))
            gate, up = gate_up(_rms_norm(x, layer.post_attention_layernorm)).chunk(2, dim=-1)
            x = x + down(layer.mlp.act_fn(gate) * up)
        states[len(self.layers)] = x
        logits = self.unembed(_rms_norm(x[-rows:], self.target.final_norm)).float()
        wanted = [states[b] for b in self.boundaries]
        return logits, torch.cat(wanted, dim=-1) if wanted else None


class PackedLinear:
    """Linear layers over the same input as one product with weights laid out for oneDNN.

    These are the operators that ``torch.compile`` uses for frozen weights on a CPU; called
    directly they need no compiler. A product is done on at least `rows` rows, because the kernel
    for a single row is slower than the one for a few on some processors, and in `precision`, by
    default the weights' own: half as many bytes are read in half the time. Input and output keep
    theirs.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], rows: int, precision: torch.dtype | None = None
    ):
        weight = torch.cat([linear.weight.detach() for linear in linears]).to(precision)
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        if self.bias is not None:
            self.bias = self.bias.to(weight.dtype)
        self.weight, self.rows = torch.ops.mkldnn._reorder_linear_weight(weight), rows
        self.precision = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, the layers' outputs side by side."""
        flat = x.reshape(-1, x.shape[-1]).to(self.precision)
        n = len(flat)
        if n < self.rows:
            flat = F.pad(flat, (0, 0, 0, self.rows - n))
        out = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        return out[:n].view(*x.shape[:-1], -1).to(x.dtype)


class PackedLinears:
    """Packed copies of all ``nn.Linear`` in a module, to be used in their place for a while."""

    def __init__(self, module: nn.Module, precision: torch.dtype | None = None):
        linears = [m for m in module.modules() if type(m) is nn.Linear]
        rows = fastest_rows(max((m.weight for m in linears), key=Tensor.numel), precision)
        self.packed = [(linear, PackedLinear([linear], rows, precision)) for linear in linears]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the ``with`` block the module computes with the packed weights."""
        try:
            for linear, packed in self.packed:
                linear.forward = packed
            yield
        finally:
            for linear, _ in self.packed:
                del linear.forward


_FASTEST: dict[tuple[torch.Size, torch.dtype], int] = {}


def fastest_rows(weight: Tensor, precision: torch.dtype | None = None) -> int:
    """How many rows make one row fastest: 1, 2 or 4, measured once for a shape of weight."""
    kind = weight.shape, precision or weight.dtype
    if kind not in _FASTEST:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(precision))
        seconds: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for _ in range(9):
            for rows, times in seconds.items():
                x = torch.ones(rows, weight.shape[1], dtype=packed.dtype)
                start = time.perf_counter()
                torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
                times.append(time.perf_counter() - start)
        medians = {rows: statistics.median(times) for rows, times in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        _FASTEST[kind] = best if medians[best] < 0.95 * medians[1] else 1
    return _FASTEST[kind]


def packs(weight: Tensor) -> bool:
    """Whether weights like this one can be packed: on a CPU that multiplies their precision.

    And with oneDNN in torch, which builds for Apple's processors come without.
    """
    native = weight.dtype == torch.float32
    native |= weight.dtype == torch.bfloat16 and multiplies_bfloat16()
    on_cpu = weight.device.type == "cpu"
    return on_cpu and native and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _can_pack(target: Target) -> bool:
    """Whether packed weights can be used, and a second copy of the weights fits in memory."""
    if not packs(target.output_matrix.weight):
        return False
    needed = sum(p.numel() * p.element_size() for p in target.model.parameters())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    available = next((int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), None)
    return available is None or needed < 0.8 * 1024 * available


def _windows(config: Any) -> dict[str, int | None]:
    """Kinds of layers as the decoder's masks name them, with their sliding window if any.

    ``{"all": ...}`` stands for a single mask.
    """
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window and window >= config.max_position_embeddings:
        window = None
    if kinds is None:
        return {"all": window}
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted(set(kinds) - set(known)):
        raise UserError(
            f"layers of kind {', '.join(unknown)} cannot be decoded: their states depend on all "
            "earlier tokens and rejected ones cannot be taken back"
        )
    return {kind: known[kind] for kind in dict.fromkeys(kinds)}


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding, of which some architectures have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    return {kind.get("rope_type", "default") for kind in kinds}


def _rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
