"""How much memory collecting, selecting and training take, and how that grows with the data.

    python benchmarks/memory.py [--json -] [--large] [--stages collect ...]

Each measurement is the peak of resident memory (``VmHWM``, Linux) of a process of its own, less
that of a process that only imports. Pages of mapped files that the process has read count, although
the system may take them back. Three sizes of each give the growth from one to the next; the growth
from the smallest to the largest is drawn out to 200,000 positions where these are fewer, and
``within`` says whether what comes out stays below 4 GB. Small sizes could not tell a growth from
what the allocator keeps for later, so there it is told to keep nothing, and the constant part is a
little lower than in use. Even so ``select`` wavers by some 50 MB, which makes what is drawn out for
it a guess; ``--large`` measures it at 200,000 positions, and leaves the allocator as it is.

``collect``
    ``states.collect`` of all boundaries of a random model of 30 layers and width 64 (576 with
    ``--large``). What it holds at once is a shard of 32 conversations and a few numbers of every
    position, so the width of the states counts in what is there from the start, as the model does,
    not in the growth.
``select``
    Chapters 2 to 5 (``criterion.entropies``, ``sweep`` and ``choose``) on states of 30 layers and
    width 576, of random numbers, in a store as ``collect`` leaves it. Nearly all positions count
    in the statistics. The vocabulary is small: the logit lens reads a fixed number of positions.
``train``
    A head of three layers: linear start, updates and a validation, on a store of random states
    (width 64, and 576 with ``--large``).

With ``--large``, states of up to 200,000 positions are selected from with the parameters of the
profile ``full`` instead of ``quick``, which takes 8 GB in the folder for temporary files. A record
of the same sizes that is already in the file keeps its other stages.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _record import write
from safetensors.torch import save
from torch import Tensor

from draftlayers import criterion, filtering
from draftlayers.current import read_record, write_record
from draftlayers.device import device_name
from draftlayers.examples import TOP, TrainingData
from draftlayers.project import code_state, write_atomically
from draftlayers.prompts import Conversation
from draftlayers.runs import Run
from draftlayers.spec import RunSpec
from draftlayers.states import SHARD, collect
from draftlayers.store import INDEX, StateStore, shard_name
from draftlayers.targets import tiny_target
from draftlayers.training import TrainingSettings, train_head


class StageName(StrEnum):
    """What can be measured."""

    COLLECT = "collect"
    SELECT = "select"
    TRAIN = "train"


LAYERS, WIDTH, INPUTS = 30, 576, (2, 4, 6)
NARROW = 64  # width of the states of small sizes, where it counts for nothing
LENGTH = 200  # positions of a conversation
SHORT = 50  # of one of the few that are collected, so that the smallest size fills two shards
PROMPT = 8
# Blocks of 128 KB and more are given back to the system as soon as they are freed.
EXACT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
AT, LIMIT_MB = 200_000, 4000
SIZES = {
    "collect": (3_200, 4_800, 6_400),
    "select": (8_000, 10_000, 12_000),
    "train": (25_000, 50_000, 100_000),
}
LARGE = {
    "collect": (8_000, 16_000, 32_000),
    "select": (50_000, 100_000, 200_000),
    "train": (100_000, 200_000, 400_000),
}


def synthetic_store(
    folder: Path, positions: int, boundaries: tuple[int, ...], width: int, top: int = 0
) -> None:
    """States of random numbers, each boundary's near the one before, written as a store."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = tiny_target(n_layers=1).vocab_size
    conversations = positions // LENGTH
    shards = range(0, conversations, SHARD)
    for number, start in enumerate(shards):
        count = min(SHARD, conversations - start)
        n = count * LENGTH
        place = torch.arange(LENGTH, dtype=torch.int32).repeat(count)
        rows: dict[str, Tensor] = {
            "sequence": torch.arange(start, start + count).repeat_interleave(LENGTH).int(),
            "position": place,
            "token": torch.randint(vocabulary, (n,), generator=generator).int(),
            "answer": (place >= PROMPT - 1) & (place < LENGTH - 1),
            "duplicate": torch.zeros(n, dtype=torch.bool),
            "predictive_entropy": torch.rand(n, generator=generator),
        }
        state = torch.randn(n, width, generator=generator)
        for b in boundaries:
            state += 0.4 * torch.randn(n, width, generator=generator)
            rows[f"b{b}"], rows[f"norm{b}"] = state.bfloat16(), state.norm(dim=-1)
        if top:
            picks = torch.rand(n, vocabulary, generator=generator).topk(top)
            rows["top_ids"] = picks.indices.int()
            rows["top_logprobs"] = (8 * picks.values).log_softmax(-1).half()
        write_atomically(folder / shard_name(number, "all"), save(rows))
    passes = dict.fromkeys(map(str, boundaries), "all")
    write_record(folder / INDEX, {"passes": passes, "shards": len(shards), "d": width})


# --- What is measured: each runs in a process of its own -----------------------------------------


def nothing(folder: Path, positions: int, large: bool) -> None:
    """What has to be there before anything is read."""


