"""How long a sequence a model can take, as its configuration and tokenizer tell.

Used by ``targets`` (the context a model was made for), and by ``writing`` and ``engine`` (the
length up to which a cache stays right).
"""

from __future__ import annotations

import re
from typing import Any

NO_LIMIT = 1 << 20  # context of a model whose configuration and tokenizer name none, as with ALiBi
# Rotary embeddings that depend on the position alone. "dynamic" and "longrope" also turn by the
# length of the sequence.
FIXED_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
# Names that configurations give to how far a token sees. ``sliding_window`` is the one that masks
# show; what the others do is only known to the model.
_WINDOW = re.compile(r"(window|chunk)(_size|_len|_length)?$")


def context_of(config: Any, tokenizer: Any) -> int:
    """Longest sequence a model was made for, under the names that configurations give it."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config, name, None), int) and found > 0:
            return found
    found = getattr(tokenizer, "model_max_length", None) or NO_LIMIT
    return int(min(found, NO_LIMIT))


def cached_limit(config: Any, context: int) -> tuple[int, str]:
    """Longest sequence that can be continued from a cache, and in words what sets the limit.

    Some rotary embeddings turn all positions anew once the sequence is longer than some length, and
    keys that were cached before that are wrong from then on.

    Parameters
    ----------
    context
        The context the model was made for.
    """
    limit, bound = context, f"the model's context of {context} tokens"
    for rope in ropes(config):
        if rope["rope_type"] in FIXED_ROPE:
            continue
        settings = rope, config.to_dict()
        names = "original_max_position_embeddings", "max_position_embeddings"
        lengths = [s[name] for s in settings for name in names if s.get(name)]
        if min(lengths, default=limit) < limit:
            limit = min(lengths)
            bound = (
                f"the {limit} tokens up to which the rotary embedding of kind {rope['rope_type']} "
                "turns all positions alike"
            )
    return limit, bound


def own_windows(config: Any) -> dict[str, int]:
    """Windows that a decoder applies by itself, where no mask of ours reaches, by their names.

    >>> from transformers import GPTNeoConfig
    >>> own_windows(GPTNeoConfig(window_size=16))
    {'window_size': 16}
    """
    return {name: n for name, n in _windows(config).items() if name != "sliding_window"}


def turning_points(config: Any) -> list[int]:
    """Lengths at which a configuration says that something happens: windows and rotations."""
    places = [config.to_dict(), *ropes(config)]
    rotations = [place.get("original_max_position_embeddings") for place in places]
    return [*_windows(config).values(), *(n for n in rotations if type(n) is int and n > 0)]


def _windows(config: Any) -> dict[str, int]:
    values = config.to_dict().items()
    return {name: n for name, n in values if _WINDOW.search(name) and type(n) is int and n > 0}


def ropes(config: Any) -> list[dict[str, Any]]:
    """Settings of the rotary embeddings, of which some architectures have one for each kind of
    layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    return [{"rope_type": "default", **kind} for kind in kinds]
