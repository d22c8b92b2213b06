"""How the ranks that write or read one checkpoint agree: the room's only use of torch.distributed.

``Peers`` moves small byte strings to rank 0 and back. On it stands ``together``, the one step that
every operation is made of: each rank does its part, rank 0 decides with everybody's results in
hand, and all get the decision or all raise. So a rank that fails makes all fail, and none reports
success with a piece missing. Every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from isthmus.errors import CheckpointError


class Peers(Protocol):
    """The ranks that share a checkpoint; ``gather`` and ``broadcast`` are called by all of them."""

    rank: int
    world_size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's data by rank on rank 0; an empty list elsewhere."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's data, on every rank; what the others pass is ignored."""
        ...


class Alone:
    """A single process, which needs no group."""

    rank = 0
    world_size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data as the only ones."""
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        """Return the data."""
        return data


class GroupPeers:
    """The ranks of a torch.distributed group.

    Making one is a collective call: it forms a gloo group of the same ranks, so that it works
    beside any backend and its messages cannot be mistaken for those of training.

    Args:
        group: The group; None is the default one.
        deadline_s: How long rank 0 waits for each rank's report. The others wait twice as long for
            its decision, so that it is rank 0 that finds out who is missing. It has to cover the
            difference between the fastest and the slowest rank's writing or reading.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, deadline_s: float = 600.0
    ) -> None:
        self.deadline_s = deadline_s
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=2 * deadline_s),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="isthmus checkpoint",
        )
        if not isinstance(own, dist.ProcessGroup):
            raise ValueError("this process is not a rank of the group")
        self._group = own
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's data by rank on rank 0; an empty list elsewhere.

        Raises:
            CheckpointError: A rank is gone, or did not report within the deadline.
        """
        if self.rank:
            self._send(data, 0)
            return []
        return [data] + [self._receive(peer, self.deadline_s) for peer in range(1, self.world_size)]

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's data, on every rank.

        Raises:
            CheckpointError: Rank 0 is gone, or did not decide within twice the deadline.
        """
        if self.rank:
            return self._receive(0, 2 * self.deadline_s)
        for peer in range(1, self.world_size):
            self._send(data, peer)
        return data

    def _send(self, data: bytes, peer: int) -> None:
        length = torch.tensor([len(data)])
        content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        with self._in_contact_with(peer, self.deadline_s):
            for tensor in (length, content):
                _finish(dist.isend(tensor, group=self._group, group_dst=peer), self.deadline_s)

    def _receive(self, peer: int, deadline_s: float) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        with self._in_contact_with(peer, deadline_s):
            _finish(dist.irecv(length, group=self._group, group_src=peer), deadline_s)
            content = torch.empty(max(int(length), 1), dtype=torch.uint8)
            _finish(dist.irecv(content, group=self._group, group_src=peer), deadline_s)
        return content.numpy().tobytes()[: int(length)]

    @contextmanager
    def _in_contact_with(self, peer: int, deadline_s: float) -> Generator[None]:
        """Turn what gloo raises, when a message is posted or waited for, into an error of ours."""
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost contact with rank {peer} while they agreed on a checkpoint "
                f"(deadline {deadline_s:g} s): {str(error).splitlines()[0]:.200}",
                hint=f"Look for what rank {peer} did; if it was only slow, raise the deadline.",
            ) from error


def _finish(work: dist.Work | None, deadline_s: float) -> None:
    if work is not None:
        work.wait(timedelta(seconds=deadline_s))


class _Outcome(msgspec.Struct, frozen=True):
    """What one rank's part came to: data, or an error."""

    data: bytes = b""
    error: str | None = None
    hint: str = ""


def together(
    peers: Peers, part: Callable[[], bytes], decide: Callable[[list[bytes]], bytes]
) -> bytes:
    """Do a part on every rank, let rank 0 decide, and return its decision on every rank.

    Args:
        peers: The ranks.
        part: Run on every rank; returns what rank 0 is to know.
        decide: Run on rank 0 if every part succeeded, with their results by rank.

    Raises:
        CheckpointError: On every rank, if any part or the decision failed, or a rank is gone.
    """
    mine, cause = _attempt(part)
    reports = peers.gather(msgspec.msgpack.encode(mine))
    verdict = _Outcome()
    if peers.rank == 0:
        outcomes = [msgspec.msgpack.decode(report, type=_Outcome) for report in reports]
        verdict = _first_failure(outcomes)
        if verdict.error is None:
            verdict, cause = _attempt(lambda: decide([outcome.data for outcome in outcomes]))
    verdict = msgspec.msgpack.decode(
        peers.broadcast(msgspec.msgpack.encode(verdict)), type=_Outcome
    )
    if verdict.error is not None:
        raise CheckpointError(verdict.error, hint=verdict.hint) from cause
    return verdict.data


def _attempt(work: Callable[[], bytes]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(data=work()), None
    except CheckpointError as error:
        return _Outcome(error=error.message, hint=error.hint), error
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return _Outcome(error=f"{type(error).__name__}: {error}"), error


def _first_failure(outcomes: list[_Outcome]) -> _Outcome:
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed or len(outcomes) == 1:
        return failed[0][1] if failed else _Outcome()
    rank, first = failed[0]
    others = f" (also: ranks {[rank for rank, _ in failed[1:]]})" if len(failed) > 1 else ""
    return _Outcome(error=f"rank {rank}: {first.error}{others}", hint=first.hint)
