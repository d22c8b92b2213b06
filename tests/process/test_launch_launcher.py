"""isthmus's own launcher: real ranks, real signals, and nothing left running.

The ranks here import no torch, so each test costs a fraction of a second. They tell the test how
far they are by files in ``run_dir``, and ``on_poll`` acts on what it finds there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from isthmus.elastic.launcher import launch, threads_per_rank
from isthmus.errors import ConfigError, LaunchError

PROLOGUE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from isthmus.elastic.environment import detect
from isthmus.elastic.failures import capture
from isthmus.elastic.signals import StopRequest
from isthmus.errors import ConfigError, Interrupted

run_dir = Path(sys.argv[1])
environment = detect(os.environ)
rank = environment.rank

def arrive(name="arrived"):
    (run_dir / f".{name}-{rank}").write_text(str(os.getpid()))
    (run_dir / f".{name}-{rank}").rename(run_dir / f"{name}-{rank}")

def wait_for(*names):
    while not all((run_dir / name).exists() for name in names):
        time.sleep(0.005)

def wait_forever():
    threading.Event().wait()
"""


@dataclass
class Launched:
    """Runs a script as ranks and keeps what came of it."""

    run_dir: Path
    said: list[str] = field(default_factory=list)
    printed: list[tuple[int, str, str]] = field(default_factory=list)
    code: int = -1

    def __call__(self, script: str, num_ranks: int = 2, **options: Any) -> int:
        file = self.run_dir / "script.py"
        file.write_text(PROLOGUE + textwrap.dedent(script))
        self.code = launch(
            [sys.executable, str(file), str(self.run_dir)],
            num_ranks=num_ranks,
            run_dir=self.run_dir,
            on_output=self.note,
            say=self.said.append,
            **options,
        )
        for process in psutil.process_iter(["cmdline"]):
            assert str(file) not in (process.info["cmdline"] or []), "a rank is left running"
        return self.code

    def note(self, rank: int, stream: str, line: str) -> None:
        self.printed.append((rank, stream, line))

    @property
    def error(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "error.json").read_text())

    def pid(self, rank: int, name: str = "arrived") -> int | None:
        file = self.run_dir / f"{name}-{rank}"
        return int(file.read_text()) if file.exists() else None

    def once_arrived(self, num_ranks: int, act: Callable[[], None]) -> Callable[[], None]:
        """Return an ``on_poll`` that acts once, when all ranks have arrived."""
        done: list[bool] = []

        def poll() -> None:
            if not done and all(self.pid(rank) for rank in range(num_ranks)):
                done.append(True)
                act()

        return poll


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    return Launched(tmp_path)


# --- how ranks begin and what they print ---------------------------------------------------------


def test_ranks_know_their_place(launched: Launched) -> None:
    code = launched(
        """
        e = environment
        print(e.rank, e.world_size, e.local_rank, e.local_world_size, e.master_addr, e.launcher)
        print(f"port {e.master_port}, threads {os.environ['OMP_NUM_THREADS']}", file=sys.stderr)
        """,
        num_ranks=3,
        environ={"PATH": os.environ["PATH"], "TORCHELASTIC_USE_AGENT_STORE": "True"},
    )
    assert code == 0
    out = sorted((rank, text) for rank, stream, text in launched.printed if stream == "stdout")
    assert out == [(rank, f"{rank} 3 {rank} 3 127.0.0.1 isthmus") for rank in range(3)]
    told = {text for _, stream, text in launched.printed if stream == "stderr"}
    assert len(told) == 1, "all ranks have the same port"
    assert told.pop().endswith(f"threads {threads_per_rank(3)}")
    assert any("OMP_NUM_THREADS" in line for line in launched.said)
    assert not (launched.run_dir / "error.json").exists()


def test_threads_of_the_user_are_kept(launched: Launched) -> None:
    environ = dict(os.environ) | {"OMP_NUM_THREADS": "7"}
    assert launched("print(os.environ['OMP_NUM_THREADS'])", 1, environ=environ) == 0
    assert launched.printed == [(0, "stdout", "7")]
    assert launched.said == []


@pytest.mark.parametrize(("num_ranks", "prefix"), [(1, ""), (2, "[rank 0] ")])
def test_output_goes_to_its_own_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_ranks: int, prefix: str
) -> None:
    script = "import os, sys; os.environ['RANK'] == '0' and (print('out'), sys.exit('err'))"
    environ = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    code = launch(
        [sys.executable, "-c", script], num_ranks=num_ranks, run_dir=tmp_path, environ=environ
    )
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == f"{prefix}out\n"
    assert captured.err.startswith(f"{prefix}err\n")


def test_a_last_line_without_an_end_and_odd_bytes_arrive(launched: Launched) -> None:
    assert launched("sys.stdout.buffer.write(b'a\\xff\\nlast')", 1) == 0
    assert [text for _, _, text in launched.printed] == ["a\ufffd", "last"]


