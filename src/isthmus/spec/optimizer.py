"""The optimizer and its schedule: pure arithmetic, so that a plan and a run agree on every rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from isthmus.spec.base import Spec


class Schedule(Spec):
    """Common to all schedules: a linear warm-up from zero, then the rate's own course."""

    warmup_steps: int = Field(20, ge=0)
    """Steps over which the rate rises linearly from zero to its peak."""

    def factor(self, step: int, num_steps: int) -> float:
        """Share of the peak learning rate at ``step`` (from 0) of a run of ``num_steps``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        remaining = max(1, num_steps - self.warmup_steps)
        return self._after_warmup(min(1.0, (step - self.warmup_steps) / remaining))

    def _after_warmup(self, progress: float) -> float:
        raise NotImplementedError


class Constant(Schedule):
    """The peak rate until the end."""

    kind: Literal["constant"] = "constant"
    """Which schedule this is."""

    def _after_warmup(self, progress: float) -> float:
        return 1.0


class Linear(Schedule):
    """A straight line from the peak to ``final_fraction`` of it."""

    kind: Literal["linear"] = "linear"
    """Which schedule this is."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the peak rate that is left at the end."""

    def _after_warmup(self, progress: float) -> float:
        return 1.0 - (1.0 - self.final_fraction) * progress


class Cosine(Schedule):
    """Half a cosine from the peak to ``final_fraction`` of it (Loshchilov & Hutter 2017, eq. 5)."""

    kind: Literal["cosine"] = "cosine"
    """Which schedule this is."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the peak rate that is left at the end."""

    def _after_warmup(self, progress: float) -> float:
        wave = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * wave


class WarmupStableDecay(Schedule):
    """Constant, then a decay over the last part (WSD; Hu et al. 2024, MiniCPM, section 4).

    The decay is one minus the square root of its progress (Hägele et al. 2024, eq. 4), which ended
    lower than a straight line there. A run can be prolonged from any point before the decay.
    """

    kind: Literal["wsd"] = "wsd"
    """Which schedule this is."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps after the warm-up over which the rate falls."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the peak rate that is left at the end."""

    def _after_warmup(self, progress: float) -> float:
        decayed = max(0.0, (progress - (1.0 - self.decay_fraction)) / self.decay_fraction)
        return 1.0 - (1.0 - self.final_fraction) * math.sqrt(min(1.0, decayed))


AnySchedule = Annotated[Constant | Linear | Cosine | WarmupStableDecay, Field(discriminator="kind")]


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Spec):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2)."""

    kind: Literal["adamw"] = "adamw"
    """Which optimizer this is."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the two moment estimates."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices; vectors (norm scales) are not decayed."""
    clip_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 means no clipping."""
    schedule: AnySchedule = WarmupStableDecay()
    """Course of the learning rate."""

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of ``step`` (from 0) in a run of ``num_steps`` steps."""
        return self.learning_rate * self.schedule.factor(step, num_steps)
