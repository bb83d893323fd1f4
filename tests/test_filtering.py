"""Which rows count, what is chosen along the filter, and when a threshold is recommended."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from draftlayers import filtering
from draftlayers.cka_pass import accumulate, deal_parts
from draftlayers.entropy import feature_softmax
from draftlayers.layer_entropy import DEFINITIONS, EntropySamples, sample_grams
from draftlayers.project import UserError
from draftlayers.store import ArraySource


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


def test_keeping_sinks_brings_back_nothing_else():
    meta, norms = columns()
    norms[1, [55, 87, 122]] = 200.0  # an answer position, one of a prompt, a copy
    plain = set(filtering.eligible(meta, norms).rows.tolist())
    found = filtering.eligible(meta, norms, keep_sinks=True)
    assert set(found.rows.tolist()) - plain == {0, 55, 87}
    assert plain < set(found.rows.tolist())
    assert found.counts["kept"] == len(found.rows) == len(plain) + 3


def test_a_tie_prefers_no_conversation():
    meta, norms = columns()
    meta["predictive_entropy"][:] = 0.0
    rows = filtering.eligible(meta, norms).rows
    assert torch.equal(rows, filtering.eligible(meta, norms).rows)
    assert len(set((filtering.kept(rows, 0.2) // 40).tolist())) == 10  # all conversations
    meta["predictive_entropy"][rows[-50:]] = 1.0
    assert set(filtering.eligible(meta, norms).rows[:50].tolist()) == set(rows[-50:].tolist())


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


# --- Along the filter ----------------------------------------------------------------------------

BOUNDARIES, ROWS, WIDTH, PARTS = 9, 240, 16, 6


def collected(rows: int = ROWS) -> ArraySource:
    """A residual stream: every boundary adds to the one before."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(BOUNDARIES, rows, WIDTH, generator=generator)
    return ArraySource((noise * torch.arange(1, WIDTH + 1) ** -0.5).cumsum(0))


def along(shares, name="logit_lens", rows=ROWS, sequence=None, **options):
    """Levels of a filter, and what it said, for entropies that come from the states' features."""
    source, order = collected(rows), torch.arange(rows)
    sequence = order % 20 if sequence is None else sequence
    sums = accumulate(source, order, sequence, shares=shares, parts=PARTS)
    samples = EntropySamples(
        lens=feature_softmax(source.states.flatten(0, 1))[0].view(BOUNDARIES, rows),
        lens_rows=order,
        feature_entropy=torch.zeros(BOUNDARIES, rows),
        log_mass=torch.zeros(BOUNDARIES, rows),
        grams=torch.zeros(BOUNDARIES, 2, 2),
        overlap=torch.zeros(BOUNDARIES, BOUNDARIES),
        vocabulary=WIDTH,
        width=WIDTH,
        rows=rows,
    )
    said: list[str] = []
    levels = filtering.along_filter(
        sums,
        deal_parts(sequence, 0, PARTS),
        samples,
        DEFINITIONS[name],
        shares,
        2,
        grams=lambda share: sample_grams(source, filtering.kept(order, share)),
        bootstrap=20,
        say=said.append,
        **options,
    )
    return levels, said


def test_every_level_is_the_search_on_its_own_rows():
    shares = (0.5, 1.0)
    levels, said = along(shares)
    states = collected().states
    assert [level.share for level in levels] == list(shares) and len(said) == 2
    for level, rows in zip(levels, (120, 240), strict=True):
        part = states[:, :rows].numpy()
        expected = reference.cka_debiased(part)
        assert level.rows == rows
        assert level.matrix == pytest.approx(expected, abs=1e-5)
        assert level.biased == pytest.approx(reference.cka_biased(part), abs=1e-5)
        entropy = reference.entropy(reference.softmax(part)).mean(1) / np.log(WIDTH)
        assert level.entropy == pytest.approx(entropy, rel=1e-5)
        indices, _ = reference.best_set(entropy[1:-1], expected[1:-1, 1:-1], 2)
        assert level.layers == tuple(i + 1 for i in indices)
        assert (level.exact_share == 1).all() and np.isfinite(level.se).all()
        assert level.stability.times == 20
        assert level.stability.inclusion.sum() == pytest.approx(2)


def test_spectra_are_those_of_the_rows_that_are_kept():
    levels, _ = along((0.5, 1.0), "von_neumann")
    first = collected().states[:, :120]
    expected = [reference.von_neumann(reference.trace_normalised(x)) for x in first.numpy()]
    assert levels[0].entropy * np.log(WIDTH) == pytest.approx(expected, rel=1e-6)


def test_shares_of_too_few_rows_are_passed_over_with_a_word():
    levels, said = along((0.2, 0.9, 1.0), rows=72)  # 14 rows, 65 rows, 72 rows
    assert [level.rows for level in levels] == [65, 72]
    assert "20%" in said[0] and "14 rows, too few" in said[0]


def test_a_bootstrap_needs_more_than_one_sequence():
    with pytest.raises(UserError, match=r"two sequences.*raise stat_tokens"):
        along((1.0,), sequence=torch.zeros(ROWS, dtype=torch.long))


def test_without_a_jackknife_there_is_no_standard_error():
    # All rows but two are of one sequence: without it too few are left to compute anything.
    sequence = torch.zeros(100, dtype=torch.long)
    sequence[-2:] = 1
    (level,), _ = along((1.0,), rows=100, sequence=sequence)
    assert np.isnan(level.se).all() and np.isfinite(level.matrix).all()
