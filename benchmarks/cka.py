"""CKA of all pairs of layers: this package against the kernels of others.

One run, the same data in the same blocks on the same machine; every contender in a process of its
own, so that its peak memory is its own. Contenders:

- ``ours``: ``draftlayers.cka_pass``, with the plan that the package itself chooses;
- ``pytorch-cka`` (1.1.3): one Gram matrix for each layer and batch, HSIC_1 by einsum;
- ``torch-cka`` (0.21): HSIC_1 pair by pair, a full n x n product for each trace;
- ``anatome``: feature-side debiased CKA pair by pair, all states in memory.

The kernels of the three are restated here from their published sources, without the parts that
hook into models; where ``pytorch-cka`` is installed its own function is called. The two that would
need hours are timed on a few batches or pairs and scaled up, and marked so. Errors are against
a float64 computation over all pairs of rows.

    python benchmarks/cka.py [--json -] [--rows 50000 --layers 30 --width 576]
    python benchmarks/cka.py --states runs/smollm2-135m/full/states/<name>
    python benchmarks/cka.py --scale

With ``--states`` the data are a run's collected states, the eligible positions of all boundaries
but the last, shuffled; without, synthetic ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _record import write
from torch import Tensor

SEED = 0
BATCH = 512  # rows in a batch of the minibatch peers, as in their examples
CHUNK = 512
PEERS = ("pytorch-cka", "torch-cka", "anatome")


class Data:
    """States ``[layers, rows, width]`` in bfloat16 on disk, like a store of collected states.

    A residual stream in miniature: a decaying spectrum, each layer adds a rotated nonlinear
    function of the stream and some noise, so that neighbours are alike, distant layers are not,
    and norms grow. CKA spans about the range of real states without sinks; the strongest
    directions hold more of it here than there, which makes these data somewhat easier for a method
    that treats those directions exactly.
    """

    def __init__(
        self, folder: Path, layers: int, rows: int, width: int, states: Tensor | None = None
    ):
        self.layers, self.rows, self.width = layers, rows, width
        self.path = folder / f"{layers}-{rows}-{width}.bf16"
        if states is not None:
            with open(self.path, "wb") as f:
                for block in states.split(CHUNK, 1):
                    f.write(block.contiguous().view(torch.int16).numpy().tobytes())
        elif not self.path.exists():
            self._generate()

    def _generate(self) -> None:
        generator = torch.Generator().manual_seed(SEED)

        def rotation() -> Tensor:
            return torch.linalg.qr(torch.randn(self.width, self.width, generator=generator))[0]

        spectrum = torch.arange(1, self.width + 1) ** -1.0
        first = rotation()
        turns = [(rotation(), rotation()) for _ in range(self.layers - 1)]
        with open(self.path, "wb") as f:  # [block][layer][row][width]
            for start in range(0, self.rows, CHUNK):
                rows = min(CHUNK, self.rows - start)
                x = (torch.randn(rows, self.width, generator=generator) * spectrum) @ first
                block = [x]
                for turn, fresh in turns:
                    noise = torch.randn(rows, self.width, generator=generator) * spectrum
                    size = x.std()
                    change = torch.tanh(x @ turn / size) + 0.5 / noise.std() * noise @ fresh
                    x = x + size * change
                    block.append(x)
                f.write(torch.stack(block).bfloat16().view(torch.int16).numpy().tobytes())

    def blocks(self, size: int, layers: slice = slice(None)) -> Iterator[Tensor]:
        """Float32 blocks ``[layers, <= size, width]``; ``size`` divides or is a multiple of CHUNK.

        The order on disk is a shuffled one: synthetic rows are independent.
        """
        waiting: list[Tensor] = []
        with open(self.path, "rb") as f:
            for start in range(0, self.rows, CHUNK):
                rows = min(CHUNK, self.rows - start)
                raw = np.fromfile(f, np.int16, self.layers * rows * self.width)
                block = torch.from_numpy(raw).view(torch.bfloat16)
                waiting.append(block.view(self.layers, rows, self.width)[layers])
                if sum(b.shape[1] for b in waiting) >= size or start + rows == self.rows:
                    whole = torch.cat(waiting, 1) if len(waiting) > 1 else waiting[0]
                    waiting.clear()
                    for part in whole.split(size, 1):
                        yield part.float()


class Clock:
    """Time spent outside the reading of blocks and the loading of packages."""

    def __init__(self) -> None:
        self.loading, self._started = 0.0, time.perf_counter()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.loading += time.perf_counter() - before

    def reading(self, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            with self.stopped():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def seconds(self) -> float:
        return time.perf_counter() - self._started - self.loading


def ours(data: Data, clock: Clock) -> tuple[np.ndarray, float]:
    with clock.stopped():
        # Here, so that the others' memory does not hold it.
        from draftlayers.cka_pass import choose_plan
        from draftlayers.cka_sums import Basis, CKASums

    class Source:
        boundaries, d = tuple(range(data.layers)), data.width

        def blocks(self, rows, size, boundaries=None):  # only the first rows, for the basis
            wanted = self.boundaries if boundaries is None else boundaries
            yield first[list(wanted), : min(size, len(rows))].float()

    parts = 16
    plan = choose_plan(data.rows, data.layers, data.width, cells=parts)
    print(plan, file=sys.stderr)
    first = next(clock.reading(data.blocks(CHUNK)))[:, :512].bfloat16()
    basis = Basis.fit(Source(), torch.arange(512), plan.rank, Source.boundaries)
    first = None  # its memory is needed no more
    sums = CKASums(basis, Source.boundaries, parts=parts, block=plan.block)
    start = 0
    for block in clock.reading(data.blocks(CHUNK)):
        rows = torch.arange(start, start + block.shape[1])
        sums.update(block, rows * parts // data.rows)
        start += block.shape[1]
    return sums.compute().matrix.numpy(), 1.0


def hsic_of_grams(grams: Tensor) -> Tensor:
    """pytorch-cka 1.1.3, ``cka/hsic.py``: HSIC_1 of all pairs of stacked Gram matrices."""
    n = grams.shape[1]
    diagonal = torch.diagonal(grams, dim1=-2, dim2=-1)
    trace = torch.einsum("aij,bij->ab", grams, grams)
    trace = trace - torch.einsum("ai,bi->ab", diagonal, diagonal)
    total = grams.sum(dim=(-2, -1)) - diagonal.sum(-1)
    columns = grams.sum(-2) - diagonal
    main = trace + torch.outer(total, total) / ((n - 1) * (n - 2))
    return (main - 2 * torch.mm(columns, columns.T) / (n - 2)) / (n * (n - 3))


def pytorch_cka(data: Data, clock: Clock) -> tuple[np.ndarray, float]:
    """Its ``CKA._accumulate_hsic`` and ``_compute_cka_matrix``; every batch weighs the same."""
    kernel = hsic_of_grams
    with clock.stopped(), contextlib.suppress(ImportError):
        from cka.hsic import hsic_cross

        def kernel(grams: Tensor) -> Tensor:
            return hsic_cross(grams, grams)

    hsic = torch.zeros(data.layers, data.layers)
    for block in clock.reading(data.blocks(BATCH)):
        if block.shape[1] > 3:
            hsic += kernel(torch.stack([torch.mm(x, x.T) for x in block]))
    scale = hsic.diagonal().sqrt()
    return (hsic / torch.outer(scale, scale)).clamp(0, 1).numpy(), 1.0


def torch_cka(data: Data, clock: Clock) -> tuple[None, float]:
    """Its ``CKA.compare``: Gram matrices and traces again for each pair; one batch is timed."""

    def hsic(k: Tensor, other: Tensor) -> float:
        n = len(k)
        ones = torch.ones(n, 1)
        result = torch.trace(k @ other)
        result += ((ones.t() @ k @ ones @ ones.t() @ other @ ones) / ((n - 1) * (n - 2))).item()
        result -= ((ones.t() @ k @ other @ ones) * 2 / (n - 2)).item()
        return (1 / (n * (n - 3)) * result).item()

    block = next(clock.reading(data.blocks(BATCH)))
    layers = 4  # of ``layers`` rows of the matrix; each row costs the same
    for x in block[:layers]:
        k = x @ x.t()
        k.fill_diagonal_(0.0)
        hsic(k, k)
        for y in block:
            other = y @ y.t()
            other.fill_diagonal_(0)
            hsic(k, other)
            hsic(other, other)
    return None, data.layers / layers * data.rows / BATCH


def anatome(data: Data, clock: Clock) -> tuple[None, float]:
    """Its ``linear_cka_distance(reduce_bias=True)`` on a few pairs, all states in memory."""
    pairs = 6
    blocks = clock.reading(data.blocks(CHUNK))
    states = torch.cat([b.bfloat16() for b in blocks], 1)
    n = data.rows

    def debiased(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return z - n / (n - 2) * (a @ b) + a.sum() * b.sum() / ((n - 1) * (n - 2))

    for i in range(pairs):
        with clock.stopped():
            x, y = states[i].float(), states[i + 1].float()
        x, y = x - x.mean(0), y - y.mean(0)
        a, b = torch.einsum("ij,ij->i", x, x), torch.einsum("ij,ij->i", y, y)
        cross = debiased((y.t() @ x).norm("fro").pow(2), a, b)
        own = debiased((x.t() @ x).norm("fro").pow(2), a, a)
        other = debiased((y.t() @ y).norm("fro").pow(2), b, b)
        _ = cross / (own * other).sqrt()
    return None, data.layers * (data.layers + 1) / 2 / pairs


def reference(data: Data, clock: Clock) -> tuple[np.ndarray, float]:
    """Float64, all directions and all pairs of rows, by the formula of Kornblith et al."""
    layers, n, d = data.layers, data.rows, data.width
    mean = torch.zeros(layers, d, dtype=torch.float64)
    for block in clock.reading(data.blocks(CHUNK)):
        mean += block.double().sum(1) / n
    cross = torch.zeros(layers, d, layers * d, dtype=torch.float64)
    products, norms = torch.zeros(layers, layers).double(), torch.zeros(layers).double()
    for block in clock.reading(data.blocks(CHUNK)):
        x = block.double() - mean[:, None]
        wide = x.transpose(0, 1).reshape(-1, layers * d)
        for i in range(layers):
            cross[i, :, i * d :].addmm_(x[i].T, wide[:, i * d :])
        k = x.square().sum(2)
        products += k @ k.T
        norms += k.sum(1)
    hsic = torch.zeros(layers, layers).double()
    for i in range(layers):
        hsic[i] = cross[i].square().view(d, layers, d).sum((0, 2))
    hsic = hsic.triu() + hsic.triu(1).T
    hsic += torch.outer(norms, norms) / ((n - 1) * (n - 2)) - n / (n - 2) * products
    scale = hsic.diagonal().sqrt()
    return (hsic / torch.outer(scale, scale)).numpy(), 1.0


CONTENDERS = {
    "ours": ours,
    "pytorch-cka": pytorch_cka,
    "torch-cka": torch_cka,
    "anatome": anatome,
    "reference": reference,
}


def peak_mb() -> float:
    """Peak memory of this program; ``ru_maxrss`` would count the one that started it, too."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_one(name: str, data: Data, out: Path) -> None:
    """Body of a contender's process."""
    clock = Clock()
    with torch.inference_mode():
        matrix, factor = CONTENDERS[name](data, clock)
    record = {
        "seconds": clock.seconds() * factor,
        "load_seconds": clock.loading,
        "peak_mb": peak_mb(),
        "extrapolated": factor > 1,
    }
    if matrix is not None:
        record["matrix"] = np.asarray(matrix, np.float64).tolist()
    out.write_text(json.dumps(record))


