"""Debiased CKA against brute force, and what must not change it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch

from draftlayers import cka_sums
from draftlayers.cka_pass import PARTS, Plan, accumulate, choose_plan, deal_parts
from draftlayers.cka_sums import CKA, Basis, CKASums
from draftlayers.store import ArraySource

LAYERS, ROWS, WIDTH = 5, 480, 40
RANK = 10


def states(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    """Like a residual stream: a decaying spectrum, layers that add, norms that grow."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        z = torch.randn(rows, width, generator=generator) * torch.arange(1, width + 1) ** -0.5
        return z @ torch.linalg.qr(torch.randn(width, width, generator=generator))[0]

    x, found = noise(), []
    for b in range(LAYERS):
        found.append((2.0**b) * (x + 1))
        x = x + noise()
    return torch.stack(found)


SEQUENCE = torch.arange(ROWS) // 12


def split(rows: int = ROWS, width: int = WIDTH, rank: int = RANK) -> Plan:
    return replace(choose_plan(rows, LAYERS, width), rank=rank, block=64)


def compute(x: torch.Tensor, how: Plan | None = None, **options) -> CKA:
    rows = torch.arange(x.shape[1])
    return accumulate(ArraySource(x), rows, rows // 12, how=how, **options).compute()


def test_golden_values_of_kornblith():
    np.random.seed(1337)
    x = np.random.randn(100, 10)
    found = compute(torch.tensor(np.stack([x, np.random.randn(100, 10) + x])))
    assert float(found.matrix[0, 1]) == pytest.approx(0.51346, abs=5e-6)
    assert float(found.biased[0, 1]) == pytest.approx(0.55761, abs=5e-6)


@pytest.mark.parametrize("rows", [5, 30, 480])
def test_exact_equals_brute_force(rows):
    x = states(rows=rows)  # with d > n, too
    found = compute(x)
    assert (found.exact_share == 1).all()
    assert found.matrix.numpy() == pytest.approx(reference.cka_debiased(x.numpy()), abs=1e-5)
    assert found.biased.numpy() == pytest.approx(reference.cka_biased(x.numpy()), abs=2e-6)


def test_one_block_of_the_split_equals_brute_force():
    # With a single block nothing is sampled, whatever the basis.
    x = states(rows=200)
    found = compute(x, replace(split(200), block=200))
    assert (found.exact_share < 1).all()
    assert found.matrix.numpy() == pytest.approx(reference.cka_debiased(x.numpy()), abs=2e-6)


def test_split_is_unbiased_and_close():
    x = states()
    expected = reference.cka_debiased(x.numpy())
    found = np.stack([compute(x, split(), seed=s).matrix.numpy() for s in range(30)])
    spread = found.std(0)
    assert spread.max() < 0.01
    bound = 4 * spread / 30**0.5 + 1e-6
    assert (np.abs(found.mean(0) - expected) < bound).all()
    plain = np.stack([compute(x, split(rank=1), seed=s).matrix.numpy() for s in range(30)])
    assert spread.mean() < 0.6 * plain.std(0).mean()  # the exact directions pay


def test_unrelated_layers_are_at_zero():
    values = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 32, 64, generator=generator)
        found = compute(x, replace(split(32, 64), layers=2))
        values.append(float(found.matrix[0, 1]))
        assert float(found.biased[0, 1]) > 0.5  # d / (n + d)
    assert min(values) < 0  # not clamped
    assert abs(np.mean(values)) < 3 * np.std(values) / 20**0.5


@pytest.mark.parametrize("how", [None, split()])
def test_rotation_scale_and_shift_do_not_matter(how):
    x = states()
    generator = torch.Generator().manual_seed(9)
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    moved = x.clone()
    moved[1] = 300 * (x[1] @ rotation) - 7
    tolerance = 5e-6 if how is None else 1e-2  # another basis leaves another rest to the blocks
    assert compute(moved, how).matrix.numpy() == pytest.approx(
        compute(x, how).matrix.numpy(), abs=tolerance
    )
    alike = torch.stack([x[0], 0.003 * (x[0] @ rotation) + 5, *x[2:]])
    assert float(compute(alike, how).matrix[0, 1]) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("how", [None, split()])
