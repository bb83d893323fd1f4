"""Sphinx extension of the book: whatever a page says about a run is read from the run's files.

Pages and notebooks write

* the role ``{result}`05-selection:default.score|.2f` `` for one number,
* the directive ``{result-table}`` for a table of results, one column a line,
* the directive ``{run-table}`` for what ran where (``chapters``), with which packages
  (``versions``) and with which parameters (``parameters``).

A key that does not exist is a warning, and the book is built with warnings as errors, so a page
can never show a number that no run has produced. The extension also puts a line under every
title that says which run the page's numbers come from, and refuses notebooks that were not
executed to their end. Executing them and laying out the source tree is left to
``draftlayers.chapters`` and ``draftlayers.booksite.stage``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from draftlayers.spec import PROFILES, RunSpec

logger = logging.getLogger(__name__)

STATUS_PAGE = "book/status"


class ResultError(ValueError):
    """A reference to a result that cannot be followed; the message says what exists instead."""


# --- Reading and showing values ------------------------------------------------------------------


def look_up(results: Path, reference: str) -> Any:
    """Return the value that ``chapter:dotted.key`` names in ``results/<chapter>.json``.

    A part of the key that is a whole number is a position in a list. ``spec:...`` reads the
    run's own parameters.

    Raises ``ResultError`` when the chapter or a part of the key does not exist, and says which
    names do.
    """
    chapter, colon, key = reference.strip().partition(":")
    if not colon or not key:
        raise ResultError(f"{reference!r} is not of the form chapter:dotted.key")
    path = results / f"{chapter}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in results.glob("*.json"))) or "none"
        raise ResultError(f"no results of chapter {chapter!r}; there are: {known}")
    value: Any = json.loads(path.read_text(encoding="utf-8"))
    walked = chapter
    for part in key.split("."):
        if isinstance(value, list) and part.lstrip("-").isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            names = list(value) if isinstance(value, dict) else []
            there = f"; there are: {', '.join(map(str, names))}" if names else ""
            raise ResultError(f"{walked} has no entry {part!r}{there}")
        walked += ("." if ":" in walked else ":") + part
    return value


def show(value: Any, spec: str = "") -> str:
    """Write a result for a reader.

    ``spec`` is a Python format specification, applied to each number of a list. Lists are
    written as ``[2, 15, 27]``, ``None`` as "none", truth values as "yes" and "no".

    Raises ``ResultError`` when the specification does not suit the value, or when the value is
    a whole table, which needs ``{result-table}``.
    """
    if isinstance(value, dict):
        raise ResultError(f"is a group, not a value; it holds: {', '.join(map(str, value))}")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item, spec) for item in value) + "]"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not spec:
        spec = ".3g"
    try:
        text = format(value, spec)
    except ValueError as error:
        raise ResultError(f"{value!r} cannot be written as {spec!r}: {error}") from None
    # A typographic minus sign, as in the rest of the text.
    return text.replace("-", "−") if isinstance(value, int | float) else text


def show_seconds(seconds: float) -> str:
    """Write a duration as a person would say it."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def show_date(date: str) -> str:
    """Write an ISO date as day, month name, year; anything else unchanged."""
    try:
        when = datetime.fromisoformat(date)
    except ValueError:
        return date
    return f"{when.day} {when:%B %Y}"


def commit_text(records: Iterable[dict[str, Any]]) -> str:
    """Which commits the records were made at, to stand behind a version; empty where unknown."""
    found = dict.fromkeys(
        record["commit"][:7] + ("" if record["clean"] else ", changed")
        for record in records
        if record.get("commit")
    )
    return f" (commit {'; '.join(found)})" if found else ""


def results_folder(env: BuildEnvironment) -> Path:
    """The folder of results files inside the source tree that Sphinx reads."""
    return Path(env.srcdir) / str(env.config.draftlayers_results)


def recorded_runs(env: BuildEnvironment) -> dict[str, dict[str, Any]]:
    """Map each chapter with results to its ``_run`` record, and note the dependencies."""
    records = {}
    for path in sorted(results_folder(env).glob("[0-9]*.json")):
        env.note_dependency(str(path))
        record = json.loads(path.read_text(encoding="utf-8")).get("_run")
        if record:
            records[path.stem] = record
    return records


# --- Role and directives -------------------------------------------------------------------------


