"""``Checkpointer``: all state of a run, saved and loaded by all its ranks, or by none.

torch.distributed.checkpoint's planners are not used: replicated state needs no resharding plan, and
of equal keys they keep one rank's copy, which loses per-rank state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from isthmus.checkpoint.disk import Disk
from isthmus.checkpoint.folder import CheckpointInfo, sweep
from isthmus.checkpoint.item import Item, check_names
from isthmus.checkpoint.loading import Load
from isthmus.checkpoint.peers import Alone, GroupPeers, Peers
from isthmus.checkpoint.saving import Save


class Checkpointer:
    """Saves and loads the state of a run in one directory that all ranks share.

    Every rank makes one and calls its methods at the same points. Example::

        checkpointer = Checkpointer("run/checkpoint")
        items = {
            "model": Item(model),
            "optimizer": Item(optimizer),
            "random": Item(random_state, scope="per_rank", on_resize="rederive"),
        }
        info = checkpointer.load(items)          # None: nothing was ever saved
        for step in range(info.step + 1 if info else 1, 1001):
            ...
            if step % 100 == 0:
                checkpointer.save(step, items)

    Args:
        directory: Where the checkpoints are; made at the first save.
        keep_last: How many to keep. Older ones are deleted after a newer one is safe, never before.
        peers: The ranks that share them. None: those of torch.distributed's default group if there
            is one, else this process alone.
        deadline_s: How long the ranks wait for each other; only used if ``peers`` is None.
        check_replicas: Whether a save compares the replicated items between the ranks. They must be
            equal, as each rank writes a part of them; a difference is an error that names them.
        disk: The file system, for tests.

    Attributes:
        directory: Where the checkpoints are.

    Raises:
        ValueError: ``keep_last`` is less than one.
        CheckpointError: The directory can't be read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        peers: Peers | None = None,
        deadline_s: float = 600.0,
        check_replicas: bool = True,
        disk: Disk | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least one checkpoint must be kept")
        self.directory = Path(directory)
        self._keep_last = keep_last
        self._peers = peers or _default_peers(deadline_s)
        self._check_replicas = check_replicas
        self._disk = disk or Disk()
        self._notes = sweep(self._disk, self.directory) if self._peers.rank == 0 else []

    def save(self, step: int, items: Mapping[str, Item]) -> CheckpointInfo:
        """Save the items; when this returns, they survive a loss of power.

        Args:
            step: Step after which the state is taken; larger than that of every good checkpoint.
            items: The state by name; the same names and scopes on every rank.

        Raises:
            CheckpointError: On every rank, if any rank could not do its part within the deadline.
                The older checkpoints are untouched, and nothing is left of this one.
            ValueError: The step is negative, or a name is not fit to name a tensor.
        """
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        check_names(items)
        info = Save(
            self.directory,
            step,
            items,
            keep_last=self._keep_last,
            check_replicas=self._check_replicas,
            peers=self._peers,
            disk=self._disk,
        ).run()
        return self._with_notes(info)

    def load(self, items: Mapping[str, Item]) -> CheckpointInfo | None:
        """Load the newest good checkpoint into the items, and say which one it was.

        Every byte is held to its checksum before any rank changes any state. A damaged checkpoint
        is set aside (renamed to ``step-N.bad-REASON``) and reported in ``rejected``. What a change
        of the number of ranks did to an item is reported in ``notes``.

        Returns:
            What was loaded; None if nothing was ever saved here.

        Raises:
            CheckpointError: On every rank: none of the checkpoints is good, the newest good one
                does not fit the items, or a rank did not answer within the deadline.
        """
        check_names(items)
        info = Load(self.directory, items, peers=self._peers, disk=self._disk).run()
        return self._with_notes(info) if info else None

    def _with_notes(self, info: CheckpointInfo) -> CheckpointInfo:
        notes, self._notes = self._notes, []
        return replace(info, notes=(*notes, *info.notes))


def _default_peers(deadline_s: float) -> Peers:
    if dist.is_available() and dist.is_initialized():
        return GroupPeers(deadline_s=deadline_s)
    return Alone()
