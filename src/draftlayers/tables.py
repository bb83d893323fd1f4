"""Tables that a notebook shows: a list of rows becomes Markdown.

Used by every chapter. What a table says is left to the notebook; this module decides how a number
is written, which columns stand to the right, and how a cell is kept from breaking the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from IPython.display import Markdown

NOTHING = "–"  # a value that does not exist
MINUS = "−"
_NUMBER = r"[+\-−±]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+\-]?\d+)?\s?[%×]?"
# A number, a number with its interval, an interval, or a rank such as "3 of 1,330".
_NUMERIC = re.compile(rf"{_NUMBER}(?: \({_NUMBER} to {_NUMBER}\)| (?:to|of) {_NUMBER})?")
_HYPHEN = re.compile(r"(?<![\w\-])-(?=\d)")


def table(rows: Sequence[Mapping[str, Any]], note: str = "") -> Markdown:
    r"""A table of rows, with a note below it.

    A column in which every value is a number, or the text of one, stands to the right.

    Parameters
    ----------
    rows
        One mapping from column titles to values for each row; the columns are those of all rows
        in the order in which they first appear. Titles and text may hold Markdown and TeX. None
        and NaN are shown as a dash, like a column that a row does not have; an empty string
        stays empty. Whole numbers get separators of thousands, other numbers two decimals (format
        them with ``number_text`` for more); a list or tuple shows its values with commas.
    note
        Markdown for a paragraph below the table.

    Examples
    --------
    >>> print(table([{"rule": "a|b", "score": 0.5}, {"rule": "c", "score": -1.0}]).data)
    | rule | score |
    | :-- | --: |
    | a\|b | 0.50 |
    | c | −1.00 |
    """
    titles = list(dict.fromkeys(title for row in rows for title in row))
    cells = [[_cell(row.get(title)) for title in titles] for row in rows]
    sides = ["--:" if _is_numeric(column) else ":--" for column in zip(*cells, strict=True)]
    lines = [[_cell(title) for title in titles], sides, *cells] if titles else []
    blocks = ["\n".join(f"| {' | '.join(line)} |" for line in lines), note]
    return Markdown("\n\n".join(block for block in blocks if block))


def number_text(value: float | None, spec: str = ".2f") -> str:
    """A number as text, with a minus sign that is one; a dash where there is none.

    >>> number_text(-0.123, "+.1f"), number_text(1234, ",d"), number_text(None)
    ('−0.1', '1,234', '–')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return _HYPHEN.sub(MINUS, format(value, spec))


def range_text(interval: Sequence[float] | None, spec: str = ".2f") -> str:
    """An interval as text.

    >>> range_text((-0.1, 0.25))
    '−0.10 to 0.25'
    """
    if interval is None:
        return NOTHING
    low, high = interval
    return f"{number_text(low, spec)} to {number_text(high, spec)}"


def interval_text(value: float | None, interval: Sequence[float] | None, spec: str = ".2f") -> str:
    """A number with its interval; the number alone where there is no interval.

    >>> interval_text(1.389, (1.3, 1.5))
    '1.39 (1.30 to 1.50)'
    """
    if value is None or interval is None:
        return number_text(value, spec)
    return f"{number_text(value, spec)} ({range_text(interval, spec)})"


def layers_text(layers: Iterable[int]) -> str:
    """Boundaries of a set as text.

    >>> layers_text((2, 15, 27))
    '2, 15, 27'
    """
    return ", ".join(str(int(b)) for b in layers)


def _cell(value: Any) -> str:
    """Text of a value, on one line and with nothing that would end the cell."""
    if hasattr(value, "tolist"):  # scalars and arrays of numpy and torch
        value = value.tolist()
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number_text(value, ",d")
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    text = re.sub(r"\s*\n\s*", " ", str(value)).strip()
    if _NUMERIC.fullmatch(text):
        text = _HYPHEN.sub(MINUS, text)
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether a column has numbers, and beside them only cells without a value."""
    told = [cell.strip("*") for cell in cells if cell not in ("", NOTHING)]
    return bool(told) and all(_NUMERIC.fullmatch(cell) for cell in told)
