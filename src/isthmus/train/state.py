"""The parts of a run's state that no other room keeps: how far it is, and its random streams."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isthmus.errors import DataError


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        data_digest: Digest of the data that it reads.
        step: Optimizer steps done.
        next_sample: Global index of the first sample that no step has seen. It does not depend on
            the number of ranks, so a run may go on with another number of them.
    """

    data_digest: str
    step: int = 0
    next_sample: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The fields."""
        return {
            "data_digest": self.data_digest,
            "step": self.step,
            "next_sample": self.next_sample,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was.

        Raises:
            DataError: If it read other data.
        """
        if state["data_digest"] != self.data_digest:
            raise DataError(
                f"the data have changed since step {state['step']}: their digest was "
                f"{state['data_digest']} and is {self.data_digest}",
                hint="bring back the files as they were, or begin anew with --fresh",
            )
        self.step, self.next_sample = state["step"], state["next_sample"]


class RandomState:
    """The random streams of this process: Python's, numpy's, torch's, and the accelerator's.

    Args:
        seed: The run's seed, from which the streams of another number of ranks are derived.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def state_dict(self) -> dict[str, Any]:
        """The streams' states, as they are now."""
        _, keys, position, has_gauss, gauss = np.random.get_state()
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (keys, int(position), int(has_gauss), float(gauss)),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the streams back."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(("MT19937", *state["numpy"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def rederive(self, *, step: int, rank: int, world_size: int) -> None:
        """Seeds the streams anew for a rank that no former rank corresponds to."""
        seed_everything(self._seed, rank, step, world_size)


def seed_everything(seed: int, rank: int, *more: int) -> None:
    """Seeds this process's random streams; each rank gets its own, from the run's seed."""
    stream = np.random.SeedSequence([seed, rank, *more])
    torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))
    random.seed(int(stream.generate_state(2, np.uint64)[1]))
    np.random.seed(stream.generate_state(4, np.uint32))
