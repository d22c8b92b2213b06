"""Which recorded steps count.

A run that was killed at step 150 and resumed from its checkpoint at step 100 has steps 101 to 150
twice in its log, and if it was then stopped at 120, steps 121 to 150 belong to a past that the
model no longer has. The timeline is therefore a stack: whatever begins or repeats a step puts aside
all that was recorded beyond it. What remains is the history of the model as it is now: each step
once, in order, the last occurrence of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from isthmus.observe.events import Event, RunStarted, Step, Validation

Stepped = TypeVar("Stepped", Step, Validation)


@dataclass
class Timeline:
    """Steps of each rank and the validations, without those that were undone.

    Attributes:
        steps: By rank, in ascending order, each step once.
        validations: In ascending order of their step.
        num_replayed_steps: By rank, steps that were put aside.
    """

    steps: dict[int, list[Step]] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)
    num_replayed_steps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """The timeline of events in the order in which they were recorded."""
        timeline = cls()
        for event in events:
            timeline.add(event)
        return timeline

    def add(self, event: Event) -> None:
        """Take one more event; those that have no place in the timeline are passed over."""
        match event:
            case RunStarted(start_step=start_step):
                for rank in self.steps:
                    self._rewind(rank, start_step)
                _pop_beyond(self.validations, start_step)
            case Step(rank=rank, step=step):
                self._rewind(rank, step - 1)
                self.steps.setdefault(rank, []).append(event)
            case Validation(step=step):
                _pop_beyond(self.validations, step - 1)
                self.validations.append(event)

    def _rewind(self, rank: int, last_step: int) -> None:
        num_undone = _pop_beyond(self.steps.get(rank, []), last_step)
        self.num_replayed_steps[rank] = self.num_replayed_steps.get(rank, 0) + num_undone


def _pop_beyond(stack: list[Stepped], last_step: int) -> int:
    """Drops from the end what lies beyond ``last_step``; returns how many that were."""
    num_before = len(stack)
    while stack and stack[-1].step > last_step:
        stack.pop()
    return num_before - len(stack)
