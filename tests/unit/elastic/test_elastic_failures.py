"""Records of failures, and which of them is the cause."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.elastic import failures
from isthmus.elastic.environment import RankEnvironment
from isthmus.elastic.failures import Failure, Watch, capture, cause, lost_peer, read_all, settle
from isthmus.errors import CheckpointError, ConfigError, Interrupted

ALONE = RankEnvironment.single()
TORCHRUN = replace(ALONE, launcher="torchrun", attempt="torchrun-a", master_port=1)
OWN = replace(ALONE, launcher="isthmus", attempt="launch-a", master_port=1)


def failure(rank: int, time_s: float = 0.0, *, lost: bool = False, attempt: str = "a") -> Failure:
    return Failure(
        attempt=attempt,
        time_s=time_s,
        rank=rank,
        host="here",
        pid=1,
        kind="ValueError",
        message=f"of rank {rank}",
        lost_peer=lost,
    )


def written(run_dir: Path, found: Failure) -> Failure:
    failures.write(run_dir / "failures" / f"rank-{found.rank}.json", found)
    return found


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), min_size=1, max_size=8))
def test_the_cause_is_the_earliest_that_is_no_lost_peer(cases: list[tuple[float, bool]]) -> None:
    all_of_them = [failure(rank, time_s, lost=lost) for rank, (time_s, lost) in enumerate(cases)]
    found = cause(all_of_them)
    assert found is not None
    eligible = [one for one in all_of_them if not one.lost_peer] or all_of_them
    assert found in eligible
    assert found.time_s == min(one.time_s for one in eligible)


def test_nothing_failed_nothing_is_written(tmp_path: Path) -> None:
    assert settle(tmp_path, "a") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_settle_on_the_cause_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    records = [failure(0, 1.0, lost=True), failure(1, 3.0), failure(2, 2.0)]
    for number in order:
        written(tmp_path, records[number])
        settle(tmp_path, "a")
    assert json.loads((tmp_path / "error.json").read_text())["rank"] == 2


def test_a_record_that_comes_while_another_is_written_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes its record and its error.json just before rank 0 writes its own."""
    written(tmp_path, failure(0, lost=True))
    write, late = failures.write, [failure(1, 5.0)]

    def interrupted_write(path: Path, found: Failure) -> None:
        if path.name == "error.json" and late:
            write(tmp_path / "error.json", written(tmp_path, late.pop()))
        write(path, found)

    monkeypatch.setattr(failures, "write", interrupted_write)
    found = settle(tmp_path, "a")
    assert found is not None
    assert found.rank == 1
    assert json.loads((tmp_path / "error.json").read_text())["rank"] == 1


def test_records_of_another_start_and_broken_ones_do_not_count(tmp_path: Path) -> None:
    written(tmp_path, failure(0, attempt="before"))
    (tmp_path / "failures" / "rank-1.json").write_text('{"half": ')
    assert read_all(tmp_path, "a") == []
    kept = written(tmp_path, failure(2))
    assert read_all(tmp_path, "a") == [kept]


def test_a_new_start_removes_the_old_error_only(tmp_path: Path) -> None:
    written(tmp_path, failure(0))
    settle(tmp_path, "a")
    failures.begin(tmp_path, "a")
    assert (tmp_path / "error.json").exists(), "another rank of this start may have failed already"
    failures.begin(tmp_path, "b")
    assert not (tmp_path / "error.json").exists()


# --- capture -------------------------------------------------------------------------------------


def test_elsewhere_the_error_goes_on_and_error_json_is_there(tmp_path: Path) -> None:
    def fail(watch: Watch) -> None:
        watch.step = 3
        raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError), capture(tmp_path, TORCHRUN) as watch:
        fail(watch)
    error = msgspec.json.decode((tmp_path / "error.json").read_bytes(), type=Failure)
    assert (error.rank, error.step, error.message) == (0, 3, "ZeroDivisionError: oh")
    assert "in test_elsewhere" in error.traceback
    assert not error.expected


