"""A crash, a loss of power, a full disk at every single call: an older checkpoint is there."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
from checkpoint_states import Value, items_at, on_ranks, same
from faulty_disk import BrokenDisk, CountingDisk, Crash, FullDisk, PowerDisk

from isthmus.checkpoint import Checkpointer, Item, list_checkpoints, verify
from isthmus.checkpoint.disk import Disk
from isthmus.errors import CheckpointError

REMAINS = ("kept", "lost", "zeroed", "truncated", *["mixed"] * 4)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def load_step(directory: Path) -> int:
    """The step that is loaded, whose state must be that of the step, and nothing else was found."""
    value = Value()
    info = Checkpointer(directory).load({"it": Item(value)})
    assert info is not None
    assert info.rejected == ()
    assert same(value.state, items_at(info.step)[1].state)
    return info.step


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A directory with the checkpoints of steps 1 and 2."""
    start = tmp_path / "start"
    for step in (1, 2):
        Checkpointer(start / "checkpoint").save(step, items_at(step)[0])
    return start


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_a_loss_of_power_at_any_call(tmp_path: Path, start: Path, keep_last: int) -> None:
    seen = set()
    for fail_at in itertools.count():
        run = tmp_path / f"run-{fail_at}"
        shutil.copytree(start, run)
        disk = PowerDisk(run, fail_at)
        saved = False
        try:
            checkpointer = Checkpointer(run / "checkpoint", keep_last=keep_last, disk=disk)
            checkpointer.save(3, items_at(3)[0])
            saved = True
        except Crash:
            pass
        for number, how in enumerate(REMAINS):
            after = tmp_path / f"after-{fail_at}-{number}"
            disk.after_power_loss(after, how, seed=number)
            step = load_step(after / "checkpoint")
            assert step == 3 if saved else step in (2, 3)
            seen.add(step)
            assert not [name for name in names_in(after / "checkpoint") if ".tmp-" in name]
            Checkpointer(after / "checkpoint", disk=CountingDisk()).save(4, items_at(4)[0])
            assert load_step(after / "checkpoint") == 4
        if saved:
            break
    deleted = 3 - keep_last
    assert fail_at == 15 + 5 * deleted
    assert seen == {2, 3}


def test_a_loss_of_power_during_the_very_first_save(tmp_path: Path) -> None:
    for fail_at in itertools.count():
        run = tmp_path / f"run-{fail_at}"
        run.mkdir()
        disk = PowerDisk(run, fail_at)
        try:
            Checkpointer(run / "a/checkpoint", disk=disk).save(1, items_at(1)[0])
        except Crash:
            continue
        finally:
            for number, how in enumerate(REMAINS):
                after = tmp_path / f"after-{fail_at}-{number}"
                disk.after_power_loss(after, how, seed=number)
                info = Checkpointer(after / "a/checkpoint").load({"it": Item(Value())})
                assert info is None or info.step == 1
        assert info is not None
        break


def test_a_loss_of_power_while_rank_1_writes(tmp_path: Path, start: Path) -> None:
    """The ranks share the disk's model only through its real directory, so it is plain crashes."""
    for fail_at in itertools.count():
        run = tmp_path / f"run-{fail_at}"
        shutil.copytree(start, run)
        disk = PowerDisk(run, fail_at)

        def save(peers, disk=disk, run=run):
            mine = disk if peers.rank == 1 else None
            items = {**items_at(3)[0], "own": Item(Value(peers.rank), scope="per_rank")}
            disk.done = lambda *_: None
            return Checkpointer(run / "checkpoint", peers=peers, disk=mine).save(3, items)

        results = on_ranks(2, save, deadline_s=0.05)
        if not any(isinstance(result, BaseException) for result in results):
            break
        assert isinstance(results[0], CheckpointError)
        assert isinstance(results[1], Crash)
        assert names_in(run / "checkpoint") == ["step-00000001", "step-00000002"]
    assert fail_at >= 4


def test_a_full_disk_at_any_call(tmp_path: Path, start: Path) -> None:
    total = CountingDisk()
    shutil.copytree(start, tmp_path / "count")
    Checkpointer(tmp_path / "count/checkpoint", keep_last=1, disk=total).save(3, items_at(3)[0])
    failures = 0
    for fail_at in range(len(total.calls)):
        run = tmp_path / f"run-{fail_at}"
        shutil.copytree(start, run)
        before = names_in(run / "checkpoint")
        checkpointer = Checkpointer(run / "checkpoint", keep_last=1, disk=FullDisk(fail_at))
        error = error_of(checkpointer)
        if error is None:
            assert load_step(run / "checkpoint") == 3
            continue
        failures += 1
        assert re.search("No space left on device.* to write and .* are free", error.message)
        assert "Free some space" in error.hint
        assert names_in(run / "checkpoint") == before
        assert load_step(run / "checkpoint") == 2
    assert failures > 8


