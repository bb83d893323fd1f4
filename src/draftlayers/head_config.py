"""The shape and arithmetic of a draft head: all that must be known before its weights are made.

Used by ``head`` and its layers in chapters 06 and 07. Whether a file holds a head of this shape is
looked at in ``head_files``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftlayers import head_files
from draftlayers.project import UserError

if TYPE_CHECKING:
    from draftlayers.targets import Target


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
    norm_output
        Whether the next step of a chain reads the head's state as the final norm leaves it.
    head_layers
        Transformer layers of the head itself, at least 1.
    tied_output
        Whether the output matrix is the draft tokens' rows of the target's, so that it does not
        learn and no file needs to hold it.
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
    norm_output: bool = False
    head_layers: int = 1
    tied_output: bool = False

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
                f"{self.n_heads} attention heads cannot share {self.n_kv_heads} key-value heads; "
                f"expected a multiple of {self.n_kv_heads}"
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
        """Rebuild a configuration from `to_dict`.

        Raises
        ------
        UserError
            When a field is missing, unknown, of another type, or out of range.
        """
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - values.keys()):
            raise UserError(f"head configuration without {', '.join(missing)}")
        if unknown := sorted(values.keys() - names):
            raise UserError(f"head configuration with unknown {', '.join(unknown)}")
        head_files.check_values(values)
        return cls(**values)

    @classmethod
    def for_target(
        cls, target: Target, layers: Iterable[int], draft_vocab_size: int, **own: Any
    ) -> HeadConfig:
        """The head's configuration for a target: its sizes, norms and RoPE settings.

        `own` are fields that the target says nothing of: ``fc_norm``, ``norm_output``,
        ``head_layers`` and ``tied_output``.
        """
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
            **own,
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