def test_under_the_own_launcher_a_rank_ends_with_the_errors_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, capture(tmp_path, OWN):
        raise ConfigError("wrong", hint="mend it")
    assert ended.value.code == 2
    (found,) = read_all(tmp_path, "launch-a")
    assert (found.expected, found.hint, found.exit_code) == (True, "mend it", 2)
    assert not (tmp_path / "error.json").exists(), "the launcher writes it, when all have ended"


def test_interrupted_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, capture(tmp_path, OWN):
        raise Interrupted("stopped")
    assert ended.value.code == 75
    with pytest.raises(Interrupted), capture(tmp_path, TORCHRUN):
        raise Interrupted("stopped")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("code", [None, 0, 75])
def test_a_good_exit_is_no_failure(tmp_path: Path, code: int | None) -> None:
    with pytest.raises(SystemExit), capture(tmp_path, OWN):
        sys.exit(code)
    assert read_all(tmp_path, "launch-a") == []


def test_a_bad_exit_is_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), capture(tmp_path, OWN):
        sys.exit("no more")
    (found,) = read_all(tmp_path, "launch-a")
    assert found.message == "the program called exit('no more')"


def test_a_disk_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failures").write_text("a file where the directory should be")
    with pytest.raises(SystemExit), capture(tmp_path, OWN):
        raise ZeroDivisionError("oh")
    said = capsys.readouterr().err
    assert "could not record a failure" in said
    assert "ZeroDivisionError: oh" in said


def test_torchrun_gets_the_file_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "torchelastic.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ConfigError), capture(tmp_path, TORCHRUN):
        raise ConfigError("wrong", hint="mend it")
    message = json.loads(file.read_text())["message"]
    assert message["message"].startswith("rank 0 on ")
    assert message["message"].endswith(": wrong (hint: mend it)")
    assert "ConfigError" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_torchrun_is_told_the_cause_also_by_a_rank_that_lost_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "torchelastic.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    sleep, late = failures.time.sleep, [failure(1, 2e9, attempt=TORCHRUN.attempt)]

    def sleep_while_rank_1_fails(seconds: float) -> None:
        written(tmp_path, late.pop())
        sleep(seconds)

    monkeypatch.setattr(failures.time, "sleep", sleep_while_rank_1_fails)
    with pytest.raises(ConnectionError), capture(tmp_path, TORCHRUN):
        raise ConnectionError("gone")
    assert json.loads(file.read_text())["message"]["message"] == "rank 1 on here: of rank 1"
    assert json.loads((tmp_path / "error.json").read_text())["rank"] == 1


# --- what is the loss of a peer ------------------------------------------------------------------


def chained(error: BaseException, cause_of_it: BaseException) -> BaseException:
    error.__cause__ = cause_of_it
    return error


DistNetworkError = type("DistNetworkError", (RuntimeError,), {})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:4"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("Read error [127.0.0.1]:49262: Connection reset by peer"),
        DistNetworkError("failed to recv, got 0 bytes"),
        ConnectionResetError("gone"),
        TimeoutError("waited"),
        chained(ValueError("while handling"), RuntimeError("Broken pipe")),
    ],
)
def test_lost_peers(error: BaseException) -> None:
    assert lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("Connection closed by peer"),
        MemoryError(),
        chained(CheckpointError("no answer from the disk"), TimeoutError("waited")),
    ],
)
def test_errors_of_its_own(error: BaseException) -> None:
    assert not lost_peer(error)


# --- what is shown -------------------------------------------------------------------------------


def test_reports() -> None:
    unexpected = msgspec.structs.replace(failure(3), traceback="Traceback ...\nValueError", step=5)
    assert unexpected.report().splitlines() == [
        "error: rank 3 on here, after step 5: of rank 3",
        "Traceback ...",
        "ValueError",
    ]
    expected = msgspec.structs.replace(unexpected, expected=True, hint="mend it")
    assert expected.report().splitlines()[1:] == ["hint: mend it"]
    nobody = msgspec.structs.replace(expected, rank=None, step=None, hint="")
    assert nobody.report() == "error: of rank 3"
