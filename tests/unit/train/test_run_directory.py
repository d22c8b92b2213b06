"""Which directory a configuration belongs to, and in what state it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.observe.events import RunFinished
from isthmus.observe.log import EventLog, lab_events_path
from isthmus.spec.load import Resolved, load
from isthmus.spec.run import RunSpec
from isthmus.train.run_directory import Opened, RunDirectory, Status, open_run


def run_of(*sets: str) -> Resolved[RunSpec]:
    return load(RunSpec, None, ["name=r", *sets])


def open_and_release(resolved: Resolved[RunSpec], root: Path, **options) -> Opened:
    """Open a run in a process of its own, whose end drops the lock, then read what it opened."""
    opened = open_run(resolved, root=root, dry_run=True, **options)
    if opened.status is not Status.FINISHED:
        opened.directory.write_spec(resolved)
    return opened


def finish(directory: RunDirectory) -> None:
    with EventLog(directory.events(0)) as log:
        log.emit(RunFinished(time_s=time.time(), rank=0, step=1, duration_s=1.0))


def test_the_same_configuration_resumes_until_it_is_finished(tmp_path: Path) -> None:
    first = open_and_release(run_of(), tmp_path)
    assert (first.status, first.directory.path.name) == (Status.NEW, "r")
    second = open_and_release(run_of(), tmp_path)
    assert (second.status, second.directory) == (Status.RESUME, first.directory)
    finish(first.directory)
    assert open_and_release(run_of(), tmp_path).status is Status.FINISHED


@pytest.mark.parametrize(
    "setting", ["ranks=4", "checkpoint.every_steps=3", "observe.tensorboard=true"]
)
def test_what_does_not_change_the_learning_resumes(tmp_path: Path, setting: str) -> None:
    open_and_release(run_of(), tmp_path)
    again = open_and_release(run_of(setting), tmp_path)
    assert again.status is Status.RESUME
    assert setting.partition("=")[2] in again.directory.run_toml.read_text()


def test_a_changed_configuration_gets_a_numbered_directory_and_says_what_differs(
    tmp_path: Path,
) -> None:
    open_and_release(run_of(), tmp_path)
    second = open_and_release(run_of("seed=5"), tmp_path)
    assert (second.status, second.directory.path.name) == (Status.NEW, "r-2")
    assert second.differences == [("seed", 0, 5)]
    third = open_and_release(run_of("seed=6"), tmp_path)
    assert third.directory.path.name == "r-3"
    assert open_and_release(run_of("seed=5"), tmp_path).directory == second.directory
    assert open_and_release(run_of(), tmp_path).directory.path.name == "r"


def test_fresh_always_begins_anew(tmp_path: Path) -> None:
    open_and_release(run_of(), tmp_path)
    fresh = open_and_release(run_of(), tmp_path, fresh=True)
    assert (fresh.status, fresh.directory.path.name) == (Status.NEW, "r-2")


def test_an_explicit_directory_of_another_configuration_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    open_and_release(run_of(), tmp_path, explicit=mine)
    with pytest.raises(ConfigError, match="seed: 0 → 7") as caught:
        open_run(run_of("seed=7"), root=tmp_path, explicit=mine)
    assert "--fresh" in caught.value.hint
    assert open_and_release(run_of(), tmp_path, explicit=mine).status is Status.RESUME
    fresh = open_and_release(run_of("seed=7"), tmp_path, explicit=mine, fresh=True)
    assert fresh.directory.path.name == "mine-2"


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("precious")
    opened = open_and_release(run_of(), tmp_path)
    assert opened.directory.path.name == "r-2"


def test_an_unreadable_run_toml_is_not_taken_for_the_same_run(tmp_path: Path) -> None:
    first = open_and_release(run_of(), tmp_path)
    first.directory.run_toml.write_text("[train\n")
    again = open_and_release(run_of(), tmp_path)
    assert again.directory.path.name == "r-2"
    assert "unreadable" in str(again.differences)


def test_a_dry_run_touches_nothing(tmp_path: Path) -> None:
    open_run(run_of(), root=tmp_path / "runs", dry_run=True)
    assert not (tmp_path / "runs").exists()


def test_one_process_at_a_time_and_the_lock_goes_with_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from isthmus.train.run_directory import RunDirectory\n"
        "RunDirectory(Path(sys.argv[1])).lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "r")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid}"):
            RunDirectory(tmp_path / "r").lock()
        holder.kill()
        holder.wait()
    RunDirectory(tmp_path / "r").lock()


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        open_run(run_of(), root=tmp_path, explicit=tmp_path / "file" / "run")
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_where_a_lab_logs_its_faults_is_still_unused(tmp_path: Path) -> None:
    log = lab_events_path(tmp_path / "r")
    log.parent.mkdir(parents=True)
    log.touch()
    opened = open_run(run_of(), root=tmp_path, dry_run=True)
    assert opened.directory.path == tmp_path / "r"
