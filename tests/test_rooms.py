"""The house as README shows it: every module has its place, and imports run one way."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter

from draftlayers.project import PROJECT

SOURCE = PROJECT / "src" / "draftlayers"
MODULES = sorted(path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__")
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def rows() -> list[list[str]]:
    """Modules in the rows of README's table, from the ground up."""
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Which file does what")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    found = [re.findall(r"`(\w+)/?`", line.split("|")[2]) for line in lines]
    return [[name for name in row if name in MODULES + PACKAGES] for row in found]


def imports(path) -> set[str]:
    """Rooms of the package that a file imports, also only for their types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftlayers"):
            names = [node.module] if "." in node.module else [f"{node.module}.{alias.name}"
                                                               for alias in node.names]  # fmt: skip
            found |= {name.split(".")[1] for name in names}
    return found


def test_every_module_is_in_the_table_once():
    listed = [name for row in rows() for name in row]
    assert sorted(listed) == sorted(MODULES + PACKAGES)


def test_imports_lead_to_rows_above_or_along_the_own_row_without_a_circle():
    place = {name: number for number, row in enumerate(rows()) for name in row}
    graph = {}
    for name in MODULES + PACKAGES:
        single = SOURCE / f"{name}.py"
        files = [single] if single.exists() else list((SOURCE / name).rglob("*.py"))
        graph[name] = {other for path in files for other in imports(path)} - {name}
        upward = {other for other in graph[name] if place[other] > place[name]}
        assert not upward, f"{name} imports {sorted(upward)}, which stand below it in README"
    list(TopologicalSorter(graph).static_order())  # raises for a circle


def test_no_module_is_longer_than_a_reader_holds_in_mind():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path.name