class ResultRole(SphinxRole):
    """``{result}`chapter:dotted.key|format` `` shows one value of a results file."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        reference, _, spec = self.text.partition("|")
        results = results_folder(self.env)
        self.env.note_dependency(str(results / f"{reference.partition(':')[0].strip()}.json"))
        try:
            shown = show(look_up(results, reference), spec.strip())
        except ResultError as error:
            message = self.inliner.reporter.warning(
                f"result {self.text!r}: {error}", line=self.lineno
            )
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        return [nodes.inline(self.rawtext, shown, classes=["result"])], []


def table_node(
    titles: list[str], rows: Iterable[Sequence[nodes.Node | str]], caption: str | None = None
) -> nodes.table:
    """Build a table with one header row; cells are texts or inline nodes."""
    table = nodes.table(classes=["results-table"])
    if caption:
        table += nodes.title(caption, caption)
    group = nodes.tgroup(cols=len(titles))
    table += group
    for _ in titles:
        group += nodes.colspec(colwidth=1)
    header, body = nodes.thead(), nodes.tbody()
    lines: list[tuple[nodes.Element, Sequence[nodes.Node | str]]] = [(header, titles)]
    for parent, cells in [*lines, *((body, row) for row in rows)]:
        row = nodes.row()
        for cell in cells:
            inline = nodes.Text(cell) if isinstance(cell, str) else cell
            row += nodes.entry("", nodes.paragraph("", "", inline))
        parent += row
    group += header
    group += body
    return table


class ResultTable(SphinxDirective):
    """A table of one group of results.

    The argument names a list of groups, or a group of groups, in a results file. Each line of
    the content is a column: ``Title | key | format``; the key ``@`` stands for the name of the
    row's group. An entry that a row lacks is shown as a dash.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {"caption": directives.unchanged, "name": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        results = results_folder(self.env)
        reference = self.arguments[0]
        self.env.note_dependency(str(results / f"{reference.partition(':')[0].strip()}.json"))
        try:
            columns = [self._column(line) for line in self.content if line.strip()]
            rows = self._rows(look_up(results, reference), columns)
        except ResultError as error:
            return [
                self.state.document.reporter.warning(
                    f"result-table {reference!r}: {error}", line=self.lineno
                )
            ]
        table = table_node([title for title, _, _ in columns], rows, self.options.get("caption"))
        self.set_source_info(table)
        self.add_name(table)
        return [table]

    @staticmethod
    def _column(line: str) -> tuple[str, str, str]:
        parts = [part.strip() for part in line.split("|")]
        if len(parts) not in (2, 3):
            raise ResultError(f"column {line!r} is not of the form Title | key | format")
        return parts[0], parts[1], parts[2] if len(parts) == 3 else ""

    @staticmethod
    def _rows(value: Any, columns: list[tuple[str, str, str]]) -> list[list[str]]:
        if isinstance(value, dict):
            groups = [(str(name), group) for name, group in value.items()]
        elif isinstance(value, list):
            groups = [(str(number), group) for number, group in enumerate(value, 1)]
        else:
            raise ResultError("is a single value; a table needs a group or a list")
        rows, found = [], set()
        for name, group in groups:
            row = []
            for _, key, spec in columns:
                cell: Any = name if key == "@" else group
                for part in key.split(".") if key != "@" else []:
                    cell = cell.get(part) if isinstance(cell, dict) else None
                found |= {key} if cell is not None else set()
                row.append("–" if cell is None else show(cell, spec))
            rows.append(row)
        if missing := [key for _, key, _ in columns if key not in found]:
            raise ResultError(f"no row has an entry {', '.join(map(repr, missing))}")
        return rows


