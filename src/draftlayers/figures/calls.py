"""A drawing as a file: which function of which module, and its arguments, read back as they were.

Used by ``drawing`` alone. A file is one ``safetensors``: arrays are tensors, everything else is
JSON in the metadata. Nothing is pickled, so reading a file runs no code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from draftlayers.current import digest
from draftlayers.project import UserError

# Modules of drawings, one a chapter; ``draw`` takes functions of these.
MODULES = (
    "hidden_states",
    "entropy",
    "filtering",
    "cka",
    "selection",
    "draft_head",
    "speedup",
)
PACKAGE = "draftlayers.figures"
STORED = "biuf"  # kinds of arrays: booleans, integers, floats
WIDEST = 8  # bytes of a number


class LostCall(UserError):
    """A saved call that cannot be made any more: only its chapter can draw the figure again."""


@dataclass(frozen=True)
class Call:
    """A call of a drawing function.

    Attributes
    ----------
    module, function
        Names of a module of figures and of a function in it.
    arguments
        Value of each argument by its name, in JSON's terms; see ``_encode``.
    arrays
        The arrays that the arguments refer to.
    """

    module: str
    function: str
    arguments: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """The call ``function(*args, **kwargs)``, not made yet.

        Raises
        ------
        TypeError
            When the function is none of a chapter's, or an argument cannot be saved.
        """
        module = getattr(function, "__module__", "").removeprefix(f"{PACKAGE}.")
        name = getattr(function, "__name__", repr(function))
        if _function(module, name) is not function:
            raise TypeError(f"{name} is no function of a chapter's module of {PACKAGE}")
        arrays: dict[str, np.ndarray] = {}
        named = inspect.signature(function).bind(*args, **kwargs).arguments
        arguments = {each: _encode(value, each, arrays) for each, value in named.items()}
        return cls(module, name, arguments, arrays)

    @classmethod
    def read(cls, data: bytes) -> tuple[Call, dict[str, Any]]:
        """A call and the record that was packed with it.

        Raises
        ------
        LostCall
            When the file is damaged, or the module is none of these any more.
        """
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            told = json.loads(header["__metadata__"]["figure"])
            call = cls(told["module"], told["function"], told["arguments"], load(data))
            record = dict(told["record"])
        except (SafetensorError, ValueError, KeyError, TypeError) as err:
            raise LostCall(f"its saved call cannot be read ({err})") from err
        if call.module not in MODULES:
            raise LostCall(f"{PACKAGE} has no module {call.module} any more")
        return call, record

    def packed(self, record: Mapping[str, Any]) -> bytes:
        """The file of this call, with a record about what was made of it."""
        told = {
            "module": self.module,
            "function": self.function,
            "arguments": self.arguments,
            "record": record,
        }
        # One entry: the order of several would change from one process to the next.
        return save(dict(self.arrays), {"figure": json.dumps(told)})

    def digest(self) -> str:
        """Changes with the function's name and with every argument."""
        arrays = {
            name: [array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
            for name, array in self.arrays.items()
        }
        return digest(self.module, self.function, self.arguments, arrays)

    def bound(self) -> Callable[[], Any]:
        """The function with its arguments, ready to be called.

        Raises
        ------
        LostCall
            When there is no such function any more, or it takes other arguments now.
        """
        function = _function(self.module, self.function)
        if function is None:
            raise LostCall(f"{PACKAGE}.{self.module} has no function {self.function} any more")
        arguments = {name: _decode(value, self.arrays) for name, value in self.arguments.items()}
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as err:
            raise LostCall(f"{PACKAGE}.{self.module}.{self.function} was changed: {err}") from None
        return functools.partial(function, **arguments)


def _function(module: str, name: str) -> Callable[..., Any] | None:
    """A function that a chapter's module of figures defines itself."""
    if module not in MODULES:
        return None
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
    own = isinstance(found, FunctionType) and found.__module__ == f"{PACKAGE}.{module}"
    return found if own else None


# --- Values --------------------------------------------------------------------------------------


def _encode(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """A value in JSON's terms; arrays go into ``arrays`` under the name ``where``.

    None, numbers, strings and lists are themselves. Everything else is an object with one entry
    that says what it is, so an object of JSON is never a plain dictionary.
    """
    if isinstance(value, str) or value is None:
        return value
    if hasattr(value, "detach"):  # a tensor of torch, which need not be loaded to know one
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        array = np.asarray(value, order="C")
        if array.dtype.kind in STORED and array.dtype.itemsize <= WIDEST:
            arrays[where] = array.astype(array.dtype.newbyteorder("<"))
            return {kind: where}
        what = f"an array of {array.dtype}"
    elif isinstance(value, bool | int | float):
        return value
    elif isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    elif isinstance(value, list | tuple):
        items = [_encode(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    elif isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            # A key may be an array's name or stand for one, so it has a place of its own.
            at = f"{where}[{key!r}]"
            pairs.append([_encode(key, f"{at} (key)", arrays), _encode(item, at, arrays)])
        return {"dict": pairs}
    else:
        what = f"a {type(value).__name__}"
    raise TypeError(
        f"argument {where} is {what}, which cannot be saved; a figure takes arrays, numbers, "
        "strings, None, and lists, tuples and dictionaries of these"
    )


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that ``_encode`` was given; a tensor of torch comes back as an array."""
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "array":
        return arrays[held]
    if kind == "scalar":
        return arrays[held][()]
    if kind == "range":
        return range(*held)
    if kind == "tuple":
        return tuple(_decode(item, arrays) for item in held)
    return {_decode(key, arrays): _decode(item, arrays) for key, item in held}
