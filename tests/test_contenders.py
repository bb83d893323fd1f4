"""Which heads a run trains, and what their folders are called."""

from __future__ import annotations

import pytest

from draftlayers.contenders import head_folder, parse_head_name, planned_heads, planned_sets
from draftlayers.project import UserError


def test_names_of_heads(run):
    for layers, seed in (((2, 15, 27), 0), ((5,), 12)):
        assert parse_head_name(head_folder(run, layers, seed).name) == (layers, seed)
    for name in ("", "2-15", "2-15-s", "s0", "a-b-s0", "06-draft-head", "2--3-s1"):
        with pytest.raises(UserError, match="names no head"):
            parse_head_name(name)
    run.write_results(
        "05-selection", {"layers": {"default": [2, 4, 5]}, "chosen": {"layers": [1, 3]}}
    )
    assert planned_sets(run) == {"default": (2, 4, 5), "chosen": (1, 3)}
    assert planned_heads(run) == ["2-4-5-s0", "1-3-s0"]
    chosen = {"layers": [1, 3]}
    run.write_results("05-selection", {"layers": {"default": [2, 4, 5]}, "chosen": chosen})
    assert planned_sets(run) == {"default": (2, 4, 5), "chosen": (1, 3)}
    assert planned_heads(run) == ["2-4-5-s0", "1-3-s0"]
    run.write_results("05-selection", {"layers": {"default": [1, 3]}, "chosen": chosen})
    assert planned_sets(run) == {"default": (1, 3)}


# --- Training ----------------------------------------------------------------------------------