class RunTable(SphinxDirective):
    """What ran: ``chapters`` (where, when, how long), ``versions`` or ``parameters``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        tables = {
            "chapters": self._chapters,
            "versions": self._versions,
            "parameters": self._parameters,
        }
        kind = self.arguments[0]
        if kind not in tables:
            names = ", ".join(tables)
            return [
                self.state.document.reporter.warning(
                    f"run-table {kind!r} does not exist; there are: {names}", line=self.lineno
                )
            ]
        return [tables[kind]()]

    def _chapters(self) -> nodes.table:
        records = recorded_runs(self.env)
        rows: list[list[nodes.Node | str]] = [
            [
                document_link(f"notebooks/{chapter}", self.env.docname),
                record["device"],
                show_date(record["date"]),
                show_seconds(record["seconds"]),
            ]
            for chapter, record in records.items()
        ]
        total = show_seconds(sum(record["seconds"] for record in records.values()))
        rows.append(["all chapters", "", "", total])
        return table_node(["Chapter", "Device", "Date", "Time"], rows)

    def _versions(self) -> nodes.table:
        used: dict[str, dict[str, None]] = {}
        for record in recorded_runs(self.env).values():
            for package, version in record["versions"].items():
                at = commit_text([record]) if package == "draftlayers" else ""
                used.setdefault(package, {})[version + at] = None
        rows = [[package, ", ".join(versions)] for package, versions in used.items()]
        return table_node(["Package", "Version"], rows)

    def _parameters(self) -> nodes.table:
        path = results_folder(self.env) / "spec.json"
        self.env.note_dependency(str(path))
        used = json.loads(path.read_text(encoding="utf-8"))
        columns = [RunSpec.make(used["model"], name).model_dump() for name in PROFILES] + [used]
        rows: list[list[nodes.Node | str]] = [
            [
                nodes.literal(name, name),
                field.description or "",
                *(show(values.get(name)) for values in columns),
            ]
            for name, field in RunSpec.model_fields.items()
            if name not in ("model", "profile")
        ]
        table = table_node(["Parameter", "Meaning", *PROFILES, "this run"], rows)
        table["classes"].append("parameters-table")
        return table


# --- Banner, link and notebook check -------------------------------------------------------------


def document_link(target: str, from_document: str, text: str = "") -> nodes.Node:
    """A link to another page of the book, by default with its title, checked by Sphinx."""
    return addnodes.pending_xref(
        "",
        nodes.inline(text, text),
        refdomain="std",
        reftype="doc",
        reftarget=f"/{target}",
        refdoc=from_document,
        refexplicit=bool(text),
        refwarn=True,
    )


def add_banner(app: Sphinx, doctree: nodes.document) -> None:
    """Say under the title which run the numbers of this page come from."""
    env = app.env
    records = recorded_runs(env)
    title = next(doctree.findall(nodes.title), None)
    if not records or title is None:
        return
    chapter = env.docname.removeprefix("notebooks/")
    own = [records[chapter]] if chapter in records else list(records.values())

    def every(key: str) -> str:
        return ", ".join(dict.fromkeys(str(record[key]) for record in own))

    dates = sorted({record["date"] for record in own})
    days = dict.fromkeys(show_date(date) for date in (dates[0], dates[-1]))
    versions = {name: version for record in own for name, version in record["versions"].items()}
    facts = [
        ("model", every("model")),
        ("profile", every("profile")),
        ("device", every("device")),
        ("date", " to ".join(days)),
        ("run time", show_seconds(sum(record["seconds"] for record in own))),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + commit_text(own),
        ),
    ]
    banner = nodes.paragraph(classes=["run-banner"])
    whose = "this page" if chapter in records else "the book"
    banner += nodes.Text(f"Numbers of {whose}: ")
    for position, (label, text) in enumerate(facts):
        banner += nodes.Text(" · " * bool(position) + label + " ")
        banner += nodes.strong(text, text)
    if STATUS_PAGE in env.found_docs and env.docname != STATUS_PAGE:
        banner += nodes.Text(" · ")
        banner += document_link(STATUS_PAGE, env.docname, "what ran where")
    title.parent.insert(title.parent.index(title) + 1, banner)


def check_notebook(app: Sphinx, docname: str, source: list[str]) -> None:
    """Warn of a notebook that was not executed to its end."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    run = notebook["metadata"].get("papermill")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    failed = any(
        output["output_type"] == "error" for cell in code for output in cell.get("outputs", [])
    )
    if run is None:
        logger.warning("this notebook was not executed by draftlayers", location=docname)
    elif run.get("exception") or failed:
        logger.warning("this notebook stopped with an error", location=docname)
    elif any(cell["execution_count"] is None and "".join(cell["source"]).strip() for cell in code):
        logger.warning("this notebook has code cells that never ran", location=docname)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything above with Sphinx."""
    app.add_config_value("draftlayers_results", "results", "env", str)
    app.add_role("result", ResultRole())
    app.add_directive("result-table", ResultTable)
    app.add_directive("run-table", RunTable)
    app.connect("source-read", check_notebook)
    app.connect("doctree-read", add_banner)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
