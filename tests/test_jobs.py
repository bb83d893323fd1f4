"""A command that is stopped or killed leaves nothing behind, and goes on when it is given again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from draftlayers import chapters
from draftlayers.chapters import stale
from draftlayers.project import UserError
from draftlayers.runs import Run
from draftlayers.spec import RunSpec

FIRST = ["--model", "tiny", "--profile", "smoke", "--upto", "01", "--cores", "1"]


def start(root, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "draftlayers.cli", "run", *FIRST, "--runs", str(root), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        # A shell that starts tests in the background lets them, and all below, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def working(root):
    """Processes that name the runs folder, and kernels below them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != os.getpid() and str(root) in " ".join(process.info["cmdline"] or []):
                found += [process, *process.children(recursive=True)]
    return found


def until(condition, seconds):
    """Wait for it, and say whether it came."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(found)


def in_a_chapter(root):
    return any("ipykernel_launcher" in " ".join(p.cmdline()) for p in alive(working(root)))


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_stopped_command_ends_everything_and_says_how_to_go_on(tmp_path):
    stop(tmp_path, signal.SIGINT)


@pytest.mark.slow
def test_a_scheduler_may_stop_a_command(tmp_path):
    stop(tmp_path, signal.SIGTERM)


def stop(root, number):
    """Send a signal to a command that works in a chapter, and look at what becomes of it."""
    command = start(root)
    assert until(lambda: in_a_chapter(root), 60)
    below = [process for process in working(root) if process.pid != command.pid]
    command.send_signal(number)
    assert until(lambda: not alive(below), 2.0), alive(below)
    said, _ = command.communicate(timeout=10)
    assert command.returncode == 128 + number and "the same command goes on" in said
    assert "Traceback" not in said


@pytest.mark.slow  # three whole commands; the refusal alone is in test_spec
def test_a_second_command_is_refused_and_one_after_a_kill_goes_on(tmp_path):
    first = start(tmp_path)
    assert until(lambda: in_a_chapter(tmp_path), 60)
    spec = tmp_path / "tiny" / "smoke" / "spec.json"
    before = spec.read_bytes()
    second = start(tmp_path, "-p", "k=2")
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 2 and "another process is working" in said
    assert spec.read_bytes() == before
    below = [p for p in working(tmp_path) if p.pid != first.pid]
    first.kill()
    assert until(lambda: not alive(below), 3.0), alive(below)
    first.communicate()
    third = start(tmp_path)
    said, _ = third.communicate(timeout=240)
    assert third.returncode == 0, said
    assert not stale(Run(RunSpec.make("tiny", "smoke"), tmp_path), "01-hidden-states")


def test_a_killed_kernel_is_one_sentence_that_names_the_chapter(run, tmp_path, monkeypatch):
    import json
    import shutil

    shutil.copytree(chapters.NOTEBOOKS, tmp_path / "notebooks")
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path / "notebooks")
    path = tmp_path / "notebooks" / "01-hidden-states.ipynb"
    notebook = json.loads(path.read_text())
    cell = next(cell for cell in notebook["cells"] if cell["id"] == "open")
    cell["source"] = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    path.write_text(json.dumps(notebook))
    with pytest.raises(UserError, match=r"01-hidden-states was killed .* memory"):
        chapters.execute(run, "01-hidden-states")


def test_the_file_that_a_killed_command_leaves_is_taken_over_by_the_next(
    run, tmp_path, monkeypatch
):
    """It says how a kernel is reached; without a folder for it, it is a temporary file."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "läufe {x}"))
    for _ in range(2):  # the first one is killed before it cleans up
        manager = chapters._own_kernels(run)()
        manager.write_connection_file()
        (left,) = (tmp_path / "läufe {x}").iterdir()
        assert str(left) == manager.connection_file
    manager.cleanup_connection_file()
    assert not left.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "file" / "no folder"))
    assert chapters._own_kernels(run)().connection_file == ""


@pytest.mark.slow
def test_a_mistake_in_a_chapter_reaches_the_command_as_it_was_said(tmp_path):
    command = start(tmp_path, "-p", "max_prompt_tokens=8")
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 2
    assert "raise max_prompt_tokens" in said and "Traceback" not in said
    assert "snakemake" not in said.lower()
