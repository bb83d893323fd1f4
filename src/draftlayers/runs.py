"""The folder of a run: where everything that it makes is kept, and what was read to make it.

Used by every chapter. A ``Run`` is a ``RunSpec`` together with its folder
``runs/<model>/<profile>/``. Opening a run reads and changes nothing; whoever writes holds the
folder first (``Run.hold``). A run also notes what is read through it, which is how ``chapters``
knows later whether its results are current. Nothing here knows what a chapter computes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import PrivateAttr

from draftlayers.current import Reading, digest, file_digest, read_record, sizes, timeless
from draftlayers.project import PROJECT, UserError, code_state, versions, write_atomically
from draftlayers.spec import RunSpec
from draftlayers.weights import find_weights

BESIDE = "beside:"  # names of files that all profiles of a model share
HOLDER = "DRAFTLAYERS_HOLDS"  # set for the processes of a command that holds a run's folder


class _NotedSpec(RunSpec):
    """A spec that notes which of its parameters are read."""

    _reading: Reading = PrivateAttr()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _PARAMETERS:
            self._reading.parameters[name] = value
        return value


_PARAMETERS = frozenset(RunSpec.model_fields)


def run_folder(spec: RunSpec, root: Path | None = None) -> Path:
    """Where a run lives, whether it exists or not; see ``Run``."""
    root = root or Path(os.environ.get("DRAFTLAYERS_RUNS") or PROJECT / "runs")
    values = spec.model_dump()
    weights = find_weights(values["model"])
    return root.expanduser().resolve() / weights.folder_name / str(values["profile"])


class Run:
    """A spec and its folder ``<root>/<model>/<profile>/``. Opening one changes nothing on disk.

    Parameters
    ----------
    spec
        What to run.
    root
        Folder of all runs; default the environment variable ``DRAFTLAYERS_RUNS``, else
        ``runs/`` in the project.

    Attributes
    ----------
    spec
        The parameters; which of them are read is noted in ``reading``.
    folder
        Where everything of the run lies.
    reading
        What was read and made through this object so far.

    Raises
    ------
    UserError
        When there is no such model, or its files cannot be read.
    """

    def __init__(self, spec: RunSpec, root: Path | None = None):
        self.reading = Reading()
        noted = _NotedSpec.model_construct(**spec.model_dump())
        noted._reading = self.reading
        self.spec: RunSpec = noted
        self.folder = run_folder(spec, root)
        self._held = False
        self._opened = time.monotonic()
        self._first_day = datetime.date.today().isoformat()

    @classmethod
    def stored(cls, folder: Path) -> Run:
        """The run that a command has begun in a folder.

        Raises
        ------
        UserError
            When none has.
        """
        values = read_record(folder / "spec.json")
        if values is None:
            raise UserError(f"no run was begun in {folder}: expected its spec.json there")
        return cls(RunSpec.checked(values), root=folder.parents[1])

    def parameter(self, name: str) -> Any:
        """Value of a parameter, without noting that it was read."""
        return self._day() if name == "day" else self.spec.model_dump()[name]

    @property
    def day(self) -> str:
        """The date that a chat template prints, as yyyy-mm-dd: one for the whole run."""
        day = self.reading.parameters["day"] = self._day()
        return day

    def _day(self) -> str:
        asked = self.spec.model_dump()["day"]
        begun = read_record(self.folder / "spec.json") or {}
        return asked or begun.get("day") or self._first_day

    # --- Writing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only one that writes in the run's folder; the processes below may write, too.

        Raises
        ------
        UserError
            When another command holds it, or the folder cannot be written.
        """
        if self._held or os.environ.get(HOLDER) == str(self.folder):
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as err:
            raise UserError(
                f"the run folder {self.folder} cannot be written ({err.strerror or err}); "
                "choose another one with --runs or the variable DRAFTLAYERS_RUNS"
            ) from None
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"another process is working in {self.folder}; wait for it, or stop it. "
                "Nothing was changed"
            ) from None
        self._held = True
        try:
            yield
        finally:
            self._held = False
            lock.release()

    def begin(self) -> None:
        """Write the parameters where the processes of this run read them. Hold the run first."""
        values = {**self.spec.model_dump(), "day": self._day()}
        text = json.dumps(values, indent=1) + "\n"
        write_atomically(self.folder / "spec.json", text.encode())

    def say(self, text: str) -> None:
        """Report progress: to the terminal that runs the chapters, else to standard output.

        Executed by papermill, a chapter's own output becomes part of the book, so progress takes
        another way: lines in the file that ``DRAFTLAYERS_PROGRESS`` names.
        """
        if to := os.environ.get("DRAFTLAYERS_PROGRESS"):
            with open(to, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            print(text, flush=True)

    def path(self, *parts: str) -> Path:
        """A path inside the run folder."""
        return self.folder.joinpath(*parts)

    def uses(self, path: Path) -> Path:
        """Note an input file of the project or the user, and return its path."""
        self.reading.files[self._name(path)] = self.input_digest(self._name(path))
        return path

    def input_digest(self, name: str) -> str:
        """Digest of an input file that was noted by this name, as it is now."""
        beside = name.removeprefix(BESIDE)
        path = PROJECT / name if beside == name else self.folder.parent / beside
        return file_digest(path) if path.exists() else "absent"

    def _name(self, path: Path) -> str:
        """A path as records name it, so that a project or its runs may move."""
        path = path.resolve()
        if path.is_relative_to(self.folder.parent):
            return BESIDE + path.relative_to(self.folder.parent).as_posix()
        return path.relative_to(PROJECT).as_posix() if path.is_relative_to(PROJECT) else str(path)

    def made(self, folder: Path) -> Path:
        """Note a folder of the run that later work relies on, and return its path."""
        self.reading.made |= sizes(folder, self.folder)
        return folder

    # --- Results -----------------------------------------------------------------------------

    def results(self, chapter: str) -> dict[str, Any]:
        """The numbers a chapter wrote.

        Raises
        ------
        UserError
            When the chapter has not been run.
        """
        self.reading.results[chapter] = self.results_digest(chapter)
        return self._results(chapter)

    def _results(self, chapter: str) -> dict[str, Any]:
        found = read_record(self.path("results", f"{chapter}.json"))
        if found is None:
            model, profile = self.parameter("model"), self.parameter("profile")
            raise UserError(
                f"chapter {chapter} has no results in {self.folder} yet; run it first, for example "
                f"with: draftlayers run --model {model} --profile {profile}"
            )
        return found

    def results_digest(self, chapter: str) -> str:
        """Digest of the numbers and tensors a chapter wrote, whenever and wherever it did."""
        found = read_record(self.path("results", f"{chapter}.json")) or {}
        arrays = self.path("results", f"{chapter}.safetensors")
        tensors = file_digest(arrays) if arrays.exists() else ""
        return digest(timeless(found), tensors)

    def write_results(self, chapter: str, results: Mapping[str, Any]) -> None:
        """Write a chapter's numbers as ``results/<chapter>.json``, with where they come from."""
        from draftlayers.device import device_name  # needs torch, which opening a run does not

        record = {
            **_plain(results, chapter),
            "_run": {
                "model": self.parameter("model"),
                "profile": self.parameter("profile"),
                "device": device_name(),
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "versions": versions(),
                **code_state(),
                "seconds": round(time.monotonic() - self._opened, 1),
                "reading": vars(self.reading),
            },
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        with self.hold():
            write_atomically(self.path("results", f"{chapter}.json"), text.encode())

    def arrays(self, chapter: str) -> dict[str, Any]:
        """The tensors a chapter wrote with ``write_arrays``."""
        from safetensors.torch import load_file

        self.reading.results[chapter] = self.results_digest(chapter)
        return load_file(self.path("results", f"{chapter}.safetensors"))

    def write_arrays(self, chapter: str, arrays: Mapping[str, Any]) -> None:
        """Write a chapter's tensors as ``results/<chapter>.safetensors``."""
        from safetensors.torch import save

        tensors = {name: array.contiguous() for name, array in arrays.items()}
        with self.hold():
            write_atomically(self.path("results", f"{chapter}.safetensors"), save(tensors))


def _plain(value: Any, where: str) -> Any:
    """Turn a result into plain JSON values; refuse what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"result {where} is {value}; write null where a number does not exist")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"result {where} is a {type(value).__name__}, which JSON cannot hold")