def collecting(folder: Path, positions: int, large: bool) -> None:
    """All boundaries of a random model."""
    target = tiny_target(hidden_size=shape("collect", large)["width"], n_layers=LAYERS)
    length = LENGTH if large else SHORT
    ids = torch.randint(3, target.vocab_size, (positions // length, length)).tolist()
    conversations = [
        Conversation(str(i), "x", tuple(t[:PROMPT]), tuple(t[PROMPT:])) for i, t in enumerate(ids)
    ]
    collect(target, conversations, range(LAYERS + 1), folder)


def selecting(folder: Path, positions: int, large: bool) -> None:
    """Entropies, CKA at every share of the filter, the bootstrap and the search."""
    run = Run(RunSpec.make("tiny", "full" if large else "quick"), folder / "runs")
    target = tiny_target(hidden_size=WIDTH, n_layers=1)
    store = StateStore(folder)
    rows = filtering.eligible(store.meta, store.norms).rows
    _, samples = criterion.entropies(run, target, store, rows)
    found = criterion.sweep(run, store, rows, samples)
    criterion.choose(run, store, rows, samples, found.used)


def training(folder: Path, positions: int, large: bool) -> None:
    """A few updates after a linear start, and a validation."""
    target = tiny_target(hidden_size=shape("train", large)["width"])
    store = StateStore(folder)
    data = TrainingData.split(store, validation=16, draft_vocab=256)
    updates = 16 if large else 100
    settings = TrainingSettings(
        epochs=updates * 2048 / positions, batch_tokens=2048, learning_rate=1e-3, ttt_steps=3
    )
    train_head(data, INPUTS, target, settings, 0, folder / "head")


STAGES = {"collect": collecting, "select": selecting, "train": training}


def shape(name: str, large: bool) -> dict[str, int]:
    """Boundaries and width of the states of a stage."""
    return {
        "boundaries": len(INPUTS) + 1 if name == "train" else LAYERS + 1,
        "width": WIDTH if large or name == "select" else NARROW,
    }


def prepare(name: str, folder: Path, positions: int, large: bool) -> None:
    """The store that a stage reads, if it reads one."""
    width = shape(name, large)["width"]
    if name == "select":
        synthetic_store(folder, positions, tuple(range(LAYERS + 1)), width)
    elif name == "train":
        synthetic_store(folder, positions, (*INPUTS, 8), width, TOP)


def _report(work: Callable[..., None], pipe: Any, *args: Any) -> None:
    """Do it, and send the peak of this process's memory in MB."""
    torch.set_num_threads(1)
    work(*args)
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    pipe.send(int(status["VmHWM"].split()[0]) / 1024)


def peak(work: Callable[..., None], folder: Path, positions: int, large: bool) -> float:
    """Peak memory of a fresh process that does it, in MB.

    Raises
    ------
    SystemExit
        When the process fails.
    """
    context = multiprocessing.get_context("spawn")
    if not large:
        os.environ |= EXACT
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(work, there, folder, positions, large))
    child.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        raise SystemExit(f"measuring {work.__name__} failed") from None
    child.join()
    return found


def growth(sizes: tuple[int, ...], peaks: list[float]) -> dict[str, Any]:
    """MB for each 1,000 positions from one size to the next, and what that makes at ``AT``."""
    pairs = itertools.pairwise(zip(sizes, peaks, strict=True))
    slopes = [1000 * (more - less) / (n - m) for (m, less), (n, more) in pairs]
    slope = max(0.0, (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]))
    there = peaks[-1] + slope * max(0, AT - sizes[-1])
    return {
        "positions": list(sizes),
        "peak_mb": [round(p) for p in peaks],
        "growth_mb_per_1000": [round(s, 2) for s in slopes],
        "mb_at": {"positions": max(AT, sizes[-1]), "extrapolated": sizes[-1] < AT,
                  "mb": round(there)},
        "within": there < LIMIT_MB,
    }  # fmt: skip


def measure(
    sizes: dict[str, tuple[int, ...]], large: bool, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Stages at all their sizes; those of a record from before are kept."""
    kept = before if before and before.get("large") == large else {}
    record: dict[str, Any] = {"large": large, "limit_mb": LIMIT_MB}
    with tempfile.TemporaryDirectory() as folder:
        imports = peak(nothing, Path(folder), 0, large)
    record["imports_mb"] = round(imports)
    record |= {name: kept[name] for name in STAGES if name in kept}
    for name, positions in sizes.items():
        peaks, started = [], time.perf_counter()
        for n in positions:
            with tempfile.TemporaryDirectory() as folder:
                prepare(name, Path(folder), n, large)
                peaks.append(peak(STAGES[name], Path(folder), n, large) - imports)
            print(f"{name}, {n:,} positions: {peaks[-1]:,.0f} MB", file=sys.stderr, flush=True)
        seconds = round(time.perf_counter() - started, 1)
        record[name] = {
            **shape(name, large),
            **growth(positions, peaks),
            "seconds": seconds,
            "device": device_name(),
            **code_state(),
        }
    return record


def main(
    to: Annotated[str, typer.Option("--json", help="File for the record, - to print it.")] = "-",
    large: Annotated[
        bool, typer.Option("--large", help="The full sizes: most of an hour.")
    ] = False,
    stages: Annotated[list[StageName] | None, typer.Option(help="Only these; default all.")] = None,
) -> None:
    """Measure peak memory at growing sizes."""
    torch.set_num_threads(1)
    sizes = LARGE if large else SIZES
    wanted = {name: sizes[name] for name in STAGES if not stages or name in stages}
    before = read_record(Path(to)) if to != "-" else None
    write(measure(wanted, large, before), to)


if __name__ == "__main__":
    typer.run(main)
