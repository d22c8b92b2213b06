"""A warm pool of rank processes, shared by all process tests of one pytest session.

``import torch`` costs seconds of CPU time a process. So one fork server imports it once and every
rank is forked from there in milliseconds, also the ones that replace a rank that a test has killed.
Each call forms a process group of its own; nothing of one call is left for the next: the group,
the environment, the signal handlers, the seeds and the threads' number are put back.

A test never hangs here: a rank that raises, dies or outlives ``timeout_s`` ends the call, and the
error names the rank and carries its traceback, or the stacks of all its threads.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_RANKS = 4
DUMP_SIGNAL = signal.SIGQUIT
AFTERMATH_S = 5.0
"""How long the peers of a failed rank may take to notice before they are killed."""

RankFunction = Callable[..., Any]


class RankDied(RuntimeError):
    """A rank ended without answering."""


class RankHung(TimeoutError):
    """A rank did not answer in time."""


@dataclass(frozen=True)
class Call:
    """What a rank is asked to do; ``arguments`` is unpickled after the module was imported."""

    module: str
    file: str
    function: str
    arguments: bytes
    rank: int
    world_size: int
    store_file: str | None
    group_timeout_s: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a rank says: a result, or an error with its traceback and the time it happened."""

    result: bytes | None = None
    error: bytes | None = None
    error_text: str = ""
    failed_at_s: float = 0.0
    lost_peer: bool = False


class Rank:
    """The parent's end of one rank process."""

    def __init__(self, number: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.number = number
        self.output = directory / f"rank-{number}-{time.monotonic_ns()}.log"
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=serve, args=(theirs, str(self.output)), name=f"rank {number}", daemon=True
        )
        self.process.start()
        theirs.close()

    def tail(self, nbytes: int = 6000) -> str:
        """Return the end of what the rank has written, stacks included."""
        text = self.output.read_bytes() if self.output.exists() else b""
        return text[-nbytes:].decode(errors="replace").strip() or "(it wrote nothing)"

    def written_nbytes(self) -> int:
        """Return how much the rank has written to its output."""
        return self.output.stat().st_size if self.output.exists() else 0

    def dump_stacks(self) -> str:
        """Ask a live rank for the stacks of all its threads and return its output."""
        sizes = [self.written_nbytes()]
        with suppress(OSError):
            os.kill(self.process.pid or 0, DUMP_SIGNAL)
        give_up_at = time.monotonic() + 3
        while time.monotonic() < give_up_at:
            time.sleep(0.05)
            sizes.append(self.written_nbytes())
            if sizes[-1] == sizes[-2] > sizes[0]:
                break
        return self.tail()

    def end(self) -> None:
        """Kill the process, if need be, and take it away."""
        self.connection.close()
        self.process.kill()
        self.process.join(10)
        self.process.close()


class RankPool:
    """Runs functions on ``world_size`` ranks at a time; see the module's docstring."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="isthmus-ranks-")
        self._ranks: dict[int, Rank] = {}
        self._calls = itertools.count()
        self.own_resources: set[str] = set()
        """Sockets, pipes and processes of the pool, as tests/conftest.py names them."""

    def run(
        self,
        fn: RankFunction,
        world_size: int,
        *,
        timeout_s: float = 60,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, **kwargs)`` on every rank and return the results by rank.

        Args:
            fn: A function at the top level of a test module (or of any module).
            world_size: Number of ranks, 1 to 4.
            timeout_s: From here until the last rank has answered.
            process_group: Whether a default gloo group is formed before and destroyed after.
            kwargs: Passed to every rank; must pickle.

        Raises:
            RankDied: A rank ended without an answer.
            RankHung: A rank did not answer in time.
            Exception: What a rank raised, the first one's, with its remote traceback as a note.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"the pool has 1 to {MAX_RANKS} ranks, asked for {world_size}")
        ranks = self._grow(world_size)
        calls = self._calls_for(fn, world_size, timeout_s, process_group, kwargs)
        try:
            for rank, call in zip(ranks, calls, strict=True):
                with suppress(BrokenPipeError):
                    rank.connection.send(call)
            return self._collect(ranks, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self._discard_busy(ranks)
            raise

    def close(self) -> None:
        """End all ranks."""
        for number in list(self._ranks):
            self._ranks.pop(number).end()
        self._directory.cleanup()

    def _grow(self, world_size: int) -> list[Rank]:
        for number, rank in list(self._ranks.items()):
            if not rank.process.is_alive():
                self._ranks.pop(number).end()
        missing = [number for number in range(world_size) if number not in self._ranks]
        if missing:
            before = descriptors()
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.functional"])
            for number in missing:
                self._ranks[number] = Rank(number, Path(self._directory.name))
            self.own_resources |= (descriptors() - before) | helper_processes()
        return [self._ranks[number] for number in range(world_size)]

    def _calls_for(
        self,
        fn: RankFunction,
        world_size: int,
        timeout_s: float,
        process_group: bool,
        kwargs: Mapping[str, Any],
    ) -> list[Call]:
        module = sys.modules[fn.__module__]
        if getattr(module, fn.__qualname__, None) is not fn:
            raise TypeError(f"{fn.__qualname__} must be a function at the top level of its module")
        store_file = f"{self._directory.name}/store-{next(self._calls)}" if process_group else None
        return [
            Call(
                module=fn.__module__,
                file=module.__file__ or "",
                function=fn.__qualname__,
                arguments=pickle.dumps(dict(kwargs)),
                rank=rank,
                world_size=world_size,
                store_file=store_file,
                group_timeout_s=timeout_s + 30,  # the pool's own timeout comes first and says more
                sys_path=tuple(sys.path),
            )
            for rank in range(world_size)
        ]

    def _collect(self, ranks: list[Rank], deadline: float, timeout_s: float) -> list[Any]:
        answers: dict[int, Answer] = {}
        died: dict[int, str] = {}
        while len(answers) + len(died) < len(ranks):
            waiting = {
                rank.connection: rank
                for rank in ranks
                if rank.number not in answers and rank.number not in died
            }
            ready = multiprocessing.connection.wait(
                list(waiting), max(0.0, deadline - time.monotonic())
            )
            failed_before = bool(died) or any(answer.error for answer in answers.values())
            if not ready:
                if failed_before:
                    break
                raise RankHung(hang_report(list(waiting.values()), timeout_s))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank.number] = rank.connection.recv()
                except (EOFError, ConnectionResetError):
                    died[rank.number] = death_report(rank)
            failed_now = bool(died) or any(answer.error for answer in answers.values())
            if failed_now and not failed_before:
                deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        if died:
            raise RankDied("\n".join(died.values()))
        raise_first_error(answers)
        return [pickle.loads(answers[rank.number].result or b"") for rank in ranks]

    def _discard_busy(self, ranks: list[Rank]) -> None:
        """End the ranks of a call that went wrong: forking new ones is cheaper than doubt."""
        for rank in ranks:
            self._ranks.pop(rank.number, None)
            rank.end()


def descriptors() -> set[str]:
    """Return the sockets and pipes that this process has open, by inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith(("socket:", "pipe:"))}


