"""From a call to a picture in a run folder, and again when only its looks have changed.

Used by the notebooks (``draw``) and by whoever makes a book of a finished run (``redraw_stale``,
``figure_of``). A figure ``03-stability`` belongs to chapter 03 and is three files in ``figures/``:
the picture as svg and png, and ``03-stability.safetensors``, the call with the record of its
causes, which comes last and seals the other two. What a figure shows is left to the modules of
the chapters, how it looks to ``style``, how a call becomes a file to ``calls``.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from draftlayers import current
from draftlayers.figures.calls import MODULES, PACKAGE, Call, LostCall
from draftlayers.project import UserError, write_atomically
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS

NAME = re.compile(r"[0-9a-z]+(-[0-9a-z]+)*")


def _code(module: str) -> str:
    return current.code_digest(f"figures.{module}", "figures.style")


# What this process draws with. It is taken here, before any module of drawings is likely to be
# imported: one that is edited while a chapter runs leaves a record of the old code, and its
# figures are drawn again.
_LOADED = {module: _code(module) for module in MODULES}


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawn figure as a notebook shows it: the bytes of its png file, and which figure it is.

    Attributes
    ----------
    name
        Name of the figure, such as ``03-stability``.
    png
        Content of ``figures/<name>.png``.
    """

    name: str
    png: bytes

    def __repr__(self) -> str:
        return f"figure {self.name}"

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Data and metadata of the output; ``figure_of`` reads the name there."""
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": repr(self)}
        return data, {"draftlayers": {"figure": self.name}}


@dataclass(frozen=True)
class Redrawn:
    """What ``redraw_stale`` did, or would do; true when there was anything to do.

    Attributes
    ----------
    drawn
        Names of the figures drawn again.
    lost
        Name of each figure whose saved call cannot be made any more, and why; its pictures are
        as they were.
    """

    drawn: list[str]
    lost: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.drawn or self.lost)

    @property
    def chapters(self) -> list[str]:
        """The chapters that must run again to draw what is lost."""
        numbers = {name[:2] for name in self.lost}
        return [chapter for chapter in CHAPTERS if chapter[:2] in numbers]


def draw(
    run: Run, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Picture:
    """Draw a figure of a run, and keep the call so that it can be drawn again.

    Parameters
    ----------
    run
        The run whose folder gets the files.
    name
        Name of the figure: the number of its chapter and words, such as ``03-stability``.
    function
        Drawing function of a chapter's module in this package.
    *args, **kwargs
        Its arguments: arrays, numbers, strings, None, and lists, tuples and dictionaries of these.
        The function gets them as they are read back, so tensors arrive as arrays.

    Returns
    -------
    Picture
        What the notebook shows, as the last expression of a cell.

    Raises
    ------
    TypeError
        When an argument cannot be saved; the message names it.
    UserError
        When another process holds the run folder.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no figure; use a form such as 03-stability")
    try:
        call = Call.of(function, *args, **kwargs)
    except TypeError as err:
        raise TypeError(f"figure {name}: {err}") from None
    call, _ = Call.read(call.packed({}))  # as it will be read when it is drawn again
    return _write(run, name, call, _render(call.bound()), _LOADED[call.module])


def redraw_stale(run: Run, *, dry: bool = False) -> Redrawn:
    """Draw again every figure of a run whose code, libraries or pictures changed; execute nothing.

    Parameters
    ----------
    run
        The run whose folder is looked through.
    dry
        Only find out, and write nothing.

    Raises
    ------
    UserError
        When a drawing function fails on the arguments that were saved, or another process holds
        the run folder. What was drawn before stays drawn.
    """
    done = Redrawn([], {})
    for path in sorted(run.path("figures").glob("*.safetensors")):
        name = path.stem
        try:
            call, record = Call.read(path.read_bytes())
            code = _code(call.module)
            changed = current.changed(record.get("causes"), _causes(call, code))
            if not changed and _intact(run, name, record):
                continue
            function = call.bound()
        except LostCall as err:
            done.lost[name] = str(err)
            continue
        if not dry:
            try:
                pictures = _render(function)
            except Exception as err:
                raise UserError(
                    f"figure {name} cannot be drawn again ({type(err).__name__}: {err}); mend "
                    f"{PACKAGE}.{call.module}.{call.function}, or run chapter {name[:2]} again"
                ) from err
            _write(run, name, call, pictures, code)
        done.drawn.append(name)
    return done


def figure_of(output: Mapping[str, Any]) -> str | None:
    """Name of the figure that an output of a notebook shows, as nbformat has it; None for others.

    >>> figure_of({"output_type": "execute_result", "metadata": {}, "data": {}})
    """
    mark = output.get("metadata", {}).get("draftlayers", {})
    return mark.get("figure") if isinstance(mark, Mapping) else None


# --- Parts ---------------------------------------------------------------------------------------


def _render(function: Callable[[], Any]) -> dict[str, bytes]:
    """What a call draws as svg and png; the process keeps its own settings."""
    import matplotlib as mpl

    from draftlayers.figures import style  # like matplotlib only when there is something to draw

    with mpl.rc_context():
        style.use_style()
        return style.render(function())


def _causes(call: Call, code: str) -> dict[str, Any]:
    libraries = {name: version(name) for name in ("matplotlib", "seaborn", "numpy")}
    return {"call": call.digest(), "code": code, "libraries": libraries}


def _write(run: Run, name: str, call: Call, pictures: Mapping[str, bytes], code: str) -> Picture:
    """Write the pictures of a figure and then its call, with a record that seals them."""
    digests = {kind: hashlib.sha256(data).hexdigest() for kind, data in pictures.items()}
    record = {"causes": _causes(call, code), "pictures": digests}
    with run.hold():
        for kind, data in pictures.items():
            write_atomically(run.path("figures", f"{name}.{kind}"), data)
        write_atomically(run.path("figures", f"{name}.safetensors"), call.packed(record))
    return Picture(name, pictures["png"])


def _intact(run: Run, name: str, record: Mapping[str, Any]) -> bool:
    """Whether the pictures are there as they were written."""
    for kind, was in record["pictures"].items():
        try:
            data = run.path("figures", f"{name}.{kind}").read_bytes()
        except OSError:
            return False
        if hashlib.sha256(data).hexdigest() != was:
            return False
    return True