def test_order_of_layers_permutes_the_matrix(how):
    x, order = states(), [3, 0, 4, 1, 2]
    whole, permuted = compute(x, how), compute(x[order], how)
    assert torch.equal(whole.matrix, whole.matrix.T)
    tolerance = 2e-6 if how is None else 2e-3
    expected = whole.matrix[order][:, order].numpy()
    assert permuted.matrix.numpy() == pytest.approx(expected, abs=tolerance)


def sums(x: torch.Tensor, basis: Basis, cut: list[int], order=None) -> CKASums:
    found = CKASums(basis, range(LAYERS), parts=4)
    order = torch.arange(x.shape[1]) if order is None else order
    for rows in order.split(cut):
        found.update(x[:, rows], SEQUENCE[rows] % 4)
    return found


def test_exact_sums_do_not_depend_on_chunks_order_or_merging():
    x = states()
    basis = Basis.fit(ArraySource(x), torch.arange(ROWS), WIDTH, range(LAYERS))
    whole = sums(x, basis, [480]).compute()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    others = [
        sums(x, basis, [1] * 80 + [400]),
        sums(x, basis, [100, 3, 377], order),
        sums(x[:, :123], basis, [123]).merge(
            sums(x, basis, [357], torch.arange(123, ROWS))
        ),
    ]  # fmt: skip
    for other in others:
        found = other.compute()
        assert found.matrix.numpy() == pytest.approx(whole.matrix.numpy(), abs=1e-6)
        assert found.se.numpy() == pytest.approx(whole.se.numpy(), abs=1e-6)
        assert found.biased.numpy() == pytest.approx(whole.biased.numpy(), abs=1e-6)


def test_split_sums_merge_exactly():
    x = states()
    basis = Basis.fit(ArraySource(x), torch.arange(ROWS), RANK, range(LAYERS))
    whole = sums(x, basis, [256, 224]).compute()
    parts = [sums(x, basis, [n], rows) for n, rows in ((256, torch.arange(256)),
                                                       (224, torch.arange(256, ROWS)))]  # fmt: skip
    merged = parts[1].merge(parts[0]).compute()
    assert merged.matrix.numpy() == pytest.approx(whole.matrix.numpy(), abs=1e-6)


def test_sums_of_another_basis_do_not_merge():
    x = states()
    one, two = (
        CKASums(Basis.fit(ArraySource(y), torch.arange(ROWS), WIDTH, range(5)), range(5))
        for y in (x, 2 * x)
    )
    with pytest.raises(ValueError, match="same basis"):
        one.merge(two)


RANKS = """
import sys, torch, torch.distributed as dist
from draftlayers.cka_sums import Basis
from draftlayers.store import ArraySource
import test_cka_sums as t
rank, port = int(sys.argv[1]), sys.argv[2]
where = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
x = t.states()
basis = [None]
if rank == 0:
    basis = [Basis.fit(ArraySource(x), torch.arange(100), t.RANK, range(5))]
dist.broadcast_object_list(basis, src=0)
mine = t.sums(x, basis[0], [240], torch.arange(rank * 240, rank * 240 + 240))
every = [None, None]
dist.all_gather_object(every, mine)
both = every[0].merge(every[1]).compute().matrix
whole = t.sums(x, basis[0], [240, 240]).compute().matrix
assert (both - whole).abs().max() < 1e-6
"""


