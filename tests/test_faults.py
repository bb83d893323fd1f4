"""Killed, damaged, full, read-only: what is finished is kept, and the rest is made again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from draftlayers import answers, chapters, states, training
from draftlayers.answers import answer_prompts, load_answers, own_causes
from draftlayers.booksite import stage
from draftlayers.chapters import NOTEBOOKS, chapter_code, stale, up_to_date
from draftlayers.current import write_record
from draftlayers.project import FULL, PROJECT, UserError, write_atomically
from draftlayers.prompts import TRAIN, Conversation, read_prompts
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS, RunSpec
from draftlayers.states import collect
from draftlayers.store import INDEX, StateStore
from draftlayers.training import train_head
from tests.helpers import LAYERS, settings, training_data

PROMPTS = read_prompts(TRAIN)[:12]
SPOKEN = [Conversation(str(i), "x", (3, 4, 5 + i), tuple(range(60, 70 + i))) for i in range(12)]
SHORT = settings(epochs=1.0)


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    return training_data(tiny, tmp_path_factory.mktemp("states"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(answers, "GROUP", 3)
    monkeypatch.setattr(states, "SHARD", 3)


def files(folder):
    """Content of every file below a folder, hidden ones included."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- Killed --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Record of the benchmark that kills, cut to what takes seconds."""
    to = tmp_path_factory.mktemp("faults") / "faults.json"
    stages = [word for name in ("answers", "collection", "training") for word in ("--stages", name)]
    command = [sys.executable, str(PROJECT / "benchmarks" / "faults.py"), *stages]
    done = subprocess.run(
        [*command, "--kills", "3", "--files", "1", "--json", str(to)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert to.exists(), done.stderr
    return json.loads(to.read_text())["stages"]


@pytest.mark.parametrize("name", ["answers", "collection", "training"])
def test_a_killed_stage_goes_on_to_what_an_undisturbed_one_leaves(killed, name):
    found = killed[name]
    assert found["differences"] == [] and found["leftovers"] == []
    assert found["kills"] == len(found["moments"]) == 3 and found["killed_around_files"] == 1
    assert all(0 <= moment["share"] <= 1 for moment in found["moments"])


def test_what_differs_or_is_too_much_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    import faults

    for folder in (whole := tmp_path / "whole", other := tmp_path / "other"):
        write_record(folder / "a.json", {"loss": 1.0, "seconds": len(folder.name), "x": [{"a": 1}]})
        save_file({"w": torch.tensor(1.0)}, folder / "b.safetensors", {"ids": "1"})
        (folder / "c").write_bytes(b"c")
    assert faults.compare(other, whole) == ([], [])
    (other / ".d.partial").touch()
    assert faults.compare(other, whole) == ([], [".d.partial"])
    write_record(other / "a.json", {"loss": 1.0, "seconds": 1, "x": [{"a": 2}]})
    assert faults.compare(other, whole)[0] == ["a.json"]
    save_file({"w": torch.tensor(1.0).nextafter(torch.tensor(2.0))}, other / "b.safetensors")
    (other / "c").unlink()
    assert sorted(faults.compare(other, whole)[0]) == ["a.json", "b.safetensors", "c"]


def test_what_a_killed_writer_left_is_taken_over_by_the_next(tmp_path):
    left = tmp_path / ".file.partial"
    left.write_bytes(b"what was longer than what comes now")
    write_atomically(tmp_path / "file", b"new")
    assert files(tmp_path) == {Path("file"): b"new"}


def test_writers_of_one_file_wait_for_each_other(tmp_path):
    script = f"""
from pathlib import Path
from draftlayers.project import write_atomically
for i in range(200):
    write_atomically(Path({str(tmp_path / "file")!r}), bytes([i]) * 5000)
"""
    writers = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        with contextlib.suppress(FileNotFoundError):
            content = (tmp_path / "file").read_bytes()
            seen.add((len(content), len(set(content))))
    assert seen == {(5000, 1)} and all(writer.returncode == 0 for writer in writers)
    assert set(files(tmp_path)) == {Path("file")}


# --- Damaged -------------------------------------------------------------------------------------

DAMAGE = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "cut": lambda whole: whole[:-1],
    "junk": lambda whole: b"\xff\x00 junk" * 50,
    "zeros": lambda whole: bytes(len(whole)),
    "another object": lambda whole: b"{}",
    "no object": lambda whole: b"[]",
    "other tensors": lambda whole: save({"x": torch.zeros(3)}),
}
TENSORS = ["empty", "half", "cut", "junk", "zeros"]
RECORDS = ["empty", "half", "junk", "zeros", "another object", "no object"]


def damage(path, how):
    path.write_bytes(DAMAGE[how](path.read_bytes()))


@pytest.mark.parametrize("how", [*TENSORS, "other tensors"])
def test_damaged_answers_are_found_said_and_written_again(tiny, tmp_path, how):
    path = tmp_path / "answers.safetensors"
    whole = answer_prompts(tiny, PROMPTS[:3], 4, 500, path)
    damage(path, how)
    said: list[str] = []
    assert answer_prompts(tiny, PROMPTS[:3], 4, 500, path, say=said.append) == whole
    assert f"the answers in {path} are damaged" in said[0] and "\n" not in said[0]
    assert load_answers(path, own_causes(tiny)) == whole and set(files(tmp_path)) == {
        Path(path.name)
    }


@pytest.mark.parametrize("how", TENSORS)
def test_a_damaged_shard_is_found_said_and_made_again(tiny, tmp_path, how):
    store = collect(tiny, SPOKEN, [2, 5], tmp_path)
    whole = files(store.folder)
    shards = sorted(store.folder.glob("*.safetensors"))
    times = {path: path.stat().st_mtime_ns for path in shards[1:]}
    damage(shards[0], how)
    with pytest.raises(UserError, match=f"{shards[0]} is damaged"):
        StateStore(store.folder)
    said: list[str] = []
    collect(tiny, SPOKEN, [2], tmp_path, say=said.append)
    assert f"{shards[0]} is damaged" in said[0] and "\n" not in said[0]
    assert files(store.folder) == whole
    assert all(path.stat().st_mtime_ns == then for path, then in times.items())


@pytest.mark.parametrize("how", RECORDS)
def test_a_damaged_index_is_found_said_and_made_again_from_the_shards(tiny, tmp_path, how):
    store = collect(tiny, SPOKEN, [2, 5], tmp_path)
    whole = files(store.folder)
    times = {path: path.stat().st_mtime_ns for path in store.folder.glob("*.safetensors")}
    damage(store.folder / INDEX, how)
    with pytest.raises(UserError, match="no finished collection"):
        StateStore(store.folder)
    said: list[str] = []
    collect(tiny, SPOKEN, [2, 5], tmp_path, say=said.append)
    assert f"{store.folder / INDEX} is damaged" in said[0] and "\n" not in said[0]
    assert files(store.folder) == whole
    assert all(path.stat().st_mtime_ns == then for path, then in times.items())


HEAD = {
    "training.json": RECORDS,
    "config.json": RECORDS,
    "model.safetensors": [*TENSORS, "other tensors"],
}


@pytest.fixture(scope="module")
def head(tiny, data, tmp_path_factory):
    """A finished head."""
    return train_head(data, LAYERS, tiny, SHORT, 0, tmp_path_factory.mktemp("heads") / "head")


@pytest.mark.parametrize(("name", "how"), [(n, how) for n, hows in HEAD.items() for how in hows])
def test_a_damaged_head_is_found_said_and_trained_again(tiny, data, head, tmp_path, name, how):
    folder, other = tmp_path / "head", tmp_path / "other"
    for copy in (folder, other):
        shutil.copytree(head.folder, copy)
    whole = files(other)
    damage(folder / name, how)
    said: list[str] = []
    again = train_head(data, LAYERS, tiny, SHORT, 0, folder, said.append)
    assert said[0].startswith("training head again, because of") and "\n" not in said[0]
    assert again.history == head.history and files(other) == whole
    weights = Path("model.safetensors"), Path("config.json")
    assert all(files(folder)[part] == whole[part] for part in weights)
    assert set(files(folder)) == set(whole)


@pytest.mark.parametrize("how", [*TENSORS, "other tensors"])
def test_a_damaged_checkpoint_is_found_and_training_starts_over(
    tiny, data, head, tmp_path, monkeypatch, how
):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    step = training.Trainer.step

    def dying(self):
        if self.update == 2:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            train_head(data, LAYERS, tiny, SHORT, 0, tmp_path)
    damage(tmp_path / training.CHECKPOINT, how)
    said: list[str] = []
    again = train_head(data, LAYERS, tiny, SHORT, 0, tmp_path, said.append)
    if how != "other tensors":  # of another training: nothing that this one could go on with
        assert "what was saved is damaged" in said[0] and "\n" not in said[0]
    assert again.history == head.history and set(files(tmp_path)) == set(files(head.folder))


# A run whose chapters are finished, as far as anything can tell without executing one: each read a
# parameter and the results of the one before it.


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    root, spec = tmp_path_factory.mktemp("executed"), RunSpec.make("tiny", "smoke")
    for number, chapter in enumerate(CHAPTERS):
        run = Run(spec, root)
        if number:
            run.results(CHAPTERS[number - 1])
        run.write_arrays(chapter, {"rows": torch.arange(5 + number)})
        run.write_results(chapter, {"k": run.spec.k, "number": number})
        notebook = json.loads((NOTEBOOKS / f"{chapter}.ipynb").read_text())
        notebook["metadata"]["papermill"] = {"exception": None}
        write_record(run.path("executed", f"{chapter}.ipynb"), notebook)
        code = chapter_code(NOTEBOOKS / f"{chapter}.ipynb")
        chapters._keep_record(Run(spec, root), chapter, code, [])
    run.begin()
    return run


@pytest.fixture
def finished(executed, tmp_path):
    shutil.copytree(executed.folder, tmp_path / "tiny" / "smoke")
    run = Run(RunSpec.make("tiny", "smoke"), tmp_path)
    assert up_to_date(run)
    return run


@pytest.mark.parametrize(
    ("parts", "how", "others"),
    [
        *((("executed", "04-cka.json"), how, []) for how in RECORDS),
        *((("executed", "04-cka.ipynb"), how, []) for how in TENSORS),
        *((("results", "04-cka.json"), how, ["05-selection"]) for how in RECORDS),
        *((("results", "04-cka.safetensors"), how, ["05-selection"]) for how in TENSORS),
    ],
)
def test_a_damaged_chapter_is_found_and_named(finished, parts, how, others):
    """Those that read its results follow only if they come out differently, which is seen later."""
    before = files(finished.folder)
    damage(finished.path(*parts), how)
    assert stale(finished, "04-cka")
    assert [c for c in CHAPTERS if stale(finished, c)] == ["04-cka", *others]
    after = files(finished.folder)
    assert {name for name in after if after[name] != before[name]} == {Path(*parts)}


# --- Full ----------------------------------------------------------------------------------------


class Disk:
    """A folder with little room."""

    def __init__(self, folder):
        self.folder = folder

    def leave(self, size):
        """Fill all but so many bytes."""
        self.make_room()
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", 0) as file:
            free = os.statvfs(self.folder)
            file.write(bytes(max(0, free.f_bavail * free.f_bsize - size)))

    def make_room(self):
        (self.folder / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def no_room(folder):
    """The one sentence that a full disk is."""
    return pytest.raises(UserError, match=rf"^there is no room left .* in {folder}; what [^\n]*$")


@pytest.mark.parametrize("number", FULL)
def test_no_room_is_one_sentence_wherever_the_system_says_so(tmp_path, monkeypatch, number):
    write_atomically(tmp_path / "file", b"old")

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", full)
    with no_room(tmp_path):
        write_atomically(tmp_path / "file", b"new")
    assert files(tmp_path) == {Path("file"): b"old"}


def test_a_full_disk_stops_answers_between_two_batches(tiny, tmp_path, disk):
    whole = answer_prompts(tiny, PROMPTS, 24, 500, tmp_path / "a.safetensors")
    path = disk.folder / "answers" / "a.safetensors"
    count = 0

    def fill(text):
        nonlocal count
        count += 1
        if count == 2:
            disk.leave(0)

    with no_room(path.parent):
        answer_prompts(tiny, PROMPTS, 24, 500, path, say=fill)
    kept = load_answers(path, own_causes(tiny))
    assert kept == whole[:6] and list(path.parent.iterdir()) == [path]
    disk.make_room()
    said: list[str] = []
    assert answer_prompts(tiny, PROMPTS, 24, 500, path, say=said.append) == whole
    assert said[0].startswith("answered 9 of 12")


def test_a_full_disk_stops_a_collection_between_two_shards(tiny, tmp_path, disk):
    whole = collect(tiny, SPOKEN, [2, 5], tmp_path / "whole")
    shards = []

    def fill(text):
        shards.extend((disk.folder / whole.folder.name).iterdir())
        disk.leave(8192)

    with no_room(disk.folder / whole.folder.name):
        collect(tiny, SPOKEN, [2, 5], disk.folder, say=fill)
    assert len(shards) == 1 and list(shards[0].parent.iterdir()) == shards
    then = shards[0].stat().st_mtime_ns
    disk.make_room()
    collect(tiny, SPOKEN, [2, 5], disk.folder)
    assert files(shards[0].parent) == files(whole.folder)
    assert shards[0].stat().st_mtime_ns == then


def test_a_full_disk_stops_training_and_the_checkpoint_stays(
    tiny, data, head, tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    folder, checkpoint = disk.folder / "head", training.Trainer.checkpoint

    def full(self):
        if self.update == 2:
            disk.leave(8192)
        checkpoint(self)

    with monkeypatch.context() as patch, no_room(folder):
        patch.setattr(training.Trainer, "checkpoint", full)
        train_head(data, LAYERS, tiny, SHORT, 0, folder)
    assert set(files(folder)) == {Path(training.CHECKPOINT)}
    disk.make_room()
    said: list[str] = []
    again = train_head(data, LAYERS, tiny, SHORT, 0, folder, said.append)
    assert said[0].startswith("continuing at update 1") and again.history == head.history
    assert set(files(folder)) == set(files(head.folder))


def test_a_full_disk_keeps_the_results_of_a_chapter(run, disk):
    there = Run(run.spec, disk.folder)
    there.write_results("02-entropy", {"rows": 1})
    disk.leave(0)
    with no_room(there.path("results")):
        there.write_results("02-entropy", {"rows": 2})
    assert there.results("02-entropy")["rows"] == 1
    assert [p.name for p in there.path("results").iterdir()] == ["02-entropy.json"]


def test_a_full_disk_stops_a_chapter_before_its_first_cell(run, disk):
    there = Run(run.spec, disk.folder)
    there.begin()
    disk.leave(0)
    with no_room(there.folder):
        chapters.execute(there, CHAPTERS[0])


@pytest.mark.slow  # whole commands
@pytest.mark.parametrize("size", [0, 8192, 65_536, 1_000_000])
def test_a_command_on_a_full_disk_ends_with_a_sentence(disk, size):
    """However little room there is when it starts, and whoever finds it out."""
    root = disk.folder / "runs"
    root.mkdir()
    disk.leave(size)
    command = [sys.executable, "-m", "draftlayers.cli", "run", "--model", "tiny", "--upto", "01"]
    done = subprocess.run(
        [*command, "--profile", "smoke", "--cores", "1", "--runs", str(root)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "room" in done.stderr and "Traceback" not in done.stdout + done.stderr


# --- Read-only -----------------------------------------------------------------------------------


@pytest.fixture
def read_only(finished):
    """A finished run with its book, where nothing can be written."""
    html = finished.path("site", "html")
    html.mkdir(parents=True)
    (html / "index.html").write_text("the book")
    write_record(html / stage.RECORD, stage.site_causes(stage.site_files(finished)))
    root = finished.folder.parents[1]
    places = [root, *(path for path in root.rglob("*"))]
    if os.geteuid():
        for path in places:
            path.chmod(path.stat().st_mode & ~0o222)
        yield finished
        for path in places:
            path.chmod(path.stat().st_mode | 0o200)
        return
    # The permissions of files mean nothing to root, a read-only mount does.
    for options in (["--bind", str(root), str(root)], ["-o", "remount,bind,ro", str(root)]):
        if subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
    yield finished
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_finished_run_can_be_read_where_nothing_can_be_written(read_only):
    with pytest.raises(OSError):
        (read_only.folder / "new").touch()
    run = Run.stored(read_only.folder)
    assert run.results("05-selection")["number"] == 4 and len(run.arrays("01-hidden-states")) == 1
    assert up_to_date(run)
    command = [sys.executable, "-m", "draftlayers.cli", "book", "--model", "tiny"]
    done = subprocess.run(
        [*command, "--profile", "smoke", "--runs", str(run.folder.parents[1])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run.path("site", "html", "index.html"))


def test_work_for_a_run_that_cannot_be_written_is_refused_in_a_sentence(read_only):
    with pytest.raises(UserError, match=rf"{read_only.folder} cannot be written"), read_only.hold():
        pass
