"""Brute-force twins of the package's statistics and of the draft head, from the papers' formulas.

Slow on purpose and independent of ``draftlayers``: no streaming, no blocks, no shared code.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch


def hsic_debiased(x: np.ndarray, y: np.ndarray) -> float:
    """HSIC_1 of linear kernels by U-centred n x n matrices (Szekely and Rizzo 2014)."""
    return float((u_centred(x) * u_centred(y)).sum() / (len(x) * (len(x) - 3)))


def u_centred(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=np.float64)
    k = x @ x.T
    n = len(k)
    np.fill_diagonal(k, 0)
    rows = k.sum(1, keepdims=True)
    a = k - rows / (n - 2) - rows.T / (n - 2) + k.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(a, 0)
    return a


def cka_debiased(states: np.ndarray) -> np.ndarray:
    """Debiased CKA of all pairs of ``[layers, n, d]``."""
    return _normalised([[hsic_debiased(x, y) for y in states] for x in states])


def cka_biased(states: np.ndarray) -> np.ndarray:
    """Plug-in CKA of all pairs: centred feature cross-products (Kornblith et al. 2019)."""
    centred = [np.asarray(x, np.float64) - np.asarray(x, np.float64).mean(0) for x in states]
    return _normalised([[np.square(x.T @ y).sum() for y in centred] for x in centred])


def _normalised(hsic: list[list[float]]) -> np.ndarray:
    h = np.array(hsic)
    return h / np.sqrt(np.outer(h.diagonal(), h.diagonal()))


def entropy(p: np.ndarray) -> np.ndarray:
    """Shannon entropy in nats over the last axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.where(p > 0, p * np.log(p), 0.0).sum(-1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def trace_normalised(x: np.ndarray) -> np.ndarray:
    """Covariance-side operator of centred rows with trace 1, ``[d, d]``."""
    x = np.asarray(x, np.float64)
    x = x - x.mean(0)
    c = x.T @ x
    return c / np.trace(c)


def concatenated_operator(states: np.ndarray) -> np.ndarray:
    """Trace-1 covariance of concatenated layers, each layer first scaled to trace 1."""
    parts = []
    for x in states:
        x = np.asarray(x, np.float64)
        x = x - x.mean(0)
        parts.append(x / np.sqrt(np.square(x).sum()))
    z = np.concatenate(parts, axis=1) / np.sqrt(len(states))
    return z.T @ z


def von_neumann(operator: np.ndarray) -> float:
    values = np.linalg.eigvalsh(operator)
    return float(entropy(values[values > 1e-14]))


def best_set(entropies: np.ndarray, cka: np.ndarray, k: int) -> tuple[tuple[int, ...], float]:
    """Best set of indices by mean entropy x (1 - largest CKA), first in lexicographic order."""
    best, top = (), -np.inf
    for s in itertools.combinations(range(len(entropies)), k):
        largest = max((cka[i, j] for i, j in itertools.combinations(s, 2)), default=0.0)
        score = np.mean([entropies[i] for i in s]) * (1 - largest)
        if score > top:
            best, top = s, score
    return best, float(top)


# --- The draft head, one position at a time ----------------------------------------------------


def naive_rms(x, weight, eps):
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def naive_rope(x, position, theta):
    """Rotate the pairs (x[i], x[i + half]) as complex numbers."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag))


def naive_step(head, memory, hidden, token, position):
    """Output state of one entry of a head.

    `memory` holds for each layer the key heads and value heads of the entries that this one sees;
    its own are added.
    """
    w, eps, hd = dict(head.named_parameters()), head.config.rms_norm_eps, head.config.head_dim
    theta, group = head.config.rope["rope_theta"], head.config.n_heads // head.config.n_kv_heads
    for place, seen in enumerate(memory):
        layer = f"upper.{place - 1}" if place else "midlayer"
        first = hidden if place else head.embedding[token]
        x = naive_rms(first, w[f"{layer}.input_layernorm.weight"], eps)
        if not place:
            x = torch.cat((x, naive_rms(hidden, w["midlayer.hidden_norm.weight"], eps)))
        q, k, v = (w[f"{layer}.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        queries, keys = (
            [naive_rope(part, position, theta) for part in parts.split(hd)] for parts in (q, k)
        )
        seen.append((keys, v.split(hd)))
        attended = []
        for h, query in enumerate(queries):
            scores = torch.stack([query @ keys[h // group] / hd**0.5 for keys, _ in seen])
            values = [values[h // group] for _, values in seen]
            attended.append(sum(s * v for s, v in zip(scores.softmax(0), values, strict=True)))
        hidden = hidden + w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(attended)
        x = naive_rms(hidden, w[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = (w[f"{layer}.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
        hidden = hidden + w[f"{layer}.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    return hidden


def naive_logits(head, hidden):
    w = dict(head.named_parameters())
    return w["lm_head.weight"] @ naive_rms(hidden, w["norm.weight"], head.config.rms_norm_eps)
