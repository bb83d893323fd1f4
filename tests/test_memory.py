"""Memory: the store lets go of what it has read, and the benchmark of memory runs."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import answered

from draftlayers import states, store
from draftlayers.current import write_record
from draftlayers.project import PROJECT
from draftlayers.states import collect
from draftlayers.store import ArraySource


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    import memory

    return memory


def resident() -> int:
    """Bytes of mapped files that count as this process's memory."""
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith("RssFile")) * 1024


def test_rows_in_any_order_are_those_of_all_states(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "SHARD", 3)
    found = collect(tiny, answered(tiny, 8, 12), [0, 3, 8], tmp_path, top=5)
    everything = ArraySource(torch.stack([found.load(b) for b in (0, 3, 8)]), (0, 3, 8))
    ids, log_p = found.top_ids, found.top_logprobs
    n, generator = found.n, torch.Generator().manual_seed(0)
    straight = torch.arange(n)
    for mapped in (store.MAPPED, 0):
        monkeypatch.setattr(store, "MAPPED", mapped)
        for rows in (
            straight,
            straight[5:-3],
            straight.flip(0),
            torch.cat([straight[40:80], straight[2:30], straight[2:30]]),
            straight[::7].clone(),
            torch.randint(n, (50,), generator=generator),
            straight[n - 1 :],
            straight[:0],
        ):
            if len(rows):
                (expected,) = everything.blocks(rows, n)
                assert torch.equal(found.gather(rows).float(), expected)
                assert torch.equal(found.load(8, rows).float(), expected[2])
            assert found.gather(rows).shape == (3, len(rows), 64)
            some, others = found.distributions(rows)
            assert torch.equal(some, ids[rows]) and torch.equal(others, log_p[rows])


def test_what_was_read_is_let_go(benchmark, tmp_path, monkeypatch):
    benchmark.synthetic_store(tmp_path, 12_800, (0, 1, 2), 512)  # 39 MB
    found = store.StateStore(tmp_path)
    before, kept = resident(), found.load(1)[::100].clone()
    found.load(0)
    assert resident() - before > 20e6
    monkeypatch.setattr(store, "MAPPED", 4_000_000)
    for b in (0, 1, 2):
        for rows in torch.randperm(found.n, generator=torch.Generator().manual_seed(b)).split(500):
            found.load(b, rows)
            assert resident() - before < 20e6  # the limit, and what a shard adds before it is seen
    assert torch.equal(found.load(1)[::100], kept)


def test_what_the_benchmark_of_memory_says(benchmark, tmp_path):
    found = benchmark.growth((1000, 2000, 4000), [100.0, 110.0, 140.0])
    assert found["growth_mb_per_1000"] == [10, 15]
    assert found["mb_at"] == {"positions": 200_000, "extrapolated": True, "mb": 2753}
    assert found["within"]
    assert not benchmark.growth((1000, 2000, 4000), [100.0, 110.0, 200.0])["within"]
    for name, positions in (("select", 800), ("train", 4000)):
        benchmark.prepare(name, tmp_path / name, positions, large=False)
        benchmark.STAGES[name](tmp_path / name, positions, large=False)


@pytest.mark.slow  # each size is a process of its own
def test_the_benchmark_of_memory_runs(benchmark, tmp_path, monkeypatch):
    sizes = {"collect": (400, 800), "select": (800,), "train": (4000,)}
    monkeypatch.setattr(benchmark, "SIZES", sizes)
    to = tmp_path / "memory.json"
    write_record(to, {"large": False, "select": "as it was", "train": "as it was"})
    benchmark.main(str(to), large=False, stages=["collect"])
    record = json.loads(to.read_text())
    assert all(0 < peak < 4000 for peak in record["collect"]["peak_mb"])
    assert record["select"] == record["train"] == "as it was"
