"""Exhaustive search over sets of layers: time and memory.

    python benchmarks/selection.py [--json -] [--layers 80 -k 4]

Scores every set of k of the candidates 1..N-1 in this process and reports seconds and the peak
memory of the whole process, imports included. ``--layers 81`` gives exactly C(80, k) sets.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time

import numpy as np
from _record import write

from draftlayers import selection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", default="-", help="file for the record; - prints it")
    parser.add_argument("--layers", type=int, default=81)
    parser.add_argument("-k", type=int, default=4)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    walk = rng.normal(size=(args.layers + 1, 64)).cumsum(0)
    walk /= np.linalg.norm(walk, axis=1, keepdims=True)
    entropy, cka = rng.uniform(0.1, 1, args.layers + 1), (walk @ walk.T) ** 2
    seconds = {}
    for name, call in {
        "exhaustive": lambda: selection.exhaustive(entropy, cka, args.k),
        "beam": lambda: selection.beam(entropy, cka, args.k),
        "greedy_product": lambda: selection.greedy_product(entropy, cka, args.k),
        "log_det": lambda: selection.log_det(entropy, cka, args.k),
        "rank_of_default": lambda: selection.rank_of(
            selection.default_rule(args.layers), entropy, cka
        ),
    }.items():
        times = []
        for _ in range(3):
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
        seconds[name] = statistics.median(times)
    best = selection.exhaustive(entropy, cka, args.k).score
    record = {
        "sets": math.comb(args.layers - 1, args.k),
        "exhaustive_s": seconds["exhaustive"],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": seconds,
        "of_the_best": {
            "beam": selection.beam(entropy, cka, args.k).score / best,
            "greedy_product": selection.greedy_product(entropy, cka, args.k).score / best,
            "log_det": selection.log_det(entropy, cka, args.k).score / best,
        },
        "layers": args.layers,
        "k": args.k,
    }
    write(record, args.json)


if __name__ == "__main__":
    main()
