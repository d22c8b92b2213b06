"""How the ranks of a run are laid out: the axes of the device mesh and their sizes."""

from __future__ import annotations

from pydantic import Field

from isthmus.errors import ConfigError
from isthmus.spec.base import Spec


class ParallelSpec(Spec):
    """The axes of the device mesh. The product of their sizes is the number of ranks."""

    data: int | None = Field(None, ge=1)
    """Replicas that see different samples; unset means as many as there are ranks."""

    def num_replicas(self, world_size: int) -> int:
        """Replicas among ``world_size`` ranks.

        Raises:
            ConfigError: If the axes do not multiply to ``world_size``.
        """
        if self.data not in (None, world_size):
            raise ConfigError(
                f"parallel.data = {self.data}, but the run has {world_size} ranks",
                hint=f"start {self.data} ranks (--ranks {self.data}), or leave parallel.data out",
            )
        return world_size
