"""The loop: batches in, gradients averaged, weights updated, everything written down.

It is a thin user of the library: each part (model, data, replica, checkpointer, event log) can be
used alone in anybody's own loop, as ``recipes/plain_loop.py`` shows.

The way of one step: every rank takes its slice of the global batch and runs forward and backward
on it, in micro-batches, with the loss scaled so that the mean over ranks is the mean over all valid
targets of the global batch; the replica averages gradients while backward runs; their norm is
clipped; the optimizer steps. What the ranks must agree on besides, the loss and a request to stop,
travels in one small vector while the optimizer works (:mod:`isthmus.train.agreement`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from isthmus.checkpoint import Checkpointer, Item
from isthmus.checkpoint.item import Scope
from isthmus.data import TextData
from isthmus.elastic.environment import RankEnvironment
from isthmus.elastic.signals import StopRequest
from isthmus.errors import Interrupted, IsthmusError
from isthmus.model import token_loss
from isthmus.observe.events import (
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Notice,
    RunFinished,
    Step,
    Stopped,
    Validation,
)
from isthmus.observe.log import EventLog
from isthmus.spec.run import RunSpec
from isthmus.sync import Replica
from isthmus.train.agreement import Agreed, Agreement
from isthmus.train.state import Progress, RandomState

IGNORED: Final = -100
"""Target of a token that does not count for the loss."""


@dataclass(frozen=True)
class Parts:
    """What the loop is made of; ``isthmus.train.assembly`` builds it from a spec.

    Attributes:
        model: The module that is trained.
        forward: Computes logits; the model itself, or its compiled form.
        optimizer: Of the model's parameters.
        replica: Averages over ranks.
        data: The samples.
        checkpointer: Keeps the state.
        agreement: What the ranks tell each other beside gradients.
        log: This rank's event log.
        device: Where tensors live.
        autocast: Dtype in which matrix products are computed; None for that of the weights.
        peak_flops_per_s: Of this rank's device, if it is known.
    """

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    replica: Replica
    data: TextData
    checkpointer: Checkpointer
    agreement: Agreement
    log: EventLog
    device: torch.device
    autocast: torch.dtype | None
    peak_flops_per_s: float | None


class Trainer:
    """Runs a training run from its newest checkpoint to its end.

    Args:
        spec: The run.
        parts: What it is made of.
        place: This rank's place among the ranks.
        stop: Tells whether this rank was asked to stop.
    """

    def __init__(
        self, spec: RunSpec, parts: Parts, place: RankEnvironment, stop: StopRequest
    ) -> None:
        self.spec = spec
        self.parts = parts
        self.progress = Progress(data_digest=parts.data.digest)
        self._place = place
        self._stop = stop
        self._accumulation_steps = spec.train.accumulation_steps(place.world_size)
        self._parameters = [p for p in parts.model.parameters() if p.requires_grad]
        self._flops_per_token = spec.model.flops_per_token(spec.data.sequence_length)
        self._saved_step: int | None = None
        self._validated_step: int | None = None

    def run(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        """Trains to the last step, with validations and checkpoints on the way.

        Args:
            on_step: Called with the number of steps done after each step.

        Raises:
            Interrupted: A rank was asked to stop; a checkpoint has been written.
            IsthmusError: The loss is not a number any more, or a checkpoint can't be written.
        """
        began_s = time.monotonic()
        train, last_step = self.spec.train, self.spec.train.steps
        upcoming = self._load_batch()
        num_targets = self.parts.agreement.exchange(next_num_targets=upcoming.num_targets)
        upcoming_targets = num_targets.next_num_targets
        while self.progress.step < last_step:
            upcoming, agreed = self._step(upcoming, upcoming_targets)
            upcoming_targets = agreed.next_num_targets
            step = self.progress.step
            on_step(step)
            if agreed.stop_reason and step < last_step:
                self._interrupt(agreed.stop_reason)
            if _is_due(step, train.validate_every_steps):
                self.validate()
            if _is_due(step, self.spec.checkpoint.every_steps):
                self.save()
        self.validate()
        self.save()
        self._emit_once(RunFinished, step=last_step, duration_s=time.monotonic() - began_s)

    def resume(self) -> None:
        """Takes up the newest good checkpoint, if there is any.

        Raises:
            CheckpointError: There are checkpoints but none can be used.
            DataError: The data are not those that the checkpoint was trained on.
        """
        info = self.parts.checkpointer.load(self._items())
        if info is None:
            return
        for rejected in info.rejected:
            reason = f"{rejected.file}: {rejected.reason}"
            self._emit_once(CheckpointRejected, path=str(rejected.path), reason=reason)
        self._saved_step = info.step
        self._emit_once(CheckpointLoaded, step=info.step, path=str(info.path))
        for note in info.notes:
            self._emit_once(Notice, message=note)

    def validate(self) -> None:
        """Scores the validation set, unless that was done at this step."""
        step = self.progress.step
        if self._validated_step == step:
            return
        began_s = time.monotonic()
        agreed = self._score()
        self._validated_step = step
        self._emit_once(
            Validation,
            step=step,
            loss_nats=agreed.loss_nats,
            bits_per_byte=self.parts.data.bits_per_byte(agreed.loss_nats),
            tokens=agreed.num_targets,
            duration_s=time.monotonic() - began_s,
        )

    def save(self) -> None:
        """Writes a checkpoint, unless one of this step is there."""
        step = self.progress.step
        if self._saved_step == step:
            return
        began_s = time.monotonic()
        info = self.parts.checkpointer.save(step, self._items())
        self._saved_step = step
        self._emit_once(
            CheckpointSaved,
            step=step,
            path=str(info.path),
            nbytes=info.nbytes,
            duration_s=time.monotonic() - began_s,
        )

    def _step(self, batch: Micros, global_targets: int) -> tuple[Micros, Agreed]:
        """One optimizer step on ``batch``; returns the next batch and what the ranks agreed on."""
        parts, began_s = self.parts, time.perf_counter()
        sent_before, waited_before = self._communication()
        rate = self.spec.optimizer.learning_rate_at(self.progress.step, self.spec.train.steps)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        nll_nats = self._forward_backward(
            batch, scale=self._place.world_size / max(1, global_targets)
        )
        self.progress.step += 1
        self.progress.next_sample += self.spec.train.global_batch_size
        upcoming = self._load_batch()
        parts.agreement.begin(
            nll_nats,
            batch.num_targets,
            next_num_targets=upcoming.num_targets,
            stop_signal=self._stop.requested,
        )
        grad_norm = self._clip()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        agreed = parts.agreement.finish()
        self._check(agreed)
        sent_nbytes, waited_s = self._communication()
        step_time_s = time.perf_counter() - began_s
        self._emit(
            Step,
            step=self.progress.step,
            loss_nats=agreed.loss_nats,
            grad_norm=grad_norm,
            learning_rate=rate,
            tokens=agreed.num_targets,
            step_time_s=step_time_s,
            communication_time_s=waited_s - waited_before,
            sent_nbytes=sent_nbytes - sent_before,
            mfu=self._mfu(batch.num_targets / step_time_s),
        )
        return upcoming, agreed

    def _forward_backward(self, batch: Micros, *, scale: float) -> float:
        """Accumulates gradients over the micro-batches; returns the sum of the losses in nats."""
        total = torch.zeros((), device=self.parts.device)
        for index, (tokens, targets) in enumerate(batch.micros):
            is_last = index == len(batch.micros) - 1
            with contextlib.nullcontext() if is_last else self.parts.replica.no_sync():
                nll = self._loss(tokens, targets)
                (nll * scale).backward()
            total += nll.detach()
        return float(total)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            logits = self.parts.forward(tokens)
        return token_loss(logits, targets)

    @torch.no_grad()
    def _score(self) -> Agreed:
        """Loss over the fixed validation samples, summed over ranks."""
        nll_nats, num_targets = 0.0, 0
        share = self.spec.train.global_batch_size // self._place.world_size
        for tokens, targets in self.parts.data.validation_batches(
            batch_size=self.spec.train.micro_batch_size or share,
            max_samples=self.spec.train.validation_samples,
            rank=self._place.rank,
            world_size=self._place.world_size,
        ):
            nll_nats += float(
                self._loss(tokens.to(self.parts.device), targets.to(self.parts.device))
            )
            num_targets += count_valid(targets)
        return self.parts.agreement.exchange(nll_nats, num_targets)

    def _load_batch(self) -> Micros:
        """This rank's share of the batch that begins at the run's position, in micro-batches."""
        size = self.spec.train.global_batch_size // self._place.world_size
        start = self.progress.next_sample + self._place.rank * size
        tokens, targets = self.parts.data.samples(start, start + size)
        num_targets = count_valid(targets)
        pieces = self._accumulation_steps
        device = self.parts.device
        micros = zip(tokens.to(device).chunk(pieces), targets.to(device).chunk(pieces), strict=True)
        return Micros(list(micros), num_targets)

    def _clip(self) -> float:
        limit = self.spec.optimizer.clip_norm or math.inf
        return float(nn.utils.clip_grad_norm_(self._parameters, limit))

    def _check(self, agreed: Agreed) -> None:
        if not math.isfinite(agreed.loss_nats):
            saved = f"step {self._saved_step}" if self._saved_step is not None else "the beginning"
            raise IsthmusError(
                f"the training loss is {agreed.loss_nats} at step {self.progress.step}; "
                f"the run can't go on from here, its last good state is that of {saved}",
                hint="lower optimizer.learning_rate or optimizer.clip_norm, "
                "or lengthen optimizer.schedule.warmup_steps",
            )

    def _interrupt(self, reason: str) -> None:
        self.save()
        self._emit_once(Stopped, step=self.progress.step, reason=reason)
        raise Interrupted(
            f"stopped by {reason} after step {self.progress.step} of {self.spec.train.steps}",
            hint="the same command goes on from there",
        )

    def _items(self) -> dict[str, Item]:
        """What a checkpoint holds, and what becomes of it with another number of ranks."""
        parts = self.parts
        scope: Scope = "replicated" if self.spec.sync.replicas_equal else "per_rank"
        return {
            "model": Item(parts.model, scope),
            "optimizer": Item(parts.optimizer, scope),
            "strategy": Item(parts.replica, scope="per_rank", on_resize="reset"),
            "progress": Item(self.progress),
            "random": Item(RandomState(), scope="per_rank", on_resize="reset"),
        }

    def _communication(self) -> tuple[int, float]:
        """Payload bytes sent by this rank so far, and seconds that it waited for the network."""
        metrics = self.parts.replica.metrics()
        return metrics.sent_nbytes, metrics.exposed_wait_s

    def _mfu(self, tokens_per_s: float) -> float | None:
        peak = self.parts.peak_flops_per_s
        return self._flops_per_token * tokens_per_s / peak if peak else None

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = self.parts.autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.parts.device.type, dtype=dtype)

    def _emit(self, event: type[Event], **fields: Any) -> None:
        self.parts.log.emit(event(time_s=time.time(), rank=self._place.rank, **fields))

    def _emit_once(self, event: type[Event], **fields: Any) -> None:
        """Emits what concerns the whole run: rank 0 says it."""
        if self._place.rank == 0:
            self._emit(event, **fields)


@dataclass(frozen=True)
class Micros:
    """A rank's share of a batch.

    Attributes:
        micros: Tokens and targets ``[b, T]`` of each micro-batch, on the device.
        num_targets: Valid targets in all of them.
    """

    micros: list[tuple[Tensor, Tensor]]
    num_targets: int


def count_valid(targets: Tensor) -> int:
    """Number of targets that count for the loss."""
    return int((targets != IGNORED).sum())


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0
