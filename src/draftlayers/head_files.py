"""A draft head on disk: what its files must hold before any of it is used.

Used by ``head`` in chapters 06 and 07. A head may come from anywhere, so nothing in its files is
taken for granted. What a head computes is left to ``head``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlayers.checkpoints import listing
from draftlayers.current import read_record
from draftlayers.project import UserError

SIZES = (
    "n_layers", "d_model", "vocab_size", "draft_vocab_size", "intermediate_size", "n_heads",
    "n_kv_heads", "head_dim", "max_positions", "head_layers",
)  # fmt: skip
LARGEST = 2**24  # of any size; beyond it products of sizes leave the range of a shape
MOST_LAYERS = 64  # of a head; each is made before its weights are looked at


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Put the folder before what is wrong in it."""
    try:
        yield
    except UserError as err:
        raise UserError(f"{folder}: {err}") from None


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse a head's configuration with a value of another type, or a size of no tensor.

    Raises
    ------
    UserError
        Names the first field that is wrong, and what is expected.
    """
    for name in SIZES:
        if type(values[name]) is not int or not 1 <= values[name] <= LARGEST:
            raise UserError(f"{name} of a head must be a whole number from 1 to {LARGEST}")
    if values["head_layers"] > MOST_LAYERS:
        raise UserError(f"head_layers of a head must be at most {MOST_LAYERS}")
    if values["n_heads"] * values["head_dim"] > LARGEST:
        raise UserError(f"n_heads x head_dim of a head must be at most {LARGEST}")
    layers = values["layers"]
    if not isinstance(layers, list | tuple) or not all(type(b) is int for b in layers):
        raise UserError("layers of a head must be a list of whole numbers")
    epsilon = values["rms_norm_eps"]
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        raise UserError("rms_norm_eps of a head must be a number between 0 and 1")
    for name, kind, called in (
        ("target", str, "a text"),
        ("rope", dict, "an object"),
        ("fc_norm", bool, "true or false"),
        ("norm_output", bool, "true or false"),
        ("tied_output", bool, "true or false"),
    ):
        if not isinstance(values[name], kind):
            raise UserError(f"{name} of a head must be {called}")


def check_trained_on(folder: Path, digest: str) -> None:
    """Refuse a head whose record, if it has one, names a target of another digest.

    Raises
    ------
    UserError
        When it does.
    """
    causes = (read_record(folder / "training.json") or {}).get("causes")
    if isinstance(causes, dict) and causes.get("target", digest) != digest:
        raise UserError("this head was trained on another target, or on other weights of this one")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``.

    Raises
    ------
    UserError
        When there is no such file, or none that can be read.
    """
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as err:
        raise UserError(f"{folder} holds no draft head that can be read: {err}") from None


def stored_vocabulary(weights: Mapping[str, Tensor], size: int) -> Tensor:
    """Target ids that the map ``d2t`` of offsets stands for, int64 [D]; their range is unchecked.

    Raises
    ------
    UserError
        When there is no map of this size.
    """
    if "d2t" not in weights:
        raise UserError("no d2t, so draft ids cannot be turned into target ids")
    d2t = weights["d2t"]
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        raise UserError(
            f"d2t is {d2t.dtype} {list(d2t.shape)}, and {size} whole numbers (int64) are expected"
        )
    return torch.arange(size) + d2t


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not there, not known, of another shape, or not numbers as expected.

    `expected` has the names, shapes and kinds of number that belong there.

    Raises
    ------
    UserError
        Names the weights that are wrong.
    """
    wrong = [
        name
        for name in sorted(expected.keys() | weights.keys())
        if name not in expected
        or name not in weights
        or weights[name].shape != expected[name].shape
    ]
    if wrong:
        raise UserError(f"missing, unknown or misshapen weights: {listing(wrong)}")
    for name, value in weights.items():
        like = expected[name]
        if not (
            value.is_floating_point() if like.is_floating_point() else value.dtype == like.dtype
        ):
            raise UserError(f"{name} holds numbers of type {value.dtype}, not {like.dtype}")


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite in the precision that they are used in.

    Raises
    ------
    UserError
        Names the first that has such values.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"{name} holds values that are not finite")


def check_rope(tables: Callable[[], tuple[Tensor, ...]], head_dim: int) -> None:
    """Refuse RoPE settings that do not turn heads of this width, before anything is decoded.

    `tables` makes the cosines and sines ``[n, head_dim]`` of the first positions.

    Raises
    ------
    UserError
        When they cannot be made, are not as wide as a head, or are not finite.
    """
    try:
        made = tables()
    except Exception as err:  # settings of any kind, read by a library that trusts them
        what = " ".join(f"{type(err).__name__}: {err}".split())[:200]
        raise UserError(f"RoPE settings of a head that cannot be used ({what})") from None
    if any(t.shape[-1] != head_dim or not t.isfinite().all() for t in made):
        raise UserError(f"RoPE settings of a head that do not turn all of its {head_dim} values")