def test_two_ranks_get_the_result_of_one(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = f"import sys; sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})\n"
    workers = [
        subprocess.Popen([sys.executable, "-c", path + RANKS, str(rank), str(port)])
        for rank in range(2)
    ]
    assert [w.wait(120) for w in workers] == [0, 0]


def test_levels_are_the_prefixes():
    x, shares = states(), (0.25, 0.5, 1.0)
    rows = torch.arange(ROWS)
    exact = accumulate(ArraySource(x), rows, SEQUENCE, shares=shares)
    close = accumulate(ArraySource(x), rows, SEQUENCE, shares=shares, how=split())
    for level, q in enumerate(shares):
        part = x[:, : round(q * ROWS)].numpy()
        found = exact.compute(level)
        assert found.n == part.shape[1]
        assert found.matrix.numpy() == pytest.approx(reference.cka_debiased(part), abs=3e-6)
        assert found.biased.numpy() == pytest.approx(reference.cka_biased(part), abs=3e-6)
        near = close.compute(level).matrix.numpy()
        assert near == pytest.approx(reference.cka_debiased(part), abs=0.1)


def test_standard_error_is_that_of_fresh_sequences():
    rng = torch.Generator().manual_seed(5)
    mix = torch.randn(2, 8, 20, generator=rng)

    def sample(seed: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        shared = torch.randn(40, 1, 8, generator=g)  # rows of a sequence resemble each other
        z = (shared + torch.randn(40, 12, 8, generator=g)).reshape(480, 8)
        own = torch.randn(2, 480, 20, generator=g)
        return torch.stack([z @ mix[0], (z * torch.arange(1, 9)) @ mix[1]]) + own

    def one(seed: int) -> tuple[float, float]:
        x = sample(seed)
        found = accumulate(ArraySource(x), torch.arange(480), SEQUENCE).compute()
        return float(found.matrix[0, 1]), float(found.se[0, 1])

    values, errors = np.array([one(seed) for seed in range(40)]).T
    assert 0.7 < errors.mean() / values.std(ddof=1) < 1.5


def test_bootstrap_of_the_estimator_agrees_with_the_jackknife():
    x = states()
    found = accumulate(ArraySource(x), torch.arange(ROWS), SEQUENCE, parts=32)
    weights = found.bootstrap_weights(400, seed=0)
    assert (weights.sum(1) == 32).all()
    matrices = found.replicates(weights)[0]
    se = found.compute().se
    off = ~torch.eye(LAYERS, dtype=torch.bool)
    assert (matrices.std(0)[off] / se[off]).log().abs().max() < 0.4
    once = found.replicates(torch.ones(1, 32))
    assert torch.equal(once[0][0], found.compute().matrix)
    assert torch.equal(once[1][0], found.compute().overlap)
    # A sequence that is drawn twice must not look like structure.
    noise = torch.randn(2, 240, 60, generator=torch.Generator().manual_seed(2))
    found = accumulate(ArraySource(noise), torch.arange(240), torch.arange(240) // 12)
    twice = found.replicates(2 * torch.ones(1, PARTS))[0][0]
    assert abs(float(twice[0, 1])) < 0.05


def test_overlap_holds_the_purities():
    x = states(rows=4000)
    found = compute(x)
    for i in range(LAYERS):
        purity = np.square(reference.trace_normalised(x[i].numpy())).sum()
        debiased = purity - 1 / 4000  # of plug-in estimates, to first order
        assert float(found.overlap[i, i]) == pytest.approx(debiased, rel=0.01)


def test_copies_of_rows_inflate_even_debiased_cka():
    # Why duplicates never enter: 64 unrelated rows, eight times over.
    x = torch.randn(2, 64, 100, generator=torch.Generator().manual_seed(0)).repeat(1, 8, 1)
    assert float(compute(x).matrix[0, 1]) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [None, split()])
def test_massive_activations_in_half_precision(dtype, how):
    x = states()
    x[1:, ::97, 7] = 6e4
    x[3, 5, 7] = -6.5e4
    x = x.to(dtype)
    expected = reference.cka_debiased(x.double().numpy())
    tolerance = 1e-5 if how is None else 3e-3
    assert compute(x, how).matrix.numpy() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("times", [1.0, 1e2, 1e4])
def test_single_long_rows_are_exact_or_refused(times, monkeypatch):
    """One row, and one feature, that outweigh all others."""
    x = torch.randn(3, 400, 48, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= times
    x[0, 200] *= times
    rows = torch.arange(400)

    def found():
        return accumulate(ArraySource(x), rows, rows).compute().matrix

    expected = torch.as_tensor(reference.cka_debiased(x.double()))
    torch.testing.assert_close(found(), expected, atol=1e-6, rtol=0)
    monkeypatch.setattr(cka_sums, "DOUBLE_BYTES", 0)
    if times < 1e4:
        torch.testing.assert_close(found(), expected, atol=1e-4, rtol=0)
    else:
        with pytest.raises(ValueError, match="a few rows are so much longer"):
            found()


def test_overflowed_states_are_refused_by_name():
    x = states()
    x[2, 300, 3] = 7e4
    with pytest.raises(ValueError, match=r"infinite states at boundaries \[2\]"):
        compute(x.half())  # 7e4 is infinite in float16
    x[2, 300, 3] = float("nan")
    with pytest.raises(ValueError, match=r"NaN .* \[2\]"):
        compute(x, split())
    wide = x.clone()
    wide[2, 300, 3] = 7e4
    assert torch.isfinite(compute(wide.bfloat16()).matrix).all()


def test_states_far_from_zero_or_very_large():
    x = states()
    expected = reference.cka_debiased(x.numpy())
    for change in (x + 200 * x.std(), 1e12 * x, 1e-12 * x):
        found = compute(change).matrix.numpy()
        assert found == pytest.approx(expected, abs=2e-4)
        found = compute(change, split()).matrix.numpy()
        assert found == pytest.approx(compute(x, split()).matrix.numpy(), abs=2e-4)


def test_blocks_with_too_few_rows_of_a_level_are_left_out():
    # 135 = 2 blocks of 64 and one of 7, of which the smallest level holds one or two rows.
    x, shares = states(rows=135), (0.2, 1.0)
    found = accumulate(
        ArraySource(x), torch.arange(135), torch.arange(135) // 9, shares=shares, how=split(135)
    )
    m = found.rest_pairs
    assert m[0] > 0 and m[1] == 2 * 64 * 61 + 7 * 4
    assert torch.isfinite(found.compute(0).matrix).all()


def test_constant_layers_are_refused_by_name():
    x = states()
    x[2] = 3.0
    with pytest.raises(ValueError, match=r"boundary 2 is constant"):
        compute(x)


def test_a_copied_layer_has_cka_one():
    x = states()
    x[3] = x[1]
    for how in (None, split()):
        assert float(compute(x, how).matrix[1, 3]) == pytest.approx(1, abs=1e-6)


def test_one_sequence_has_no_standard_error():
    x = states()
    found = accumulate(ArraySource(x), torch.arange(ROWS), torch.zeros(ROWS, dtype=int))
    assert found.compute().se is None
    with pytest.raises(ValueError, match="at least two sequences"):
        found.bootstrap_weights(10, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: compute(x[:, :3]), "at least 4 rows"),
        (lambda x: ArraySource(x[0]), r"\[layers, rows, d\]"),
        (lambda x: compute(x, shares=(0.5, 0.2)), "shares must rise"),
        (lambda x: sums(x[:4], Basis.fit(ArraySource(x), torch.arange(9), 9, range(5)),
                        [480]), "expected"),
        (lambda x: choose_plan(10**6, 500, 16384), "limit of 2.0 GB"),
    ],
)  # fmt: skip
def test_bad_input_is_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call(states())


def test_plan_says_what_it_costs():
    small, large = choose_plan(2000, 9, 64), choose_plan(8000, 31, 576)
    assert small.exact and not large.exact
    assert "exact" in str(small) and "blocks of 256" in str(large) and "MB" in str(large)
    huge = choose_plan(100_000, 80, 8192, memory_limit=3e9)
    assert huge.peak_bytes < 3e9 and huge.flops < 2e14
    assert choose_plan(50_000, 30, 576).block == 64
    assert choose_plan(50_000, 30, 576, shares=(0.05, 1.0)).block == 160


def test_parts_hold_whole_sequences():
    sequence = torch.arange(1000) % 50
    part = deal_parts(sequence, seed=0)
    assert part.max() == PARTS - 1
    for s in range(50):
        assert len(part[sequence == s].unique()) == 1
