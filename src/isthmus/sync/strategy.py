"""What every strategy is at run time, and what it can act upon.

A strategy has two points of action: gradient hooks that it registers itself (it is then complete
when ``backward()`` returns), and :meth:`Strategy.after_step`, called after each step of the
optimizer. One that does neither at some step simply lets that step pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from isthmus.codec.comm import Comm
from isthmus.errors import CheckpointError
from isthmus.sync.explain import Explanation

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


@dataclass(frozen=True)
class Setting:
    """What a strategy is built for.

    Attributes:
        model: The replica of this rank; equal on all ranks when the strategy is built.
        optimizer: Steps the model's parameters.
        parameters: Those that are trained, by name, shared ones once, in order of registration.
        comm: The ranks that hold a replica, or None if this process is alone.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    parameters: dict[str, Tensor]
    comm: Comm | None

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.comm.world_size if self.comm else 1


@dataclass(frozen=True)
class Metrics:
    """Counters of a replica since it was made; subtract two to have what lies between them.

    Attributes:
        synchronisations: How often the strategy has synchronised.
        calls: Collectives called, without those at the start.
        sent_nbytes: Payload bytes that this rank handed to them.
        communication_time_s: Time from the first launch of each synchronisation until its last
            completion was noticed; an upper bound where computing hid it all.
        exposed_wait_s: Time that this rank stood still for want of a completion.
        startup_calls: Collectives called when the replica was made.
        startup_nbytes: Payload bytes of those.
    """

    synchronisations: int = 0
    calls: int = 0
    sent_nbytes: int = 0
    communication_time_s: float = 0.0
    exposed_wait_s: float = 0.0
    startup_calls: int = 0
    startup_nbytes: int = 0

    def __sub__(self, earlier: Metrics) -> Metrics:
        return Metrics(
            **{
                field.name: getattr(self, field.name) - getattr(earlier, field.name)
                for field in fields(self)
            }
        )


class Strategy:
    """Base of all strategies' runtimes.

    Attributes:
        synchronising: False inside ``replica.no_sync()``: gradients only accumulate.
        synchronisations: See :class:`Metrics`, as the two times.
    """

    def __init__(self) -> None:
        self.synchronising = True
        self.synchronisations = 0
        self.communication_time_s = 0.0
        self.exposed_wait_s = 0.0

    def attach(self) -> None:
        """Registers hooks. Called once, when the replicas are equal."""

    def detach(self) -> None:
        """Removes them."""

    def after_step(self) -> None:
        """Called after each step of the optimizer."""

    def explain(self) -> Explanation:
        """What happens to each tensor."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; raises CheckpointError if it does not fit."""
        if state:
            raise CheckpointError(
                f"{type(self).__name__} keeps no state, but the checkpoint has {sorted(state)}",
                hint="resume with the strategy that the checkpoint was written with",
            )