def helper_processes() -> set[str]:
    """Return the fork server and multiprocessing's resource tracker: they end with the session."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return {f"process {pid}" for pid in (server, tracker) if pid}


def death_report(rank: Rank) -> str:
    rank.process.join(10)
    code = rank.process.exitcode
    how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"code {code}"
    return f"rank {rank.number} ended ({how}) without an answer; its last output:\n{rank.tail()}"


def hang_report(ranks: list[Rank], timeout_s: float) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    stacks = "\n".join(f"--- rank {rank.number}\n{rank.dump_stacks()}" for rank in ranks)
    return f"rank {numbers} did not answer within {timeout_s} s; stacks:\n{stacks}"


def raise_first_error(answers: Mapping[int, Answer]) -> None:
    """Raise what the first failing rank raised; one that only lost a peer comes after others."""
    failed = {number: answer for number, answer in answers.items() if answer.error is not None}
    if not failed:
        return
    first = min(failed, key=lambda number: (failed[number].lost_peer, failed[number].failed_at_s))
    error: Exception = pickle.loads(failed[first].error or b"")
    error.add_note(f"on rank {first} of ranks {sorted(failed)} that failed:")
    error.add_note(failed[first].error_text)
    raise error


# --- in the rank processes -------------------------------------------------------------------


def serve(connection: Connection, output: str) -> None:
    """Answer calls until the connection closes."""
    die_with_parent()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.setsid()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    import torch

    torch.set_num_threads(1)
    environ = dict(os.environ)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        answer = perform(call)
        os.environ.clear()
        os.environ.update(environ)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        connection.send(answer)


def die_with_parent() -> None:
    """Have the kernel kill this process when the fork server goes."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def perform(call: Call) -> Answer:
    import torch

    try:
        fn = getattr(load_module(call), call.function)
        kwargs = pickle.loads(call.arguments)
        torch.manual_seed(0)
        if call.store_file is not None:
            form_group(call, call.store_file)
        return Answer(result=pickle.dumps(fn(call.rank, call.world_size, **kwargs)))
    except BaseException as error:
        return failure(error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


def form_group(call: Call, store_file: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_file, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.group_timeout_s),
    )
    dist.barrier()  # a rank that is done at once must not leave while another still connects


def load_module(call: Call) -> ModuleType:
    """Import the test's module as pytest did, or from its file where pytest did otherwise."""
    sys.path.extend(entry for entry in call.sys_path if entry not in sys.path)
    if call.module in sys.modules:
        return sys.modules[call.module]
    spec = importlib.util.find_spec(call.module) if "." not in call.module else None
    if spec is None or spec.origin != call.file:
        with suppress(ImportError):
            module = importlib.import_module(call.module)
            if module.__file__ == call.file:
                return module
        spec = importlib.util.spec_from_file_location(call.module, call.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {call.module} at {call.file}")
    module = sys.modules[call.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def failure(error: BaseException) -> Answer:
    text = "".join(traceback.format_exception(error))
    lost_peer = type(error).__name__ in {"DistNetworkError", "DistBackendError"} or any(
        words in str(error)
        for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )
    carried: BaseException = error if isinstance(error, Exception) else RankDied(repr(error))
    try:
        pickled = pickle.dumps(carried)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Answer(error=pickled, error_text=text, failed_at_s=time.monotonic(), lost_peer=lost_peer)
