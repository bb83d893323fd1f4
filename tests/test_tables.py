"""Cells, sides and notes of tables, and how numbers are written."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt

from draftlayers import tables
from draftlayers.tables import interval_text, layers_text, number_text, range_text, table


def lines(*args, **kwargs) -> list[str]:
    return table(*args, **kwargs).data.split("\n")


def sides(column: list) -> str:
    return lines([{"x": value} for value in column])[1].strip("| ")


def cell(value) -> str:
    return lines([{"x": value}])[2].removeprefix("| ").removesuffix(" |")


def test_examples_in_the_text():
    assert doctest.testmod(tables).failed == 0


def test_columns_are_those_of_all_rows_in_order():
    assert lines([{"a": 1, "": "x"}, {"a": 2, "b": 3}]) == [
        "| a |  | b |",
        "| --: | :-- | --: |",
        "| 1 | x | – |",
        "| 2 | – | 3 |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (np.float64(math.nan), "–"),
        ("", ""),
        (True, "yes"),
        (12345, "12,345"),
        (-3, "−3"),
        (0.5, "0.50"),
        (-0.5, "−0.50"),
        (np.float32(0.5), "0.50"),
        (np.int64(7), "7"),
        (torch.tensor(7), "7"),
        ((2, 15, 27), "2, 15, 27"),
        ([], ""),
        (np.array([1, 2]), "1, 2"),
        ("-1.5", "−1.5"),
        ("-1.5 (-2.0 to 1.0)", "−1.5 (−2.0 to 1.0)"),
        ("top-1, 2-3", "top-1, 2-3"),
        ("a|b", r"a\|b"),
        (r"a\|b", r"a\|b"),
        ("two\n lines", "two lines"),
        (r"$\alpha_1$", r"$\alpha_1$"),
    ],
)
def test_cells(value, text):
    assert cell(value) == text


@pytest.mark.parametrize(
    "column",
    [
        [1, 2.5, None],
        ["1,234", "12%", "1.3 ×"],
        ["1.39 (1.30 to 1.50)", "**1.00**"],
        ["-0.10 to +0.25", "–", ""],
        ["3 of 1,330", 2],
        ["+0.023", "1e-05"],
    ],
)
def test_numbers_stand_to_the_right(column):
    assert sides(column) == "--:"


@pytest.mark.parametrize("column", [["2, 15, 27"], [1, "one"], [None], [""], ["1.2.3"], [(1, 2)]])
def test_text_stands_to_the_left(column):
    assert sides(column) == ":--"


def test_a_note_is_a_paragraph_of_its_own():
    found = table([{"a|b": "c|d"}], note="Note: *e*.").data
    html = MarkdownIt("commonmark").enable("table").render(found)
    assert html.count("<table>") == 1 and html.count("<td") == 1 and ">c|d</td>" in html
    assert html.rstrip().endswith("<p>Note: <em>e</em>.</p>")


def test_without_rows_the_note_is_left():
    assert table([], note="none").data == "none"
    assert table([]).data == ""


def test_numbers_as_text():
    assert number_text(-1e-7, ".0e") == "−1e-07"
    assert number_text(0.123, ".0%") == "12%"
    assert interval_text(1.0, None) == "1.00"
    assert interval_text(None, (1, 2)) == "–"
    assert interval_text(-0.1, (-0.25, 0.0), "+.2f") == "−0.10 (−0.25 to +0.00)"
    assert range_text(None) == "–"
    assert layers_text(torch.tensor([2, 3])) == layers_text((2, 3)) == "2, 3"
