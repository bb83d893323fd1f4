"""The transformer layers inside a draft head, and the memory of what they attended to.

Used by ``head`` in chapters 06 and 07. The first layer reads an embedding beside its hidden state,
as EAGLE-3's does; further ones are Llama's. Which states and tokens go in belongs to ``head``.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlayers.head_config import HeadConfig
from draftlayers.project import UserError


class HeadCache:
    """Keys and values of the head's attention layers, in memory allocated once.

    ``keys`` and ``values`` are [layers, B, n_kv_heads, capacity, head_dim]; ``length`` entries are
    in use.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0

    @property
    def capacity(self) -> int:
        """Entries that there is room for."""
        return self.keys.shape[3]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, n_kv_heads, q, head_dim] more entries of a layer; views of all in use.

        They count as in use when the last layer has stored its own.
        """
        start, end = self.length, self.length + keys.shape[2]
        if end > self.capacity:
            raise UserError(
                f"the head's cache holds {self.capacity} entries and {end} are needed; "
                "ask new_cache for more"
            )
        for held, new in ((self.keys, keys), (self.values, values)):
            held[layer, :, :, start:end] = new
        if layer == len(self.keys) - 1:
            self.length = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def truncate(self, length: int) -> None:
        """Forget every entry from index `length` on."""
        if not 0 <= length <= self.length:
            raise UserError(f"cannot keep {length} of {self.length} cache entries")
        self.length = length


class Attention(nn.Module):
    """Llama attention over inputs of any width."""

    def __init__(self, c: HeadConfig, width: int) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(width, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=False)

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., n_heads, head_dim] of inputs [..., width]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), *rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, both [..., n_kv_heads, head_dim], of inputs [..., width]."""
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


class Layer(nn.Module):
    """A transformer layer of Llama's; its attention is left to the caller, who holds the keys.

    Parameters
    ----------
    c
        The head's shape.
    width
        Of what attention reads.
    """

    def __init__(self, c: HeadConfig, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(c, width)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.d_model, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.d_model, c.rms_norm_eps)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: the normed hidden state ``[..., d]``."""
        return cast(Tensor, self.input_layernorm(hidden))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output state [..., d] from the layer's input state and its attention's output.

        The residual is the state as it came in, not its normed form (EAGLE-3's code; some later
        heads differ, and an engine must be told).
        """
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class MidLayer(Layer):
    """EAGLE-3's layer, whose attention reads an embedding and a hidden state side by side."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__(c, 2 * c.d_model)
        self.hidden_norm = nn.RMSNorm(c.d_model, c.rms_norm_eps)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Attention inputs [..., 2d]: the normed embedding first, then the normed hidden state."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
