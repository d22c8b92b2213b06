"""``Cluster``: an emulated cluster, built when it is entered and gone when it is left.

It puts the parts together: :mod:`~isthmus.lab.topology` says what stands where,
:mod:`~isthmus.lab.namespaces` makes hosts and switches, :mod:`~isthmus.lab.wiring` joins them.
:mod:`isthmus.lab.run` runs one command in all hosts of a cluster; :mod:`isthmus.lab.faults` plays
faults on it, through the methods of ``Actions`` here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Final, Self

from isthmus.errors import ConfigError, LaunchError
from isthmus.lab import state
from isthmus.lab.counters import NicCounters, read_counters
from isthmus.lab.environment import host_variables
from isthmus.lab.knobs import Groups, Quality
from isthmus.lab.memory import refuse_too_many
from isthmus.lab.namespaces import Namespace, Namespaces, require_tools
from isthmus.lab.topology import plan_topology
from isthmus.lab.wiring import Wiring
from isthmus.spec.cluster import ClusterSpec

MISSABLE: Final = ("latency", "memory")
"""What a lab may do without where it is told so."""


class Cluster:
    """An emulated cluster on this machine.

    A context manager::

        with Cluster(spec) as cluster:
            cluster.run(["ping", "-c", "1", "west0"], host="east0")
            cluster.link_down("east", "west")

    Everything in it ends when it is left, and when this process ends, however it ends. Faults may
    be made from any thread.

    Args:
        spec: The cluster.
        allow_missing: What may be left out where this machine can't do it: ``latency`` (delay,
            jitter and loss), ``memory`` (the check that the hosts' processes fit).
        state_dir: Where the lab's directory is made; by default among the user's temporary files.

    Raises:
        ConfigError: A lab can't build this cluster; it says why.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        allow_missing: Sequence[str] = (),
        state_dir: Path | None = None,
    ) -> None:
        unknown = [name for name in allow_missing if name not in MISSABLE]
        if unknown:
            raise ConfigError(f"a lab can do without {', '.join(MISSABLE)}, not {unknown[0]!r}")
        self.spec = spec
        self.topology = plan_topology(spec)
        self._allow_missing = tuple(allow_missing)
        self._state_dir = state_dir
        self._stack = ExitStack()
        self._started: list[subprocess.Popen[Any]] = []
        self._directory: Path | None = None
        self._namespaces: Namespaces | None = None
        self._wiring: Wiring | None = None

    def __enter__(self) -> Self:
        require_tools()
        if "memory" not in self._allow_missing:
            refuse_too_many(self.topology)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in the cluster, and remove it. Does nothing the second time."""
        self._stack.close()
        self._directory = self._namespaces = self._wiring = None

    def _build(self) -> None:
        self._directory = state.make_directory(self.spec, self._state_dir)
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        files = state.write_host_files(self._directory, self.topology)
        namespaces = Namespaces(self.topology, files)
        wiring = Wiring(self.spec, self.topology, namespaces, self._allow_missing)
        for end in (wiring.close, self._reap, namespaces.close):  # the last one is called first
            self._stack.callback(end)
        self._namespaces, self._wiring = namespaces, wiring
        wiring.build()

    def _reap(self) -> None:
        """Take away the processes that ended with their hosts."""
        for process in self._started:
            process.wait()

    # --- looking at it ---

    @property
    def directory(self) -> Path:
        """The lab's own directory, while it runs; its name is the lab's id."""
        if self._directory is None:
            raise _not_running()
        return self._directory

    @property
    def id(self) -> str:
        """What tells this lab from others of the same user."""
        return self.directory.name

    @property
    def wiring(self) -> Wiring:
        """Its network, while it runs."""
        if self._wiring is None:
            raise _not_running()
        return self._wiring

    def host(self, name: str) -> Namespace:
        """The namespace of a host.

        Raises:
            ConfigError: There is no such host.
        """
        self.topology.host(name)
        if self._namespaces is None:
            raise _not_running()
        return self._namespaces.hosts[name]

    def switch(self, site: str) -> Namespace:
        """The namespace of a site's switch."""
        if self._namespaces is None:
            raise _not_running()
        return self._namespaces.switches[site]

    def counters(self) -> dict[tuple[str, str], NicCounters]:
        """What each NIC has carried so far, by host and NIC, as the host's kernel counts it."""
        return {
            (host.name, nic): counted
            for host in self.topology.hosts
            for nic, counted in read_counters(self.host(host.name).pid).items()
            if nic != "lo"
        }

    # --- running commands ---

    def environment(self, host: str, local_rank: int | None = None) -> dict[str, str]:
        """The variables that tell a command where it is; see :mod:`isthmus.lab.environment`."""
        plan = self.topology.host(host)
        return host_variables(
            self.topology, plan, local_rank, lab=self.id, directory=self.directory
        )

    def start(
        self,
        command: Sequence[str],
        *,
        host: str,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command in a host.

        Its signals and exit code are those of the process that is returned; when it ends, so do
        the processes that it started.

        Args:
            command: The program and its arguments.
            host: Where.
            env: All its variables; by default this process's and those of :meth:`environment`.
            popen: Keywords of ``subprocess.Popen``, such as ``stdout``; stdin is empty otherwise.

        Raises:
            ConfigError: There is no such host or no such program.
        """
        variables = {**os.environ, **self.environment(host)} if env is None else dict(env)
        refuse_unknown_program(command, variables)
        argv = self.host(host).enter_argv(command)
        popen.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(argv, env=variables, **popen)
        self._started = [known for known in self._started if known.returncode is None]
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        host: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a host to its end and return what it printed and its exit code.

        Raises:
            ConfigError: There is no such host or no such program.
            subprocess.TimeoutExpired: It took longer than ``timeout_s``, and was killed.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(command, host=host, env=env, text=True, **pipes) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, errors)

    # --- faults: the methods of knobs.Actions ---

    def link_down(self, a: str, b: str) -> None:
        """Take the link between two sites down; its ends lose their carrier and their ways."""
        self.wiring.link_down(a, b)

    def link_up(self, a: str, b: str) -> None:
        """Take it up again."""
        self.wiring.link_up(a, b)

    def set_link_rate(self, a: str, b: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give a link another goodput in both directions; None: the declared one."""
        self.wiring.set_link_rate(a, b, bandwidth_bytes_per_s)

    def set_link_quality(self, a: str, b: str, quality: Quality | None) -> None:
        """Give a link another delay, jitter or loss; None: the declared ones."""
        self.wiring.set_link_quality(a, b, quality)

    def nic_down(self, host: str, nic: str) -> None:
        """Pull a NIC's cable: it loses its carrier, and its address and ways stay."""
        self.wiring.nic_down(host, nic)

    def nic_up(self, host: str, nic: str) -> None:
        """Plug it in again."""
        self.wiring.nic_up(host, nic)

    def set_nic_rate(self, host: str, nic: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give a NIC another goodput in both directions; None: the declared one."""
        self.wiring.set_nic_rate(host, nic, bandwidth_bytes_per_s)

    def partition(self, groups: Groups) -> None:
        """Let nothing pass between groups of sites and hosts, in place of any cut before."""
        self.wiring.partition(groups)

    def heal(self) -> None:
        """Let everything pass again."""
        self.wiring.heal()

    def signal(self, host: str, number: Signals) -> None:
        """Send a signal to every process of a host."""
        self.host(host).signal(number)


def refuse_unknown_program(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a command that can't be started, before anything else happens.

    Raises:
        ConfigError: There is none, or its program is not found or may not be executed.
    """
    if not command:
        raise ConfigError("no command is given", hint="put it after two dashes: -- COMMAND")
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise ConfigError(
            f"there is no program {command[0]!r}",
            hint="hosts see this machine's files: give a name in PATH or a path",
        )


def _not_running() -> LaunchError:
    return LaunchError("the lab does not run", hint="enter it: with Cluster(spec) as cluster: ...")
