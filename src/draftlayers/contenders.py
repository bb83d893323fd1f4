"""The heads that a run compares: their layer sets and folders, and those that ship.

Used by chapters 06 and 07 and by the heads' own jobs. What they learn from is collected in
``training_data``; how one is trained belongs to ``training``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlayers.current import read_record
from draftlayers.project import DATA, UserError
from draftlayers.runs import Run
from draftlayers.targets import Target


def planned_sets(run: Run) -> dict[str, tuple[int, ...]]:
    """The layer sets that chapter 06 compares, by name: the default rule's and the chosen one."""
    selection = run.results("05-selection")
    sets = {"default": tuple(selection["layers"]["default"])}
    chosen = tuple(selection["chosen"]["layers"])
    return sets if chosen in sets.values() else {**sets, "chosen": chosen}


def planned_heads(run: Run) -> list[str]:
    """Names of the heads that chapter 06 will ask for, as ``head_folder`` makes them."""
    seeds = range(run.spec.seed, run.spec.seed + run.spec.seeds)
    return [head_folder(run, ls, s).name for ls in planned_sets(run).values() for s in seeds]


def head_folder(run: Run, layers: Sequence[int], seed: int) -> Path:
    """Where a run keeps the head of a layer set and seed; ``parse_head_name`` reads its name."""
    return run.path("heads", f"{'-'.join(map(str, layers))}-s{seed}")


def parse_head_name(name: str) -> tuple[tuple[int, ...], int]:
    """Layers and seed of a head, from the name of its folder.

    Raises
    ------
    UserError
        When it is no such name.

    >>> parse_head_name("2-15-27-s0")
    ((2, 15, 27), 0)
    """
    layers, _, seed = name.rpartition("-s")
    try:
        return tuple(int(b) for b in layers.split("-")), int(seed)
    except ValueError:
        raise UserError(f"{name!r} names no head: expected a name such as 2-15-27-s0") from None


def shipped_head(run: Run, target: Target, layers: Sequence[int]) -> Path | None:
    """Folder of the head for a layer set that ships with the project; None if there is none.

    It was trained far longer than a run's own, on this very target: a head for other weights of
    the same name is left alone.
    """
    folder = shipped_place(target, layers)
    files = [run.uses(folder / name) for name in ("model.safetensors", "config.json")]
    causes = (read_record(run.uses(folder / "training.json")) or {}).get("causes") or {}
    theirs = causes.get("target") == target.digest
    return folder if theirs and all(path.exists() for path in files) else None


def shipped_place(target: Target, layers: Sequence[int]) -> Path:
    """Where the head for a layer set lies in the project, if one ships."""
    return DATA / "heads" / Path(target.name).name / "-".join(map(str, layers))
