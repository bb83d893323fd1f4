"""What decides whether finished work is used again: one mechanism for every kind of it.

Answers, states, heads, converted weights, chapters, figures and the site take time, so each is
kept together with a *record* of its **causes**: everything that determines it, by name. Work is
**current** while all its causes are what they were; ``changed`` names those that are not, and the
work is made again.

Causes come from four places:

* the **target**: ``file_digest`` of its files, remembered by size and time;
* **parameters**, the results of other chapters and files: whatever the code asks for while it
  works is written down in a ``Reading``, so that no table has to say who needs what;
* **code**: ``code_digest`` follows the imports of the module that does the work and digests their
  syntax trees, constants included, comments and docstrings left out;
* the **libraries** that compute: ``libraries``.

Every digest is made by ``digest``. Nothing here knows what any work is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftlayers.project import UserError, cache_folder, write_atomically

PACKAGE = "draftlayers"
SOURCE = Path(__file__).parent
# Modules that carry data about and decide no number: a change of theirs makes no work stale. What
# they carry (parameters, files, figures) is a cause of its own. None of them may compute, and a
# test holds them to it.
CARRIERS = frozenset(
    {
        "project",
        "current",
        "spec",
        "runs",
        "chapters",
        "jobs",
        "tables",
        "booksite",
        "cli",
        "figures",
    }
)
REMEMBERED_BYTES = 1 << 20  # smaller files are read again, which costs less than asking
SETTLED_SECONDS = 2.0  # a file changed so lately could change again without its time telling


def digest(*parts: Any) -> str:
    """Sixteen hexadecimal digits that change when any part changes.

    Parts are what JSON can hold; tuples count as lists.

    >>> digest(1, [2, 3]) == digest(1, (2, 3))
    True
    >>> digest(1, 2) == digest(2, 1)
    False
    """
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(record: Mapping[str, Any] | None, causes: Mapping[str, Any]) -> list[str]:
    """Names of the causes that are not what the record of finished work says, in order.

    A group of causes is named by its parts, such as ``parameters.k``. Without a record nothing
    has been made yet, and the answer is ``["never made"]``.

    >>> changed({"code": "a", "parameters": {"k": 3}}, {"code": "a", "parameters": {"k": 2}})
    ['parameters.k']
    >>> changed({"code": "a"}, {"code": "a"})
    []
    """
    if record is None:
        return ["never made"]
    record, causes = json.loads(json.dumps([record, causes]))  # as they are when read back
    names = []
    for name in dict.fromkeys([*causes, *record]):
        was, now = record.get(name), causes.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            names += [f"{name}.{part}" for part in changed(was, now)]
        elif was != now or (name in record) != (name in causes):
            names.append(name)
    return names


def read_record(path: Path) -> dict[str, Any] | None:
    """A record as it was written; None when there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, atomically; it comes last and seals the work beside it."""
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def timeless(value: Any) -> Any:
    """Results without where and when they were computed, and without how long that took."""
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if name not in ("_run", "seconds")}
        return {name: timeless(part) for name, part in kept.items()}
    return [timeless(part) for part in value] if isinstance(value, list) else value


@dataclass
class Reading:
    """What a piece of work has asked for so far, and what it made for others.

    Attributes
    ----------
    parameters
        Value of each parameter that was read.
    results
        Digest of each chapter's results that were read.
    files
        Digest of each input file that was read, by its path.
    made
        Size of each file that later work relies on, by its path in the run folder.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


# --- Files ---------------------------------------------------------------------------------------


def file_digest(path: Path | str) -> str:
    """Digest of a file's content; a large file that has not changed is not read again.

    What was read is remembered by size, time and place in the cache folder, when that can be
    written.

    Raises
    ------
    UserError
        When there is no such file, or it cannot be read.
    """
    path = Path(path).resolve()
    try:
        stat = path.stat()
        known = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        large = stat.st_size >= REMEMBERED_BYTES
        kept = _remembered().get(str(path)) if large else None
        if isinstance(kept, list) and kept[:-1] == known:
            return str(kept[-1])
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}") from None
    if large and time.time() - stat.st_mtime > SETTLED_SECONDS:
        try:
            entries = {**_remembered(), str(path): [*known, found]}
            write_atomically(_memory(), json.dumps(entries).encode())
        except (OSError, UserError):
            pass  # a home that cannot be written costs time, no more
    return found