def test_much_output_does_not_block(launched: Launched) -> None:
    assert launched("for i in range(20000): print(i); print(i, file=sys.stderr)", 1) == 0
    for name in ("stdout", "stderr"):
        assert [text for _, stream, text in launched.printed if stream == name] == [
            str(number) for number in range(20000)
        ]


# --- failures ------------------------------------------------------------------------------------


def test_an_exception_is_shown_once_and_the_others_end(launched: Launched) -> None:
    code = launched(
        """
        with capture(run_dir, environment) as watch:
            watch.step = 12
            if rank == 1:
                raise ZeroDivisionError("what rank 1 did")
            wait_forever()
        """,
        num_ranks=3,
    )
    assert code == 1
    error = launched.error
    assert (error["rank"], error["kind"], error["step"]) == (1, "ZeroDivisionError", 12)
    assert 'raise ZeroDivisionError("what rank 1 did")' in error["traceback"]
    shown = "\n".join(launched.said)
    assert shown.count("Traceback") == 1
    assert "error: rank 1 on" in shown
    assert "after step 12" in shown
    assert launched.printed == [], "the ranks themselves stay silent"


def test_an_expected_error_is_short_and_keeps_its_exit_code(launched: Launched) -> None:
    code = launched(
        """
        with capture(run_dir, environment):
            if rank == 0:
                raise ConfigError("the batch does not divide", hint="take another")
            wait_forever()
        """
    )
    assert code == ConfigError.exit_code
    shown = "\n".join(launched.said)
    assert "the batch does not divide\nhint: take another" in shown
    assert "Traceback" not in shown
    assert "Traceback" in launched.error["traceback"], "the file keeps what the screen does not"


def test_a_lost_peer_is_not_the_cause_though_it_fails_first(launched: Launched) -> None:
    code = launched(
        """
        with capture(run_dir, environment):
            if rank == 0:
                raise RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:1234")
            wait_for("failures/rank-0.json")
            raise ValueError("the cause")
        """
    )
    assert code == 1
    assert (launched.error["rank"], launched.error["kind"]) == (1, "ValueError")
    assert "the cause" in "\n".join(launched.said)


def test_a_killed_rank_is_named_with_its_signal(launched: Launched) -> None:
    script = """
        if rank == 1:
            print("last words", file=sys.stderr)
        arrive()
        with capture(run_dir, environment):
            if rank == 0:
                import psutil
                wait_for("arrived-1")
                while psutil.pid_exists(int((run_dir / "arrived-1").read_text())):
                    time.sleep(0.005)
                raise RuntimeError("Connection closed by peer")
            wait_forever()
        """

    def kill() -> None:
        os.kill(launched.pid(1) or 0, signal.SIGKILL)

    assert launched(script, on_poll=launched.once_arrived(2, kill)) == 1
    error = launched.error
    assert (error["rank"], error["kind"]) == (1, "SIGKILL")
    assert "memory" in error["hint"]
    assert error["output_tail"] == "last words"


def test_a_silent_exit_is_named_with_its_code_and_last_output(launched: Launched) -> None:
    code = launched(
        """
        if rank == 1:
            print("about to go", file=sys.stderr)
            os._exit(9)
        wait_forever()
        """
    )
    assert code == 9
    assert launched.error["message"] == "ended with exit code 9 and left no record of an error"
    assert "about to go" in "\n".join(launched.said)


def test_a_rank_that_hangs_with_signals_blocked_is_killed(launched: Launched) -> None:
    code = launched(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        arrive()
        with capture(run_dir, environment):
            if rank == 1:
                wait_for("arrived-0")
                raise ValueError("the cause")
            wait_forever()
        """,
        failure_grace_s=0.3,
    )
    assert code == 1
    assert launched.error["message"] == "ValueError: the cause"


def test_a_stopped_rank_is_killed_and_mentioned(launched: Launched) -> None:
    code = launched(
        """
        arrive()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with capture(run_dir, environment):
            import psutil
            wait_for("arrived-1")
            peer = psutil.Process(int((run_dir / "arrived-1").read_text()))
            while peer.status() != psutil.STATUS_STOPPED:
                time.sleep(0.005)
            raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
        """,
        failure_grace_s=0.3,
    )
    assert code == 1
    assert launched.error["rank"] == 0
    assert "hint: rank 1 was stopped (SIGSTOP) at that time" in launched.said


def test_what_ranks_have_started_ends_with_them(launched: Launched) -> None:
    code = launched(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (run_dir / f"child-{rank}").write_text(str(child.pid))
        if rank == 1:
            wait_for("child-0")
            sys.exit(3)
        """
    )
    assert code == 3
    assert [runs(launched.pid(rank, "child") or 0) for rank in range(2)] == [False, False]


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie that its new parent has yet to take away."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_new_start_forgets_the_old_error(launched: Launched) -> None:
    assert launched("sys.exit(4)", 1) == 4
    assert launched.error["attempt"]
    assert launched("pass", 1) == 0
    assert not (launched.run_dir / "error.json").exists()


