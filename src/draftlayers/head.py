"""The draft head: one small transformer layer that guesses the target's next tokens.

It is EAGLE-3's head as its official code has it (arXiv:2503.01840, Section 3.1;
``eagle/model/cnets.py`` of SafeAILab/EAGLE), with the number of input layers left free.
Chapter 06 trains it, chapter 07 decodes with it. What its weights are before training belongs to
``start``, how it learns to ``ttt`` and ``training``; which layers it reads to ``selection``.

Alignment, used everywhere: at index p the head takes the target's states after tokens 0..p and
the embedding of token p+1, and predicts token p+2 (the target itself has already given p+1).
In a chain, the next step at index p takes the head's own output in place of the target's states
and the embedding of token p+2, and predicts token p+3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftlayers import head_files
from draftlayers.current import read_record, write_record
from draftlayers.project import UserError, write_atomically

if TYPE_CHECKING:
    from draftlayers.targets import Target

FORMAT = "draftlayers-head-1"


@dataclass(frozen=True)
class HeadConfig:
    """Everything that fixes the shape and the arithmetic of a head.

    Attributes
    ----------
    target
        Name of the model the head drafts for.
    n_layers
        The target's number of layers N.
    layers
        Boundaries the head reads, ascending and distinct, each in 0..N.
    d_model
        Width of the target's residual stream, and of the head.
    vocab_size
        Rows of the target's embedding, V.
    draft_vocab_size
        Tokens the head can propose, D <= V.
    intermediate_size, n_heads, n_kv_heads, head_dim
        Sizes of the head's own layer.
    rms_norm_eps
        Epsilon of every norm.
    rope
        RoPE settings as the target has them (``rope_type``, ``rope_theta``, scaling); an engine
        that serves the head needs the same, so they are saved.
    max_positions
        The target's longest context.
    fc_norm
        Whether each input layer passes its own RMSNorm before ``fc``.
    """

    target: str
    n_layers: int
    layers: tuple[int, ...]
    d_model: int
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_positions: int
    fc_norm: bool = False

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        if not layers or list(layers) != sorted(set(layers)):
            raise UserError(
                f"layers {list(layers)}: a head reads at least one boundary, in ascending order "
                "and without repeats, because every engine captures states in forward order"
            )
        if layers[0] < 0 or layers[-1] > self.n_layers:
            raise UserError(
                f"layers {list(layers)}: boundaries of a target with {self.n_layers} layers run "
                f"from 0 to {self.n_layers}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"draft vocabulary of {self.draft_vocab_size} tokens: expected 1 to "
                f"{self.vocab_size}, the target's vocabulary"
            )
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"{self.n_heads} attention heads cannot share {self.n_kv_heads} key-value heads"
            )

    @property
    def k(self) -> int:
        """Number of input layers."""
        return len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a dictionary that JSON can hold."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadConfig:
        """Rebuild a configuration from `to_dict`; a field that does not fit is refused."""
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - values.keys()):
            raise UserError(f"head configuration without {', '.join(missing)}")
        if unknown := sorted(values.keys() - names):
            raise UserError(f"head configuration with unknown {', '.join(unknown)}")
        head_files.check_values(values)
        return cls(**values)

    @classmethod
    def for_target(
        cls, target: Target, layers: Iterable[int], draft_vocab_size: int, fc_norm: bool = False
    ) -> HeadConfig:
        """The head's configuration for a target: its sizes, norms and RoPE settings."""
        c = target.config
        n_heads = c.num_attention_heads
        return cls(
            target=target.name,
            n_layers=target.n_layers,
            layers=tuple(layers),
            d_model=target.d_model,
            vocab_size=target.model.get_input_embeddings().weight.shape[0],
            draft_vocab_size=draft_vocab_size,
            # GPT-2 leaves the width of its MLP unsaid when it is four times the model's.
            intermediate_size=getattr(c, "intermediate_size", None) or 4 * target.d_model,
            n_heads=n_heads,
            n_kv_heads=getattr(c, "num_key_value_heads", None) or n_heads,
            head_dim=getattr(c, "head_dim", None) or target.d_model // n_heads,
            rms_norm_eps=getattr(c, "rms_norm_eps", None) or 1e-5,
            rope=rope_of(c),
            max_positions=target.context_limit,
            fc_norm=fc_norm,
        )


def rope_of(config: Any) -> dict[str, Any]:
    """RoPE settings of a Hugging Face text configuration, for a Llama layer with full attention.

    Targets that rotate some layers differently (Gemma 3) keep one set per kind of layer; the head
    attends to everything, so it takes that of the full-attention layers. Targets without RoPE
    (GPT-2) give the Llama default. So do those that turn part of each head by LongRoPE, base aside,
    since their factors are for the frequencies of that part, and a Llama layer turns the whole.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "longrope" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        rope = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    # Partial and multi-axis rotation are the target's attention, not a Llama layer's.
    rope = {k: v for k, v in rope.items() if k not in ("partial_rotary_factor", "mrope_section")}
    return {"rope_type": "default", "rope_theta": 10000.0, **rope}


def rotary_tables(config: HeadConfig, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[count, head_dim]`` of positions 0 .. count-1.

    No entry depends on `count`. Two kinds of RoPE change all frequencies with the length of the
    text (``longrope``, ``dynamic``); a head keeps those of texts within the length that the target
    was first trained on: LongRoPE's short factors, and the base as it is. Decoding ends there, too.
    """
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.d_model,
            num_attention_heads=config.n_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
    )
    angles = torch.arange(count).float()[:, None] * rotary.inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