def _memory() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> dict[str, list[Any]]:
    try:
        return read_record(_memory()) or {}
    except UserError:  # no place for it
        return {}


# --- Code ----------------------------------------------------------------------------------------


def code_digest(*modules: str, source: str = "") -> str:
    """Digest of the syntax trees of modules of this package and of all they import.

    Comments, layout and docstrings have no part in it; constants have. Modules that only carry
    data (``CARRIERS``) are left out. Imports for type checking count, too: what a type names is
    usually what does the work.

    Parameters
    ----------
    modules
        Names below the package, such as ``"states"`` or ``"figures.cka"``.
    source
        Program text that belongs to it, for example a notebook's.

    Raises
    ------
    UserError
        When an import of the package's own code leads nowhere, or cannot be followed because the
        name is only known while it runs.
    """
    trees: dict[str, str] = {}
    waiting = {f"{PACKAGE}.{name}" for name in modules}
    # A carrier is left out where it is only passed through, not where its own code is asked for.
    left_out = CARRIERS - {name.partition(".")[0] for name in modules}
    if source:
        tree = ast.parse(source)
        trees[""], found = _dumped(tree), _imports(tree, "the program", "")
        waiting |= found
    while waiting:
        name = waiting.pop()
        if name in trees or _room(name) in left_out:
            continue
        path = _module_path(name)
        if path is None:
            raise UserError(f"{name} is imported, but the package has no such module")
        trees[name], found = _read_module(name, path, path.stat().st_mtime_ns)
        waiting |= found
    return digest(trees)


def _room(name: str) -> str:
    """The part of a module's name below the package: ``figures`` of ``draftlayers.figures.cka``."""
    return name.partition(".")[2].partition(".")[0]


def _module_path(name: str) -> Path | None:
    """File of a module or package of this project, if there is one."""
    base = SOURCE.joinpath(*name.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file() and (path != SOURCE.with_suffix(".py")):
            return path
    return None


@functools.lru_cache(maxsize=512)
def _read_module(name: str, path: Path, modified: int) -> tuple[str, set[str]]:
    """Dump of a module's syntax tree, and what it imports; read again when the file changed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _dumped(tree), _imports(tree, name, package)


def _dumped(tree: ast.Module) -> str:
    """Digest of a syntax tree without docstrings. The tree is changed."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [statement for statement in body if not _is_text(statement)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    """A string that stands alone: a docstring, of a function or of an attribute."""
    value = getattr(statement, "value", None)
    return (
        isinstance(statement, ast.Expr)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    )


def _imports(tree: ast.Module, whose: str, package: str) -> set[str]:
    """Names of the package's modules that a syntax tree imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    found |= _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                name = importlib.util.resolve_name("." * node.level + name, package)
            if name.split(".")[0] == PACKAGE:
                found |= _with_parents(name)
                found |= _submodules(name, [alias.name for alias in node.names], whose)
        elif isinstance(node, ast.Call) and _dynamic(node.func):
            raise UserError(
                f"{whose} imports by a name that is only known while it runs (line {node.lineno}); "
                "what its results depend on could not be followed, so write an import statement"
            )
    return found


def _with_parents(name: str) -> set[str]:
    """A module and the packages it lies in, whose ``__init__`` runs before it."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def _submodules(name: str, imported: Iterable[str], whose: str) -> set[str]:
    """Those of the names imported from a package that are modules; the others it must define."""
    found = set()
    for one in imported:
        if one != "*" and _module_path(f"{name}.{one}"):
            found.add(f"{name}.{one}")
        elif name == PACKAGE:
            raise UserError(f"{whose} imports {name}.{one}, but the package has no such module")
    return found


def _dynamic(function: ast.expr) -> bool:
    called = getattr(function, "id", None) or getattr(function, "attr", None)
    return called in ("import_module", "__import__", "run_module", "run_path")


def libraries() -> dict[str, str]:
    """Versions of the libraries that compute, without the mark of the build."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def sizes(folder: Path, root: Path) -> dict[str, int]:
    """Size of every file below a folder by its path from ``root``, for ``Reading.made``."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def missing(made: Mapping[str, int | str], root: Path) -> list[str]:
    """Those of the files that are gone, or of another size or digest, whichever was kept."""

    def there(path: Path, kept: int | str) -> int | str:
        try:
            return path.stat().st_size if isinstance(kept, int) else file_digest(path)
        except (OSError, UserError):
            return -1

    return [name for name, kept in made.items() if there(root / name, kept) != kept]
