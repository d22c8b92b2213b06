"""Which rank of which run this process is, read from the variables that its launcher has set.

Three launchers are known: isthmus's own (one machine), torchrun and everything that sets its
variables, and SLURM's ``srun``. ``detect`` is a pure function of the variables; it opens nothing.
Half a set of variables is an error, never a guess: a rank that takes itself for a run of its own
would train the wrong thing without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from isthmus.elastic import slurm
from isthmus.errors import LaunchError

__all__ = ["ATTEMPT", "LISTEN_FD", "Launcher", "RankEnvironment", "detect"]

Launcher = Literal["single", "isthmus", "torchrun", "slurm"]

ATTEMPT: Final = "ISTHMUS_ATTEMPT"
"""Set by isthmus's own launcher to what tells this start from an earlier one."""
LISTEN_FD: Final = "ISTHMUS_LISTEN_FD"
"""Set for rank 0 by isthmus's own launcher: the listening socket behind MASTER_PORT."""

_TORCHRUN: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """A process's place in a run.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: Number of ranks in the run.
        local_rank: From 0 to ``local_world_size - 1`` on this host; the number of its device.
        local_world_size: Number of ranks on this host.
        master_addr: Where rank 0 is.
        master_port: The port of the store there, or None if rank 0 is to choose and publish one.
        launcher: Who started the rank.
        attempt: What tells this start from an earlier one in the same run directory.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int | None
    launcher: Launcher
    attempt: str

    def __post_init__(self) -> None:
        for name, size_name in (("rank", "world_size"), ("local_rank", "local_world_size")):
            value, size = getattr(self, name), getattr(self, size_name)
            if not 0 <= value < size:
                raise LaunchError(
                    f"{name} {value} is not below {size_name} {size} ({self.launcher} variables)",
                    hint=f"{name} counts from 0 to {size_name} - 1",
                )
        if self.local_world_size > self.world_size:
            raise LaunchError(
                f"{self.local_world_size} ranks on this host but {self.world_size} in all "
                f"({self.launcher} variables)"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise LaunchError(f"MASTER_PORT {self.master_port} is no port: 1 to 65535")

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks of the run are on this host."""
        return self.local_world_size == self.world_size

    @classmethod
    def single(cls) -> RankEnvironment:
        """Return the place of the only rank of a run, in this very process."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=None,
            launcher="single",
            attempt="single",
        )


def detect(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return which rank ``environ`` says this process is, or None if no launcher has set it.

    torchrun's variables win over SLURM's, so that ``srun torchrun ...`` is torchrun. The shell of
    ``salloc``, an ``sbatch`` script's body and a step of one task are nobody's ranks: None.

    Raises:
        LaunchError: Variables are missing, are no numbers, or contradict each other.
    """
    if "RANK" in environ:
        return _from_torchrun(environ)
    if slurm.in_step(environ):
        return _from_slurm(environ)
    stray = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environ]
    if stray and "SLURM_JOB_ID" not in environ:
        _require(environ, _TORCHRUN)
    return None


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    _require(environ, _TORCHRUN)
    own = environ.get(ATTEMPT)
    run_id = environ.get("TORCHELASTIC_RUN_ID", "env")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankEnvironment(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
        launcher="isthmus" if own else "torchrun",
        attempt=own or f"torchrun-{run_id}-{environ['MASTER_PORT']}-{restart}",
    )


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    _require(environ, ("SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NTASKS"))
    step, restart = environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0")
    rank = _integer(environ, "SLURM_PROCID")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, size_name)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(environ, world_size),
        master_addr=_slurm_master(environ, rank),
        master_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        launcher="slurm",
        attempt=f"slurm-{environ['SLURM_JOB_ID']}.{step}-{restart}",
    )


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if text is None:
        _require(environ, ("SLURM_NTASKS_PER_NODE",))
        return _integer(environ, "SLURM_NTASKS_PER_NODE")
    counts = slurm.parse_tasks_per_node(text)
    if sum(counts) != world_size:
        raise LaunchError(f"SLURM's tasks per node {text!r} do not add up to {world_size} tasks")
    if len(set(counts)) == 1:
        return counts[0]
    _require(environ, ("SLURM_NODEID",))
    node = _integer(environ, "SLURM_NODEID")
    if not 0 <= node < len(counts):
        raise LaunchError(f"SLURM_NODEID is {node}, but {text!r} names {len(counts)} nodes")
    return counts[node]


def _slurm_master(environ: Mapping[str, str], rank: int) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if rank == 0 and "SLURMD_NODENAME" in environ:
        return environ["SLURMD_NODENAME"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environ:
            return slurm.expand_nodelist(environ[name])[0]
    raise LaunchError(
        "SLURM started this task without a node list, so rank 0's host is unknown",
        hint="set MASTER_ADDR to the host of task 0",
    )


def _require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        raise LaunchError(
            f"the rank's variables are half set: {', '.join(missing)} missing"
            + (f" beside {present}" if present else ""),
            hint="set all of them, or unset them to start on this machine alone",
        )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"{name} is {environ[name]!r}, expected a whole number") from None
