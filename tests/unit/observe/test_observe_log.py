"""The event log keeps what was written, and one torn line costs that line alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError, IsthmusError
from isthmus.observe import (
    Event,
    EventLog,
    Notice,
    QueuedSink,
    Step,
    events_path,
    follow,
    read_events,
    read_run,
)
from isthmus.observe.events import encode_event

NOTICES = [Notice(time_s=float(i), rank=0, message="ü" * i) for i in range(6)]
LINES = [encode_event(notice) for notice in NOTICES]


def notice(message: str = "careful", *, once_key: str = "") -> Notice:
    return Notice(time_s=1.0, rank=0, message=message, once_key=once_key)


def test_an_event_is_in_the_file_as_soon_as_it_is_emitted(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    path = events_path(tmp_path, 3)
    log = EventLog(path)
    for step in range(1, 4):
        log.emit(make_step(step))
        # Another open file, as after a kill: nothing waits in this process.
        assert read_events(path).events == [make_step(s) for s in range(1, step + 1)]
    log.close()
    assert path == tmp_path / "events" / "rank-00003.jsonl"


def test_a_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for event in NOTICES:
        with EventLog(path) as log:
            log.emit(event)
    assert read_events(path).events == NOTICES
    assert b"\n\n" not in path.read_bytes()


@given(cut=st.integers(0, sum(map(len, LINES))))
def test_a_log_cut_anywhere_keeps_all_whole_lines_and_can_be_continued(cut: int) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "log.jsonl"
        data = b"".join(LINES)[:cut]
        path.write_bytes(data)
        whole = NOTICES[: data.count(b"\n")]
        assert read_events(path).events == whole
        assert read_events(path).num_damaged == 0

        # A cut that took only the newline left a sound event behind.
        last = data.rpartition(b"\n")[2]
        is_sound = bool(last) and last + b"\n" in LINES
        mended = NOTICES[: len(whole) + 1] if is_sound else whole
        with EventLog(path) as log:
            log.emit(notice("after"))
        reading = read_events(path)
        assert reading.events == [*mended, notice("after")]
        assert reading.num_damaged == (1 if last and not is_sound else 0)


@given(st.lists(st.integers(1, 60)))
def test_following_a_growing_file_gives_each_event_once(sizes: list[int]) -> None:
    data = b"".join(LINES)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "log.jsonl"
        tail = follow(path)
        assert tail.poll() == []  # the file is not there yet
        seen: list[Event] = []
        with path.open("wb", buffering=0) as file:
            for size in sizes:
                file.write(data[:size])
                data = data[size:]
                seen += tail.poll()
            file.write(data)
        assert [*seen, *tail.poll()] == NOTICES
        assert tail.poll() == []


def test_following_can_leave_out_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert follow(path, skip_existing=True).poll() == []
    path.write_bytes(LINES[0] + b'{"event":"torn')
    tail = follow(path, skip_existing=True)
    with EventLog(path) as log:
        log.emit(notice("new"))
    assert tail.poll() == [notice("new")]
    assert tail.num_damaged == 0


def test_unknown_and_damaged_lines_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    unknown = b'{"event":"link_switched","time_s":1,"rank":0}\n'
    path.write_bytes(b"\x00\xff\n" + LINES[1] + unknown + b'{"event":"step"}\n\n' + LINES[2])
    reading = read_events(path)
    assert reading.events == NOTICES[1:3]
    assert (reading.num_unknown, reading.num_damaged) == (1, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_with_a_hint() -> None:
    with EventLog(Path("/dev/full")) as log:
        with pytest.raises(IsthmusError, match="No space left") as caught:
            log.emit(notice())
        assert "free some space" in caught.value.hint


def test_after_a_write_cut_short_the_next_event_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    path = tmp_path / "log.jsonl"
    with EventLog(path) as log:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(IsthmusError, match="only 10 of"):
            log.emit(notice("lost"))
        monkeypatch.undo()
        log.emit(notice("kept"))
    reading = read_events(path)
    assert reading.events == [notice("kept")]
    assert reading.num_damaged == 1


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file, not a folder")
    with pytest.raises(IsthmusError, match="cannot be written"):
        EventLog(events_path(tmp_path, 0))


def test_a_closed_log_takes_nothing_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.emit(notice())


def test_a_notice_with_a_key_is_given_once(tmp_path: Path) -> None:
    seen: list[Event] = []
    path = tmp_path / "log.jsonl"
    with EventLog(path, subscribers=[seen.append]) as log:
        for key in ("a", "b", "a", "", ""):
            log.emit(notice(once_key=key))
    assert [event.once_key for event in seen if isinstance(event, Notice)] == ["a", "b", "", ""]
    assert read_events(path).events == seen


def test_a_subscriber_that_raises_is_removed_and_the_log_says_so(tmp_path: Path) -> None:
    calls: list[Event] = []
    seen: list[Event] = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise BrokenPipeError("gone")

    path = tmp_path / "log.jsonl"
    with EventLog(path, subscribers=[broken, seen.append]) as log:
        log.emit(notice("first"))
        log.emit(notice("second"))
    assert calls == [notice("first")]
    messages = [event.message for event in read_events(path).events if isinstance(event, Notice)]
    assert len(messages) == 3
    assert messages[0] == "first"
    assert "broken failed" in messages[1]
    assert "BrokenPipeError: gone" in messages[1]
    assert messages[2] == "second"
    assert set(map(repr, seen)) == set(map(repr, read_events(path).events))


def test_subscribers_see_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    on_disk: list[int] = []
    log = EventLog(path, subscribers=[lambda _: on_disk.append(len(read_events(path).events))])
    for event in NOTICES:
        log.emit(event)
    log.close()
    assert on_disk == [1, 2, 3, 4, 5, 6]


def test_closing_records_what_a_sink_lost(tmp_path: Path) -> None:
    class Broken:
        def write(self, event: Event) -> None:
            raise OSError("quota")

        def close(self) -> None:
            pass

    path = tmp_path / "log.jsonl"
    with EventLog(path, subscribers=[QueuedSink(Broken(), name="remote")]) as log:
        log.emit(notice("first"))
    last = read_events(path).events[-1]
    assert isinstance(last, Notice)
    assert last.message == "remote lost 1 of 1 events: OSError: quota"


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def emit(name: str) -> None:
        for index in range(200):
            log.emit(notice(f"{name} {index}"))

    with EventLog(path) as log:
        threads = [threading.Thread(target=emit, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reading = read_events(path)
    assert reading.num_damaged == 0
    assert len({repr(event) for event in reading.events}) == 800


def test_emitting_from_within_a_subscriber_does_not_deadlock(tmp_path: Path) -> None:
    """As a signal handler would that runs while the main thread is in the log."""
    log = EventLog(tmp_path / "log.jsonl", subscribers=[lambda event: answer(event)])

    def answer(event: Event) -> None:
        if event == notice("ask"):
            log.emit(notice("answer"))

    log.emit(notice("ask"))
    log.close()
    assert read_events(log.path).events == [notice("ask"), notice("answer")]


def test_ranks_are_merged_by_time_and_keep_their_own_order(
    write_run: Callable[[Iterable[Event]], Path],
) -> None:
    times = {0: [1.0, 4.0, 2.0, 9.0], 1: [2.5, 3.0, 8.0]}  # rank 0's clock was set back
    events = [
        Notice(time_s=time_s, rank=rank, message="")
        for rank, moments in times.items()
        for time_s in moments
    ]
    merged = read_run(write_run(events)).events
    for rank, moments in times.items():
        assert [event.time_s for event in merged if event.rank == rank] == moments
    assert [event.time_s for event in merged][:3] == [1.0, 2.5, 3.0]


def test_a_missing_or_wrong_run_directory_is_an_error_with_a_hint(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no", "no run directory"), (tmp_path, "no event log")):
        with pytest.raises(ConfigError, match=message) as caught:
            read_run(path)
        assert caught.value.hint
    with pytest.raises(ConfigError, match="no event log"):
        read_events(tmp_path / "rank-00000.jsonl")
