"""Which rows count, and when a threshold is recommended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftlayers import filtering
from draftlayers.spec import UserError


def columns(n: int = 400) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(n) % 40
    meta = {
        "position": position.int(),
        "answer": position >= 10,
        "duplicate": (position < 5) & (torch.arange(n) >= 40),
        "predictive_entropy": torch.rand(n, generator=generator),
    }
    norms = 1 + torch.rand(3, n, generator=generator)
    return meta, norms


def test_rows_are_answers_without_copies_and_sinks_by_falling_entropy():
    meta, norms = columns()
    norms[1, 55] = 200.0  # an answer position, large at one boundary only
    found = filtering.eligible(meta, norms)
    entropy = meta["predictive_entropy"][found.rows]
    assert (entropy.diff() <= 0).all()
    assert 55 not in found.rows
    assert meta["answer"][found.rows].all() and not meta["duplicate"][found.rows].any()
    assert found.counts["sinks by norm"] == 1
    assert found.counts["sinks by position"] == 1  # the other first positions are copies
    assert found.counts["kept"] == len(found.rows) == 30 * 10 - 1
    assert sum(n for why, n in found.counts.items() if why not in ("all", "kept")) == 400 - 299


def test_with_sinks_only_copies_go():
    meta, norms = columns()
    norms[1, 55] = 200.0
    found = filtering.eligible(meta, norms, keep_sinks=True)
    assert {0, 55} <= set(found.rows.tolist())
    assert not meta["duplicate"][found.rows].any()


def test_ties_keep_the_order_of_the_store():
    meta, norms = columns()
    meta["predictive_entropy"][:] = 0.0
    rows = filtering.eligible(meta, norms).rows
    assert (rows.diff() > 0).all()


def test_rows_without_entropy_are_left_out():
    meta, norms = columns()
    meta["predictive_entropy"][20:30] = float("nan")
    assert filtering.eligible(meta, norms).counts["no predictive entropy"] == 10


def test_too_few_rows_is_explained():
    meta, norms = columns(80)
    with pytest.raises(UserError, match="raise stat_tokens"):
        filtering.eligible(meta, norms)


def test_kept_is_a_prefix():
    rows = torch.arange(10)
    assert filtering.kept(rows, 0.3).tolist() == [0, 1, 2]
    assert filtering.kept(rows, 1.0).tolist() == rows.tolist()


SHARES = [0.25, 0.5, 0.75, 1.0]


def table(*certain: float) -> np.ndarray:
    return np.array([np.full(9, p) for p in certain])


def test_smallest_stable_share_is_recommended():
    chosen = [(1, 2, 3), (2, 4, 6), (2, 4, 6), (2, 4, 6)]
    found = filtering.recommend(SHARES, chosen, table(1, 0.95, 1, 1), [100] * 4)
    assert (found.share, found.found) == (0.5, True)
    assert "[2, 4, 6]" in found.reason and "50%" in found.reason


@pytest.mark.parametrize(
    ("chosen", "inclusion", "rows", "message"),
    [
        ([(2, 4, 6)] * 3 + [(1, 2, 3)], table(1, 1, 1, 1), [100] * 4, "depends on the cut"),
        ([(2, 4, 6)] * 4, table(0.5, 0.6, 0.7, 0.8), [100] * 4, "70% at best"),
        ([(1, 2, 3)] * 3 + [(2, 4, 6)], table(1, 1, 1, 0.4), [100] * 4, "between replicates"),
    ],
)
def test_no_recommendation_keeps_everything_and_says_why(chosen, inclusion, rows, message):
    found = filtering.recommend(SHARES, chosen, inclusion, rows)
    assert found.share == 1 and not found.found
    assert "no threshold can be recommended" in found.reason and message in found.reason


def test_a_share_with_too_few_rows_is_passed_over():
    found = filtering.recommend(SHARES, [(2, 4, 6)] * 4, table(1, 1, 1, 1), [10, 90, 100, 200])
    assert found.share == 0.5


def test_flat_and_linear_curves_have_a_shift():
    flat = np.ones((4, 3, 3))
    shift, error = filtering.largest_shift(flat, np.full((4, 3, 3), 0.1))
    assert (shift == 0).all() and error == pytest.approx(0.1 * 2**0.5)
    linear = flat * np.array([0.7, 0.8, 0.9, 1.0])[:, None, None]
    assert filtering.largest_shift(linear, flat)[0] == pytest.approx([0.3, 0.2, 0.1, 0])
