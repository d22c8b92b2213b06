"""Every wait of a run has a deadline, and all deadlines stand here, checked against each other."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from isthmus.spec.base import Spec
from isthmus.spec.units import Seconds, format_seconds


class Deadlines(Spec):
    """How long each wait may take before it ends with an error that says who waited for whom.

    A wait that contains another must be the longer one; that is checked when this is built, so
    that an inner wait reports its cause before an outer one cuts it off.
    """

    rendezvous_s: Seconds = 120.0
    """How long ranks wait for each other to appear at the start."""
    data_s: Seconds = 3600.0
    """How long ranks wait for the first rank of their host to prepare the data."""
    collective_s: Seconds = 180.0
    """How long one collective operation may wait for the other ranks."""
    checkpoint_s: Seconds = 240.0
    """How long the ranks wait for each other while a checkpoint is written or read."""
    stop_grace_s: Seconds = 300.0
    """After Ctrl-C or SIGTERM: how long ranks have to finish a step and write a checkpoint."""
    failure_grace_s: Seconds = 3.0
    """After a rank failed: how long the others have to end by themselves before they are killed."""

    @model_validator(mode="after")
    def _outer_waits_are_longer(self) -> Self:
        for outer, inner in (
            ("checkpoint_s", "collective_s"),
            ("stop_grace_s", "checkpoint_s"),
            ("collective_s", "failure_grace_s"),
        ):
            long, short = getattr(self, outer), getattr(self, inner)
            if long < short:
                raise PydanticCustomError(
                    "deadline_order",
                    "{outer} ({long}) must not be shorter than {inner} ({short}), "
                    "which it waits for",
                    {
                        "outer": outer,
                        "inner": inner,
                        "long": format_seconds(long),
                        "short": format_seconds(short),
                    },
                )
        return self