# --- stopping ------------------------------------------------------------------------------------

STEPS = """
    with capture(run_dir, environment), StopRequest() as stop:
        arrive()
        while not stop.requested:
            time.sleep(0.005)
        (run_dir / f"checkpoint-{rank}").write_text(stop.requested)
        raise Interrupted("stopped")
    """


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGINT, "SIGINT"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_stop_request_reaches_the_ranks(launched: Launched, number: int, name: str) -> None:
    handler = signal.getsignal(number)
    stop = launched.once_arrived(2, lambda: os.kill(os.getpid(), number))
    assert launched(STEPS, on_poll=stop) == 75
    assert [(launched.run_dir / f"checkpoint-{rank}").read_text() for rank in range(2)] == [
        name,
        name,
    ]
    assert signal.getsignal(number) is handler
    assert not (launched.run_dir / "error.json").exists()


def test_a_second_sigterm_changes_nothing(launched: Launched) -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    assert launched(STEPS, on_poll=launched.once_arrived(2, stop)) == 75


def test_a_second_ctrl_c_ends_at_once(launched: Launched) -> None:
    script = """
        signal.signal(signal.SIGINT, lambda *_: arrive("told"))
        arrive()
        while True:
            time.sleep(0.005)
        """

    def press() -> None:
        if all(launched.pid(rank) for rank in range(2)):
            os.kill(os.getpid(), signal.SIGINT)

    assert launched(script, on_poll=press) == 130
    assert "ended at once, without a checkpoint of the last steps" in launched.said


def test_ranks_that_do_not_stop_in_time_are_killed_and_it_is_said(launched: Launched) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        arrive()
        wait_forever()
        """
    stop = launched.once_arrived(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launched(script, on_poll=stop, grace_s=0.3) == 1
    assert "rank 0, 1 did not stop within 0.3 s and was killed" in launched.error["message"]
    assert any("did not stop within" in line for line in launched.said)


def test_a_rank_that_cannot_stop_gently_yet_takes_the_others_along(launched: Launched) -> None:
    script = """
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        arrive()
        wait_forever()
        """
    stop = launched.once_arrived(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launched(script, on_poll=stop, failure_grace_s=0.3) == 75
    assert any("before it could write a checkpoint" in line for line in launched.said)


def test_a_rank_that_is_killed_while_it_stops_has_failed(launched: Launched) -> None:
    code = launched(
        """
        with capture(run_dir, environment), StopRequest() as stop:
            arrive()
            while not stop.requested:
                time.sleep(0.005)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted("stopped")
        """,
        on_poll=launched.once_arrived(2, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    )
    assert code == 1
    assert (launched.error["rank"], launched.error["kind"]) == (1, "SIGKILL")


def test_a_display_that_fails_leaves_nothing_running(launched: Launched) -> None:
    def fail() -> None:
        raise OSError("no such terminal")

    with pytest.raises(OSError, match="no such terminal"):
        launched("arrive(); wait_forever()", on_poll=launched.once_arrived(2, fail))


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    rank = "import os, sys, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    parent = f"""
import sys
from pathlib import Path
from isthmus.elastic.launcher import launch
launch([sys.executable, "-c", {rank!r}], num_ranks=2, run_dir=Path({str(tmp_path)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        ranks = [psutil.Process(pid) for pid in pids]
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


# --- what cannot be started ----------------------------------------------------------------------


def test_bad_requests_are_errors(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="0 ranks asked for"):
        launch(["true"], num_ranks=0, run_dir=tmp_path)
    with pytest.raises(LaunchError, match="cannot start '/no/such/program'"):
        launch(["/no/such/program"], num_ranks=2, run_dir=tmp_path, say=lambda line: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot write to the run directory"):
        launch(["true"], num_ranks=1, run_dir=tmp_path / "file" / "run")


def test_only_the_main_thread_may_launch(tmp_path: Path) -> None:
    caught: list[LaunchError] = []

    def run() -> None:
        try:
            launch(["true"], num_ranks=1, run_dir=tmp_path)
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in caught[0].message


def test_launching_imports_no_torch() -> None:
    script = (
        "import sys, isthmus.elastic, isthmus.elastic.launcher; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_polls_go_on_while_ranks_are_silent(launched: Launched) -> None:
    polls: list[float] = []

    def poll() -> None:
        polls.append(time.monotonic())
        if len(polls) == 3:
            (launched.run_dir / "enough").touch()

    assert launched("wait_for('enough')", on_poll=poll) == 0