class HeadCache:
    """Keys and values of the head's one attention layer, in memory allocated once.

    ``keys`` and ``values`` are [B, n_kv_heads, capacity, head_dim]; ``length`` entries are in use.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, n_kv_heads, q, head_dim] more entries; return views of all in use."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            raise UserError(
                f"the head's cache holds {self.keys.shape[2]} entries and {end} are needed; "
                "ask new_cache for more"
            )
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def truncate(self, length: int) -> None:
        """Forget every entry from index `length` on."""
        if not 0 <= length <= self.length:
            raise UserError(f"cannot keep {length} of {self.length} cache entries")
        self.length = length


class Attention(nn.Module):
    """Llama attention over inputs of width 2d: [embedding ; hidden]."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(2 * c.d_model, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.d_model, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.d_model, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=False)

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., n_heads, head_dim] of inputs [..., 2d]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), *rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, both [..., n_kv_heads, head_dim], of inputs [..., 2d]."""
        keys = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), *rotary)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., heads, head_dim] by cos, sin [..., head_dim]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.d_model, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class MidLayer(nn.Module):
    """The head's transformer layer; its attention is left to the caller, who holds the keys."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.d_model, c.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(c.d_model, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.d_model, c.rms_norm_eps)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Attention inputs [..., 2d]: the normed embedding first, then the normed hidden state."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output state [..., d] from the layer's input state and its attention's output.

        The residual is the state as it came in, not its normed form (EAGLE-3's code; some later
        heads differ, and an engine must be told).
        """
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class DraftHead(nn.Module):
    """EAGLE-3 draft head with K input layers and a reduced draft vocabulary.

    Parameter names are the official ones: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, with
    buffers ``d2t`` and ``t2d`` (and ``fc_norm.{i}`` when the configuration asks for it). The
    target's embedding is shared, frozen and not saved.

    Parameters
    ----------
    config
        Shape of the head.
    embedding
        The target's input embedding [V, d].
    vocabulary
        Target token ids the head can propose, int64 [D], ascending.

    Raises
    ------
    UserError
        The embedding or the vocabulary does not fit the configuration.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, vocabulary: Tensor) -> None:
        super().__init__()
        c = self.config = config
        if tuple(embedding.shape) != (c.vocab_size, c.d_model):
            raise UserError(
                f"embedding of shape {tuple(embedding.shape)}: the head was made for a target "
                f"with {(c.vocab_size, c.d_model)}"
            )
        norms = (nn.RMSNorm(c.d_model, c.rms_norm_eps) for _ in c.layers)
        self.fc_norm = nn.ModuleList(norms) if c.fc_norm else None
        self.fc = nn.Linear(c.k * c.d_model, c.d_model, bias=False)
        self.midlayer = MidLayer(c)
        self.norm = nn.RMSNorm(c.d_model, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.d_model, c.draft_vocab_size, bias=False)
        for name, ids in zip(("d2t", "t2d"), vocabulary_maps(vocabulary, c), strict=True):
            self.register_buffer(name, ids)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, c.head_dim), persistent=False)

    @property
    def vocabulary(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [D], ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, states: Tensor) -> Tensor:
        """First hidden state [..., d] from the input layers' states [..., K*d], in layer order."""
        return cast(Tensor, self.fc(self.normed(states)))

    def normed(self, states: Tensor) -> Tensor:
        """States [..., K*d] as ``fc`` takes them: each layer normed if there is an ``fc_norm``."""
        if self.fc_norm is None:
            return states
        parts = states.chunk(self.config.k, dim=-1)
        return torch.cat([n(s) for n, s in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: HeadCache,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One draft step: read q entries, store their keys and values, return their new states.

        Parameters
        ----------
        hidden
            [B, q, d]: `fuse` of the target's states at index p, or the head's own previous
            output on the path that leads here.
        tokens
            int64 [B, q]: the token one place further than what `hidden` has seen.
        positions
            int64 [B, q] or [q], each at most the cache's capacity: index p for target states, and
            one more for each step drafted from there.
        cache
            Grows by q entries.
        mask
            bool, True = may attend, broadcastable to [B, n_heads, q, cache length after this
            call]; None: everything before, and causal among the q entries.

        Returns
        -------
        [B, q, d], before the final norm: pass it to `logits`, or to the next step.
        """
        layer, q = self.midlayer, hidden.shape[1]
        mixed = layer.mix(F.embedding(tokens, self.embedding).to(hidden.dtype), hidden)
        rotary = self.cos[positions], self.sin[positions]
        queries = layer.self_attn.queries(mixed, rotary).transpose(1, 2)
        new_keys, new_values = layer.self_attn.keys_values(mixed, rotary)
        before = cache.length
        keys, values = cache.append(new_keys.transpose(1, 2), new_values.transpose(1, 2))
        if mask is None and q > 1 and before:
            mask = torch.ones(q, before + q, dtype=torch.bool, device=hidden.device).tril(before)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and q > 1,
            enable_gqa=self.config.n_heads != self.config.n_kv_heads,
        )
        return layer.finish(hidden, attended.transpose(1, 2).flatten(2))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., D] over the draft vocabulary of states [..., d]."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    def new_cache(self, capacity: int, batch: int = 1) -> HeadCache:
        """An empty cache for `capacity` entries, on the head's device and in its precision."""
        self.ensure_positions(capacity + 1)
        w, c = self.fc.weight, self.config
        shape = (batch, c.n_kv_heads, capacity, c.head_dim)
        return HeadCache(w.new_zeros(shape), w.new_zeros(shape))

    def ensure_positions(self, count: int) -> None:
        """Make the rotary tables cover positions 0 .. count-1."""
        if len(self.cos) >= count:
            return
        tables = rotary_tables(self.config, 1 << max(count - 1, 1).bit_length())
        self.cos, self.sin = (table.to(self.fc.weight.device) for table in tables)

    def save(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``config.json``; the second comes last and seals it."""
        folder = Path(folder)
        weights = {k: v.detach().contiguous().cpu() for k, v in self.state_dict().items()}
        write_atomically(folder / "model.safetensors", save(weights))
        write_record(folder / "config.json", {"format": FORMAT, **self.config.to_dict()})

    @classmethod
    def load(cls, folder: Path, target: Target) -> DraftHead:
        """Read a head that `save` wrote, for the target it was trained on, and check it.

        Raises
        ------
        UserError
            No head there or one that cannot be read, another target's head, or weights that
            contradict the configuration (shapes, vocabulary maps, values that are not finite).
        """
        folder = Path(folder)
        values = read_record(folder / "config.json")
        if values is None:
            raise UserError(f"{folder} holds no draft head: no config.json that can be read")
        if values.pop("format", None) != FORMAT:
            raise UserError(f"{folder}/config.json is not a {FORMAT} configuration")
        weights = head_files.read_weights(folder)
        with head_files.naming(folder):
            config = HeadConfig.from_dict(values)
            if config.n_layers != target.n_layers:
                raise UserError(
                    f"head of a target with {config.n_layers} layers; "
                    f"{target.name} has {target.n_layers}"
                )
            head_files.check_trained_on(folder, target.digest)
            embedding = target.model.get_input_embeddings().weight
            vocabulary = head_files.stored_vocabulary(weights, config.draft_vocab_size)
            if vocabulary.max() >= target.vocab_size:
                raise UserError(f"the head proposes tokens that {target.name} does not have")
            with torch.device("meta"):  # shapes first: a false size may need more than all memory
                head_files.check_weights(weights, cls(config, embedding, vocabulary).state_dict())
            head = cls(config, embedding, vocabulary)
            if not torch.equal(weights["t2d"], head.t2d):
                raise UserError("t2d and d2t name different draft vocabularies")
            head.load_state_dict(weights)
            head = head.to(embedding.device, embedding.dtype).eval()
            head_files.check_finite(head.state_dict())
            head_files.check_rope(lambda: rotary_tables(config, 2), config.head_dim)
        return head


def vocabulary_maps(vocabulary: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor]:
    """The official maps of a draft vocabulary of target ids, int64 [D], strictly ascending.

    Returns
    -------
    ``d2t`` int64 [D], the *offset* from draft id to target id, and ``t2d`` bool [V], true for
    tokens the head can propose.

    Raises
    ------
    UserError
        The wrong number of ids, ids out of range, or not ascending. A map of zeros with D < V
        is the mark of a map that was never filled in: no count of tokens gives the first D ids.
    """
    d, v = config.draft_vocab_size, config.vocab_size
    ids = vocabulary.to(torch.int64)
    # All ids and not the ends: a difference of far ids may overflow and look like a step up.
    if ids.shape != (d,) or (ids.diff() <= 0).any() or ((ids < 0) | (ids >= v)).any():
        raise UserError(
            f"draft vocabulary: expected {d} ascending, distinct token ids below {v}, "
            f"got {list(ids.shape)}"
            + (f" from {int(ids.min())} to {int(ids.max())}" if ids.numel() else "")
        )
    d2t = ids - torch.arange(d, device=ids.device)
    if d < v and not d2t.any():
        raise UserError(
            f"draft vocabulary: d2t is all zeros though only {d} of {v} tokens are in it; "
            "the map was never filled in"
        )
    t2d = torch.zeros(v, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return d2t, t2d
