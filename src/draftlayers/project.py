"""Ground under everything: where the project lies, how files are written, how mistakes are told.

Used by every module. It knows nothing of models or chapters.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DATA = PROJECT / "data"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what writing to a full disk or quota says
NO_ROOM = "there is no room left for"

Say = Callable[[str], None]  # told a line of progress now and then


def quiet(text: str) -> None:
    """Say nothing."""


class UserError(ValueError):
    """A request that cannot be served, explained in a sentence a person can act on."""


def first_line(err: BaseException) -> str:
    """The first line of what an error says, or its kind when it says nothing.

    >>> first_line(OSError("no such file\\nand more")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    lines = str(err).strip().splitlines()
    return lines[0] if lines else type(err).__name__


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Write a whole file or nothing: a killed process leaves the old file in place.

    What it leaves beside it has one name for each file, ``.NAME.partial``, and the next writer of
    the file takes it over. Writers of one file wait for each other.

    Raises
    ------
    UserError
        When the disk is full. The old file is still there.
    """
    partial = path.with_name(f".{path.name}.partial")
    with room_for(f"{path.name} ({len(data):,} bytes)", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _owned(partial) as file:
            try:
                file.truncate(0)
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def room_for(what: str, folder: Path) -> Iterator[None]:
    """Say in a sentence that a folder has no room, should writing there come to that.

    Raises
    ------
    UserError
        When the disk is full, whichever file of the work inside it was that met its end.
    """
    try:
        yield
    except OSError as err:
        if err.errno not in FULL:
            raise
        raise no_room(what, folder) from err


def no_room(what: str, folder: Path) -> UserError:
    """The mistake that a full disk is."""
    return UserError(
        f"{NO_ROOM} {what} in {folder}; what is finished is kept, so make room there and run it "
        "again"
    )


def tells_of_no_room(text: str) -> bool:
    """Whether what another process said is that a disk is full."""
    return any(said in text for said in (NO_ROOM, *map(os.strerror, FULL)))


def _owned(path: Path) -> FileIO:
    """Open a file that nobody else writes while it is open, made if it is not there."""
    while True:
        file = path.open("ab", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with its process, however that ends
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()  # its last owner has put it in place, or taken it away, meanwhile


def cache_folder() -> Path:
    """For what runs share: ``DRAFTLAYERS_CACHE``, else ``~/.cache/draftlayers``.

    Raises
    ------
    UserError
        When there is neither that variable nor a home.
    """
    if asked := os.environ.get("DRAFTLAYERS_CACHE"):
        return Path(asked).expanduser()
    try:
        return Path.home() / ".cache" / "draftlayers"
    except RuntimeError:
        raise UserError(
            "there is no home folder to keep converted weights in; name a folder with the variable "
            "DRAFTLAYERS_CACHE"
        ) from None


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version()}
    for name in ("draftlayers", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@functools.cache
def code_state() -> dict[str, str | bool | None]:
    """Which commit the project stands at, and whether its tree is clean; None where no git tells.

    Untracked files that git does not ignore count as changes: they may be imported.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != PROJECT:
            raise FileNotFoundError  # a copy without history, inside somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "clean": git("status", "--porcelain") == ""}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "clean": None}
