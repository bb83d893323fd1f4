"""Linear layers with weights that oneDNN has laid out once, for small batches on a CPU.

Used by chapter 01 (``writing``) and chapter 07, by the engine's passes and by the head's guesses:
wherever few rows meet large matrices. A product of few rows takes as long as its weights take to be
read, but an ordinary matrix product does not come near the speed of memory. Weights packed for
oneDNN's own kernels do. The module that owns the weights stays as it is; the packed copy doubles
their memory. Which passes to run with them is left to ``engine``, ``writing`` and ``drafting``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlayers.device import multiplies_bfloat16


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
        multiply = torch.ops.mkldnn._linear_pointwise
        out: Tensor = multiply(flat, self.weight, self.bias, "none", [], "")
        return out[:n].view(*x.shape[:-1], -1).to(x.dtype)


class PackedLinears:
    """Packed copies of all ``nn.Linear`` in a module, to be used in their place for a while."""

    def __init__(self, module: nn.Module, precision: torch.dtype | None = None):
        linears = [m for m in module.modules() if type(m) is nn.Linear]
        rows = fastest_rows(max((m.weight for m in linears), key=Tensor.numel), precision)
        self.packed: list[tuple[nn.Module, PackedLinear]] = [
            (linear, PackedLinear([linear], rows, precision)) for linear in linears
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the ``with`` block the module computes with the packed weights.

        Blocks may be nested, of other packed copies of the same module too: each leaves behind
        what it found.
        """
        with ExitStack() as restoring:
            for linear, packed in self.packed:
                before = vars(linear).get("forward")
                linear.forward = packed
                restoring.callback(_restore, linear, before)
            yield


def _restore(linear: nn.Module, forward: Callable[[Tensor], Tensor] | None) -> None:
    """Give a module back the ``forward`` of its own, or its class's where it had none."""
    if forward is None:
        del linear.forward
    else:
        linear.forward = forward


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


def can_pack(module: nn.Module) -> bool:
    """Whether a module's linear layers can be packed, and a second copy of it fits in memory."""
    weights = [m.weight for m in module.modules() if type(m) is nn.Linear]
    if not weights or not packs(max(weights, key=Tensor.numel)):
        return False
    needed = sum(p.numel() * p.element_size() for p in module.parameters())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    available = next((int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), None)
    return available is None or needed < 0.8 * 1024 * available
