"""Questions about the device that computes, and the processes that share its work.

Used by everything that computes with torch. It knows nothing of models.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist


def device_name() -> str:
    """The device that torch would compute on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux; platform's name is all there is
    return f"{name}, {torch.get_num_threads()} threads"


def dtype_name(dtype: torch.dtype) -> str:
    """What a kind of number is called, as messages and records have it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 products of its own (AVX512-BF16 or AMX)."""
    # Older releases of torch do not tell.
    tell: Callable[[], Mapping[str, bool]] = getattr(torch.cpu, "get_capabilities", dict)
    return any(tell().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def join_processes() -> tuple[int, int]:
    """This process's rank and the number of processes, joining them under ``torchrun``."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), world


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Wall time by phase; on CUDA by events, so that timing does not make the device wait."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """The time since the last mark was spent on `phase`."""
        self.marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and their total."""
        if self.cuda:
            torch.cuda.synchronize()
        spent = dict.fromkeys(("prefill", "draft", "verify", "accept"), 0.0)
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            spent[phase] += _elapsed(before, after)
        return {**spent, "total": sum(spent.values())}

    def _now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    """Seconds between two marks of one kind."""
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert not isinstance(before, float) and not isinstance(after, float)
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1000
