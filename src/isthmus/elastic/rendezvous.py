"""How ranks meet: a store at rank 0, who is there, which interface, then torch's process group.

The store is a TCPStore at rank 0. Where it listens depends on the launcher, and no port is fixed:

- isthmus's own launcher has bound a free port before any rank exists and hands rank 0 the socket;
- torchrun gives MASTER_PORT, and keeps the store in its agent where it says so;
- under SLURM MASTER_PORT is taken if it is set; otherwise rank 0 binds a free port and publishes
  it in the run directory, under the number of the job step, and the others wait for it there.

Then every rank writes its name into the store and waits for all others, so that a rank that never
came is named. Every wait ends with the one deadline that is passed in.

On a machine with CUDA the group is ``cpu:gloo,cuda:nccl`` and ``local_rank`` chooses the device.
That path needs GPUs and is not covered by the tests that run on a CPU.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import MutableMapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from isthmus.elastic import interfaces
from isthmus.elastic.environment import LISTEN_FD, RankEnvironment
from isthmus.elastic.interfaces import Interface
from isthmus.errors import LaunchError
from isthmus.lazy import dist, torch

__all__ = ["DeviceType", "Rendezvous", "rendezvous"]

DeviceType = Literal["cpu", "cuda"]

_POLL_S: Final = 0.05
_SHUTDOWN_S: Final = 5.0
_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


@dataclass(kw_only=True)
class Rendezvous:
    """Ranks that have met: torch's default process group is formed until ``shutdown``.

    A context manager: leaving it shuts down, without waiting for the others after an error.

    Attributes:
        environment: This rank's place.
        address: ``host:port`` of the store, or ``in process`` for a single rank.
        backend: What the process group was formed with.
        interface: What gloo speaks through, and why.
        store: Kept alive here; the other ranks need rank 0's until they have left.
    """

    environment: RankEnvironment
    address: str
    backend: str
    interface: Interface
    store: Any

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown(wait_for_others=error is None)

    def shutdown(self, *, wait_for_others: bool = True, timeout_s: float = _SHUTDOWN_S) -> bool:
        """Leave the process group; never takes longer than about twice ``timeout_s``.

        Rank 0 holds the store, so it first waits until the others have left, unless told not to.

        Returns:
            Whether all went well; False if a wait ran out. Calling it twice does no harm.
        """
        if not dist.is_initialized():
            return True
        all_left = _leave(self.store, self.environment, timeout_s) if wait_for_others else True
        closer = threading.Thread(target=dist.destroy_process_group, daemon=True)
        closer.start()
        closer.join(timeout_s)
        return all_left and not closer.is_alive()


def rendezvous(
    environment: RankEnvironment,
    *,
    run_dir: Path,
    rendezvous_s: float,
    collective_s: float,
    device_type: DeviceType = "cpu",
    environ: MutableMapping[str, str] = os.environ,
) -> Rendezvous:
    """Meet the other ranks and form torch's default process group.

    Args:
        environment: This rank's place, from ``detect`` or ``RankEnvironment.single``.
        run_dir: A directory that all ranks share; used under SLURM without MASTER_PORT.
        rendezvous_s: How long the ranks may take to appear.
        collective_s: How long one collective operation may wait for the others.
        device_type: Where the tensors are.
        environ: Read for ``TORCHELASTIC_USE_AGENT_STORE`` and for the launcher's socket, which is
            taken out; the chosen interface goes into ``GLOO_SOCKET_IFNAME`` there unless the
            user has set one.

    Raises:
        LaunchError: A port is in use, rank 0 cannot be reached, a rank did not come, or gloo could
            not connect; it says who waited for whom.
    """
    deadline = Deadline(rendezvous_s)
    store, address = _open_store(environment, run_dir, deadline, environ)
    peers = _meet(store, environment, deadline)
    interface = _interface(environment, peers, environ)
    backend = _choose_device(environment, device_type)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=collective_s),
            device_id=_device(environment, device_type),
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {environment.rank} could not form a {backend} process group through "
            f"{interface}: {error}",
            hint=f"name an interface that all hosts share in {_INTERFACE}",
        ) from error
    if address.publication is not None and environment.rank == 0:
        address.publication.unlink(missing_ok=True)
    return Rendezvous(
        environment=environment,
        address=str(address),
        backend=backend,
        interface=interface,
        store=store,
    )


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._at_s = time.monotonic() + total_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least a moment, so that what is ready is still taken."""
        return max(0.01, self._at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._at_s


class Address(msgspec.Struct, frozen=True):
    """Where the store listens; ``publication`` is the file that told the other ranks."""

    host: str
    port: int
    publication: Path | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else "in process"


# --- the store ---------------------------------------------------------------------------------


def _open_store(
    environment: RankEnvironment,
    run_dir: Path,
    deadline: Deadline,
    environ: MutableMapping[str, str],
) -> tuple[Any, Address]:
    if environment.world_size == 1 and environment.master_port is None:
        return dist.HashStore(), Address(environment.master_addr, 0)
    published = environment.master_port is None
    directory = run_dir / "rendezvous"
    file = directory / f"{environment.attempt}.json" if published else None
    if environment.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, address = _serve_store(environment, file, deadline, environ)
    else:
        address = _reach(environment, file, deadline)
        store = _connect(address, deadline)
    return dist.PrefixStore(f"isthmus/{environment.attempt}", store), address


def _serve_store(
    environment: RankEnvironment,
    file: Path | None,
    deadline: Deadline,
    environ: MutableMapping[str, str],
) -> tuple[Any, Address]:
    if LISTEN_FD in environ:
        host = environment.master_addr
        listening = socket.socket(fileno=int(environ.pop(LISTEN_FD)))
    else:
        host, listening = "localhost", _listen(environment.master_port or 0)
    listening.set_inheritable(False)
    port = listening.getsockname()[1]
    address = Address(environment.master_addr, port, file)
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=deadline.left_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    if file is not None:
        _publish(file, address)
    return store, address


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, for IPv4 and IPv6 alike where both exist.

    Raises:
        LaunchError: The port is in use or not allowed.
    """
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on MASTER_PORT {port}: {error.strerror}",
            hint="choose another MASTER_PORT, or end the program that holds this one "
            f"(ss -ltnp 'sport = :{port}')",
        ) from error


def _publish(file: Path, address: Address) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        unfinished.write_bytes(msgspec.json.encode({"host": address.host, "port": address.port}))
        unfinished.replace(file)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot publish its address in {file}: {error.strerror}",
            hint="the run directory must be writable, and shared by all hosts",
        ) from error


def _reach(environment: RankEnvironment, file: Path | None, deadline: Deadline) -> Address:
    """Wait until rank 0's store listens, and return where.

    A published address may be one that an earlier start left, so it is read anew at each attempt.
    """
    trouble = "nothing listens there yet"
    address = Address(environment.master_addr, environment.master_port or 0)
    while not deadline.passed:
        try:
            if file is not None:
                address = msgspec.json.decode(file.read_bytes(), type=Address)
            where = (address.host, address.port)
            with closing(socket.create_connection(where, timeout=min(2.0, deadline.left_s))):
                return Address(address.host, address.port, file)
        except FileNotFoundError:
            trouble = f"{file} does not exist"
        except (OSError, msgspec.DecodeError) as error:
            trouble = str(error)
        time.sleep(min(_POLL_S, deadline.left_s))
    where_text = f"at {address} " if address.port else ""
    raise LaunchError(
        f"rank {environment.rank} waited {deadline.total_s:g} s for rank 0 {where_text}"
        f"and could not reach it: {trouble}",
        hint="see whether rank 0 has started and what it says; "
        + (
            "all hosts must see the same run directory"
            if file is not None
            else "a firewall must let MASTER_PORT through"
        ),
    )


def _connect(address: Address, deadline: Deadline) -> Any:
    try:
        return dist.TCPStore(
            address.host,
            address.port,
            is_master=False,
            timeout=timedelta(seconds=deadline.left_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"something listens at {address}, but it does not answer as rank 0's store: {error}",
            hint="another program may hold the port",
        ) from error


# --- who is there --------------------------------------------------------------------------------


def _meet(store: Any, environment: RankEnvironment, deadline: Deadline) -> list[str]:
    """Wait for all ranks; return the address each one speaks from, by rank.

    Raises:
        LaunchError: Names the ranks that did not come.
    """
    mine = interfaces.local_address_towards(environment.master_addr)
    keys = [f"here/{rank}" for rank in range(environment.world_size)]
    try:
        store.set(keys[environment.rank], mine)
        store.wait(keys, timedelta(seconds=deadline.left_s))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        missing = _missing(store, keys)
        raise LaunchError(
            f"rank {environment.rank} waited {deadline.total_s:g} s for {missing} to appear",
            hint="see what those ranks say; the deadline is deadlines.rendezvous_s",
        ) from error


def _missing(store: Any, keys: list[str]) -> str:
    try:
        ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "rank 0, whose store is gone,"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} of {len(keys)} ranks ({shown})"


def _leave(store: Any, environment: RankEnvironment, timeout_s: float) -> bool:
    keys = [f"left/{rank}" for rank in range(environment.world_size)]
    try:
        store.set(keys[environment.rank], "")
        if environment.rank == 0:
            store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


# --- through what --------------------------------------------------------------------------------


def _interface(
    environment: RankEnvironment, peers: list[str], environ: MutableMapping[str, str]
) -> Interface:
    named = environ.get(_INTERFACE)
    if named:
        by_name = {name: address for address, name in interfaces.local_addresses().items()}
        return Interface(named, by_name.get(named, "?"), f"{_INTERFACE} says so")
    chosen = interfaces.choose(
        master_addr=environment.master_addr,
        on_one_machine=environment.on_one_machine,
        peer_addresses=peers,
    )
    environ[_INTERFACE] = chosen.name
    return chosen


def _choose_device(environment: RankEnvironment, device_type: DeviceType) -> str:
    if device_type == "cpu":
        return "gloo"
    count = torch.cuda.device_count()
    if environment.local_rank >= count:
        raise LaunchError(
            f"local rank {environment.local_rank} has no CUDA device: this host has {count}",
            hint="start at most one rank a device, or train on the CPU",
        )
    torch.cuda.set_device(environment.local_rank)
    return "cpu:gloo,cuda:nccl"


def _device(environment: RankEnvironment, device_type: DeviceType) -> Any:
    return torch.device("cuda", environment.local_rank) if device_type == "cuda" else None