def collected(folder: Path) -> Tensor:
    """Real states ``[layers, rows, width]``: what a run's statistics see of a store, shuffled."""
    from draftlayers import filtering
    from draftlayers.store import StateStore

    store = StateStore(folder)
    rows = filtering.eligible(store.meta, store.norms).rows
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]
    return store.gather(rows, store.boundaries[:-1])


def contest(layers: int, rows: int, width: int, folder: Path, states: Tensor | None = None) -> dict:
    if states is not None:
        layers, rows, width = states.shape
    Data(folder, layers, rows, width, states)
    del states
    records = {}
    for name in CONTENDERS:
        out = folder / f"{name}.json"
        options = {"one": name, "folder": folder, "out": out, "rows": rows, "layers": layers,
                   "width": width}  # fmt: skip
        command = [sys.executable, __file__]
        command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        print(f"{name} ...", file=sys.stderr, flush=True)
        subprocess.run(command, check=True)
        records[name] = json.loads(out.read_text())
    truth = np.array(records["reference"].pop("matrix"))
    for record in records.values():
        if "matrix" in record:
            record["max_err"] = float(np.abs(np.array(record.pop("matrix")) - truth).max())
    peers = {name: records[name] for name in PEERS}
    best = min(peers, key=lambda name: peers[name]["seconds"])
    return {
        "ours_s": records["ours"]["seconds"],
        "best_peer": best,
        "best_peer_s": peers[best]["seconds"],
        "ratio": peers[best]["seconds"] / records["ours"]["seconds"],
        "ours_peak_mb": records["ours"]["peak_mb"],
        "ours_max_err": records["ours"]["max_err"],
        "best_peer_max_err": peers[best].get("max_err"),
        "layers": layers,
        "rows": rows,
        "width": width,
        "contenders": records,
    }


