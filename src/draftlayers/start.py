"""Where a draft head stands before it learns: at random, at the target's end, or at a linear guess.

Used by ``training`` in chapter 06. ``start_from_target`` copies what the head shares with the
target's last layer; ``fit_start`` then solves for the best linear guess in closed form, which saves
the part of training that would only find this line. What a head is belongs to ``head``, how it
learns to ``ttt`` and ``training``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlayers.head import DraftHead

if TYPE_CHECKING:
    from draftlayers.targets import Target

SELF_SCORE = 10.0  # attention logit of a position with itself, in heads that fit_start sets


@torch.no_grad()
def start_at_random(head: DraftHead, seed: int) -> None:
    """Give the head Llama's random start: normal weights of deviation 0.02, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)


@torch.no_grad()
def start_from_target(head: DraftHead, target: Target, seed: int) -> list[str]:
    """Start the head where the target's own last layer stands.

    ``fc`` passes the deepest input layer through, ``midlayer`` is the target's last layer with
    its attention reading the hidden half, and ``norm`` and ``lm_head`` are the target's final
    norm and the draft tokens' rows of its output matrix. Further layers are the target's last
    layer, too, but add nothing yet, so the head guesses what it would without them. Training goes
    on from here with `fit_start`. What a target does not have in Llama's form (GPT-2's MLP, queries
    that Qwen 3 norms) keeps its random start.

    Returns
    -------
    Names of the parameters that came from the target.
    """
    start_at_random(head, seed)
    d = head.config.d_model
    layer, output = target.layers[-1], target.output_matrix.weight
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    # Gemma names the norm before its MLP differently, and uses Llama's name for another one.
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    before_mlp = before_mlp or getattr(layer, "post_attention_layernorm", None)
    parts = {
        "post_attention_layernorm.weight": norm_weight(before_mlp, d),
        **{f"self_attn.{x}.weight": weight_of(attention, x) for x in ("v_proj", "o_proj")},
        **{f"mlp.{x}.weight": weight_of(mlp, x) for x in ("gate_proj", "up_proj", "down_proj")},
    }
    if not hasattr(attention, "q_norm"):
        parts |= {f"self_attn.{x}.weight": weight_of(attention, x) for x in ("q_proj", "k_proj")}
    before_attention = norm_weight(getattr(layer, "input_layernorm", None), d)
    sources = {
        **{f"midlayer.{name}": weight for name, weight in parts.items()},
        "midlayer.hidden_norm.weight": before_attention,
        "norm.weight": norm_weight(target.final_norm, d),
        "lm_head.weight": output[head.vocabulary.to(output.device)],
    }
    for i in range(len(head.upper)):
        sources |= {f"upper.{i}.{name}": weight for name, weight in parts.items()}
        sources[f"upper.{i}.input_layernorm.weight"] = before_attention
    taken = ["fc.weight"]
    head.fc.weight.zero_()
    head.fc.weight[:, -d:].fill_diagonal_(1.0)
    for name, weight in head.named_parameters():
        source = sources.get(name)
        # q, k and v read [embedding ; hidden]: the target's weights go to the hidden half.
        reads_both = weight.ndim == 2 and weight.shape[1] == 2 * d and name.startswith("midlayer.")
        part = weight[:, d:] if reads_both else weight
        if source is not None and source.shape == part.shape:
            weight.zero_()
            part.copy_(source)
            taken.append(name)
    for layer in head.transformer[1:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return taken


@torch.no_grad()
def fit_start(
    head: DraftHead,
    states: Tensor,
    tokens: Tensor,
    final: Tensor,
    seed: int,
    ridge: float = 0.03,
    block: int = 8192,
) -> None:
    """Let the head begin as the best linear guess of the target's next final state.

    Ridge regression of the final state one position on, from what the head reads in its first
    step: y ≈ A·states + B·norm(embedding). ``fc`` becomes A. B goes through attention: half of
    the key-value heads (rounded up) get queries and keys that are one random projection of the
    embedding, so that a position matches itself best, and values and outputs that are the best
    approximation of B of their rank. All other weights stay as they are.

    Parameters
    ----------
    head
        Started by `start_from_target`.
    states
        Input layers' states at positions p, ``[n, K*d]``.
    tokens
        Tokens at p + 1, int ``[n]``.
    final
        The target's states at p + 1 at boundary N, ``[n, d]``.
    seed
        Of the random projection.
    ridge
        Weight of the penalty, as a share of the features' mean square.
    block
        Rows multiplied at once.
    """
    c, device = head.config, head.fc.weight.device
    d, width = c.d_model, (c.k + 1) * c.d_model
    gram = torch.zeros(width, width, dtype=torch.float64, device=device)
    cross = torch.zeros(width, d, dtype=torch.float64, device=device)
    parts = (x.split(block) for x in (states, tokens, final))
    for x, token, y in zip(*parts, strict=True):
        embedded = F.embedding(token.to(device), head.embedding).float()
        embedded = F.rms_norm(embedded, (d,), eps=c.rms_norm_eps)
        features = torch.cat((head.normed(x.to(device).float()), embedded), -1)
        gram += (features.T @ features).double()
        cross += (features.T @ y.to(device).float()).double()
    gram, cross = gram / len(states), cross / len(states)
    # Boundaries differ in norm by orders of magnitude; the penalty should not see that.
    scale = gram.diagonal().sqrt().clamp(min=1e-9)
    penalty = ridge * torch.eye(width, dtype=torch.float64, device=device)
    fitted = torch.linalg.solve(gram / scale[:, None] / scale + penalty, cross / scale[:, None])
    fitted = fitted / scale[:, None]
    a, b = fitted[:-d], fitted[-d:]

    hd, group = c.head_dim, c.n_heads // c.n_kv_heads
    kv_heads = (c.n_kv_heads + 1) // 2
    rank = min(kv_heads * hd, d)
    # The main directions of B's output on these embeddings: the best approximation of its rank.
    directions = torch.linalg.eigh(b.T @ gram[-d:, -d:] @ b).eigenvectors.flip(1)[:, :rank]
    inner = b @ directions
    balance = inner.norm(dim=0).clamp(min=1e-12).sqrt()  # share the scale between v and o
    inner, outer = (inner / balance).T.float(), (directions * balance).float()

    attention = head.midlayer.self_attn
    head.fc.weight.copy_(a.T)
    head.midlayer.input_layernorm.weight.fill_(1.0)
    generator = torch.Generator().manual_seed(seed)
    for kv in range(kv_heads):
        own, queries = slice(kv * hd, (kv + 1) * hd), slice(kv * group * hd, (kv + 1) * group * hd)
        random = torch.randn(max(d, hd), hd, generator=generator)
        projection = torch.linalg.qr(random).Q[:d].T.to(device)
        # A position's score with itself is about SELF_SCORE: most of the attention, not all of it,
        # so that the head can still learn to look elsewhere.
        projection *= (SELF_SCORE / hd**0.5) ** 0.5
        for weight, rows, value in (
            (attention.q_proj.weight, queries, projection.repeat(group, 1)),
            (attention.k_proj.weight, own, projection),
            (attention.v_proj.weight, own, F.pad(inner[own], (0, 0, 0, hd - len(inner[own])))),
        ):
            weight[rows] = 0
            weight[rows, :d] = value
        share = F.pad(outer[:, own], (0, hd - outer[:, own].shape[1])) / group
        attention.o_proj.weight[:, queries] = share.repeat(1, group)


def weight_of(module: nn.Module | None, name: str) -> Tensor | None:
    """Weight of a named linear layer, if the module has it."""
    return getattr(getattr(module, name, None), "weight", None)


def norm_weight(norm: nn.Module | None, width: int) -> Tensor | None:
    """What a norm multiplies its normed input ``[width]`` by; None when it also adds a bias.

    Found by norming numbers of mean zero that are alike in size, so that it makes no difference
    whether the norm subtracts the mean (Cohere), stores its weight minus one (Gemma) or has none
    (OLMo 1: ones). They are large, so that epsilon does not count; the width must be even.
    """
    if norm is None or getattr(norm, "bias", None) is not None:
        return None
    weight = getattr(norm, "weight", None)
    if weight is None:
        return torch.ones(width)
    signs = torch.ones(width, dtype=weight.dtype, device=weight.device)
    signs[1::2] = -1
    normed: Tensor = norm(1e3 * signs[None])
    return normed[0] * signs