def error_of(checkpointer: Checkpointer) -> CheckpointError | None:
    try:
        checkpointer.save(3, items_at(3)[0])
    except CheckpointError as error:
        return error
    return None


def test_one_failing_call_anywhere(tmp_path: Path, start: Path) -> None:
    """Whatever fails once, a save either succeeds with a note or raises and leaves the old ones."""
    outcomes = set()
    for fail_at in itertools.count():
        run = tmp_path / f"run-{fail_at}"
        shutil.copytree(start, run)
        disk = BrokenDisk(fail_at)
        checkpointer = Checkpointer(run / "checkpoint", keep_last=1, disk=disk)
        error = error_of(checkpointer)
        step = load_step(run / "checkpoint")
        if error is not None:
            outcomes.add("raised")
            assert "Input/output error" in error.message
            assert step in (2, 3)
            continue
        outcomes.add("saved")
        assert step == 3
        assert verify(run / "checkpoint/step-00000003").ok
        if len(disk.calls) <= fail_at:
            break
    assert outcomes == {"raised", "saved"}


def test_what_could_not_be_deleted_is_noted(tmp_path: Path, start: Path) -> None:
    class CannotDelete(Disk):
        def unlink(self, path: Path) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    checkpointer = Checkpointer(start / "checkpoint", keep_last=1, disk=CannotDelete())
    info = checkpointer.save(3, items_at(3)[0])
    assert info.notes == tuple(
        f"step-0000000{step} could not be deleted: Operation not permitted" for step in (1, 2)
    )
    assert [info.step for info in list_checkpoints(start / "checkpoint")] == [3]


def test_only_what_we_named_is_swept(tmp_path: Path, start: Path) -> None:
    directory = start / "checkpoint"
    ours = directory / f"step-00000009.tmp-{'0a' * 16}"
    ours.mkdir()
    (ours / "shared-00000.safetensors").write_bytes(b"half")
    for name in ("step-00000009.tmp-short", "tmp", f"other-{'0a' * 16}", "step-9.tmp"):
        (directory / name).mkdir()
    before = names_in(directory)
    Checkpointer(directory)
    assert names_in(directory) == [name for name in before if name != ours.name]


def test_what_a_living_process_writes_is_not_swept(tmp_path: Path, start: Path) -> None:
    directory = start / "checkpoint"

    class Meddling(CountingDisk):
        def done(self, name, args, result) -> None:
            if name == "sync":
                Checkpointer(directory)

    Checkpointer(directory, disk=Meddling()).save(3, items_at(3)[0])
    assert load_step(directory) == 3


def test_left_overs_that_cannot_be_swept_are_reported(tmp_path: Path, start: Path) -> None:
    directory = start / "checkpoint"
    ours = directory / f"step-00000009.tmp-{'0a' * 16}"
    (ours / "a directory of somebody else").mkdir(parents=True)
    checkpointer = Checkpointer(directory)
    info = checkpointer.save(3, items_at(3)[0])
    assert ours.name in info.notes[0]
    assert checkpointer.save(4, items_at(4)[0]).notes == ()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, items_at(1)[0])
    checkpointer.load(items_at(1)[0])
    with pytest.raises(CheckpointError):
        checkpointer.save(1, items_at(1)[0])
    assert set(os.listdir("/proc/self/fd")) == before


def test_old_ones_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in range(1, 6):
        checkpointer.save(step, items_at(step)[0])
        kept = [info.step for info in list_checkpoints(tmp_path)]
        assert kept == list(range(max(1, step - 1), step + 1))


def test_the_only_good_one_is_kept(tmp_path: Path) -> None:
    """Newer directories without a valid manifest do not count as checkpoints that are kept."""
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, items_at(1)[0])
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}").mkdir()
    with pytest.raises(CheckpointError, match="No space"):
        Checkpointer(tmp_path, keep_last=1, disk=FullDisk(0)).save(4, items_at(4)[0])
    value = Value()
    info = Checkpointer(tmp_path).load({"it": Item(value)})
    assert info is not None
    assert info.step == 1
    assert [rejected.path.name for rejected in info.rejected] == [
        "step-00000003.bad-missing",
        "step-00000002.bad-missing",
    ]


def test_steps_must_grow(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, items_at(5)[0])
    for step in (5, 4):
        with pytest.raises(CheckpointError, match=r"step \d cannot be saved .* has step 5"):
            checkpointer.save(step, items_at(step)[0])
    assert names_in(tmp_path) == ["step-00000005"]


def test_a_directory_without_a_manifest_makes_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").mkdir()
    Checkpointer(tmp_path).save(5, items_at(5)[0])
    assert names_in(tmp_path) == ["step-00000005", "step-00000005.bad-manifest"]
    assert load_step(tmp_path) == 5