def scale() -> dict:
    """Growth in layers, rows and width, the plan for a 70B model, and one slice of it."""
    from draftlayers.cka_pass import PARTS, Plan, choose_plan
    from draftlayers.cka_sums import BLOCK, Basis, CKASums
    from draftlayers.store import ArraySource

    def timed(layers: int, rows: int, width: int, how: Plan | None = None) -> float:
        generator = torch.Generator().manual_seed(SEED)
        how = how or fixed(rows, layers, width)
        block = torch.randn(layers, how.block, width, generator=generator)
        block *= torch.arange(1, width + 1) ** -0.7
        source = ArraySource(block)
        basis = Basis.fit(source, torch.arange(how.block), how.rank, range(layers))
        sums = CKASums(basis, range(layers), parts=PARTS, block=how.block)
        part = torch.zeros(how.block, dtype=torch.long)
        before = time.perf_counter()
        for start in range(0, rows, how.block):
            sums.update(block, part + (start // how.block) % PARTS)
        sums.compute()
        return time.perf_counter() - before

    def fixed(rows: int, layers: int, width: int) -> Plan:
        return replace(choose_plan(rows, layers, width, flop_limit=0), rank=32, block=BLOCK)

    growth = []
    for layers, rows, width in (
        (10, 4096, 576), (20, 4096, 576), (40, 4096, 576),
        (20, 2048, 576), (20, 8192, 576), (20, 4096, 288), (20, 4096, 1152),
    ):  # fmt: skip
        seconds = timed(layers, rows, width)
        growth.append({"layers": layers, "rows": rows, "width": width, "seconds": seconds})
        print(f"{layers} layers, {rows:,} rows, width {width}: {seconds:.2f} s", file=sys.stderr)
    large = choose_plan(100_000, 80, 8192)
    print(large, file=sys.stderr)
    rows = 8 * large.block
    before = peak_mb()
    seconds = timed(80, rows, 8192, large)
    peak = peak_mb()
    print(f"a slice of {rows} rows of it: {seconds:.1f} s, peak {peak:,.0f} MB in all",
          file=sys.stderr)  # fmt: skip
    return {
        "growth": growth,
        "large": {"layers": 80, "rows": 100_000, "width": 8192, "flops": large.flops,
                  "formula_peak_mb": large.peak_bytes / 1e6,
                  "extrapolated_s": seconds * 100_000 / rows},
        "slice": {"rows": rows, "seconds": seconds, "peak_mb": peak, "peak_before_mb": before},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", default="-", help="file for the record; - prints it")
    parser.add_argument("--states", type=Path, help="folder of a run's collected states")
    parser.add_argument("--scale", action="store_true", help="measure growth and extrapolate")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if args.one:
        run_one(args.one, Data(args.folder, args.layers, args.rows, args.width), args.out)
        return
    if args.scale:
        record = scale()
    else:
        with tempfile.TemporaryDirectory(prefix="draftlayers-cka-") as folder:
            states = collected(args.states) if args.states else None
            record = contest(args.layers, args.rows, args.width, Path(folder), states)
            record["data"] = f"states {args.states.name}" if args.states else "synthetic"
    write(record, args.json)


if __name__ == "__main__":
    main()
