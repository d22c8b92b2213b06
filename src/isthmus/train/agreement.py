"""What ranks tell each other besides gradients: losses, counts, and that they were asked to stop.

One vector of a few doubles is summed over the ranks each step, in the background while the
optimizer works. So every rank knows the loss of the whole batch; it knows how many valid targets
the next batch has before its loss is scaled; and all ranks stop after the same step, although the
signal reached them at different moments, or reached only one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGUSR1")
"""Signals that ask a run to stop; each has its place in the vector."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a step.

    Attributes:
        nll_nats: Sum of the negative log-likelihoods over all ranks.
        num_targets: Number of valid targets over all ranks.
        next_num_targets: The same for the batch that comes next.
        stop_reason: The signal that some rank got; empty if none did.
    """

    nll_nats: float
    num_targets: int
    next_num_targets: int
    stop_reason: str

    @property
    def loss_nats(self) -> float:
        """Mean loss per valid target; NaN if there was none."""
        return self.nll_nats / self.num_targets if self.num_targets else float("nan")


class Agreement:
    """Sums a few numbers over ranks.

    Args:
        group: A process group for tensors on the CPU; None for a single rank.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._vector: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(
        self,
        nll_nats: float,
        num_targets: int,
        *,
        next_num_targets: int = 0,
        stop_signal: str | None = None,
    ) -> None:
        """Starts the exchange of this rank's figures; returns at once.

        Args:
            nll_nats: Sum over this rank's valid targets.
            num_targets: How many they are.
            next_num_targets: How many this rank's next batch has.
            stop_signal: The signal that this rank got, if any.
        """
        asked = [float(name == stop_signal) for name in SIGNALS]
        figures = [nll_nats, float(num_targets), float(next_num_targets), *asked]
        self._vector = torch.tensor(figures, dtype=torch.float64)
        if self._group is not None:
            self._work = dist.all_reduce(self._vector, group=self._group, async_op=True)

    def finish(self) -> Agreed:
        """Waits for the exchange that was begun; every rank gets the same."""
        if self._vector is None:
            raise RuntimeError("finish() without begin()")
        if self._work is not None:
            self._work.wait()
            self._work = None
        nll_nats, num_targets, next_num_targets, *asked = self._vector.tolist()
        reason = next((name for name, times in zip(SIGNALS, asked, strict=True) if times), "")
        return Agreed(nll_nats, int(num_targets), int(next_num_targets), reason)

    def exchange(
        self, nll_nats: float = 0.0, num_targets: int = 0, *, next_num_targets: int = 0
    ) -> Agreed:
        """Both halves at once, for sums outside a step."""
        self.begin(nll_nats, num_targets, next_num_targets=next_num_targets)
        return self.finish()
