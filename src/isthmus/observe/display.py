"""The live view of a run: a progress panel on a terminal, one plain line per interval elsewhere.

It is fed events (of rank 0's log, which the launcher follows, or straight from the event log) and
told the time; it has no clock, thread or file of its own. Batch logs never see a progress bar.
Everything is drawn on the console that is passed in: give one on stderr, since stdout is for data.
rich honours NO_COLOR and TERM.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isthmus.observe import words
from isthmus.observe.events import (
    Baselines,
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Failure,
    FaultInjected,
    Notice,
    RunFinished,
    RunStarted,
    Step,
    Stopped,
    Validation,
)

_WINDOW_STEPS = 50
_SPARK_STEPS = 1024
_REDRAW_S = 0.1
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass
class _State:
    """What the view knows about the run."""

    started: RunStarted | None = None
    baselines: Baselines | None = None
    step: Step | None = None
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARK_STEPS))
    sent_nbytes: int = 0
    validation: Validation | None = None
    checkpoint: CheckpointSaved | None = None

    def take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = event
                self.recent.clear()
            case Baselines():
                self.baselines = event
            case Step():
                self.step = event
                self.recent.append(event)
                self.losses.append(event.loss_nats)
                self.sent_nbytes += event.sent_nbytes
            case Validation():
                self.validation = event
            case CheckpointSaved():
                self.checkpoint = event

    @property
    def recent_s(self) -> float:
        return sum(step.step_time_s for step in self.recent)

    @property
    def tokens_per_s(self) -> float | None:
        tokens = sum(step.tokens for step in self.recent)
        return tokens / self.recent_s if self.recent_s > 0 else None

    @property
    def communication_share(self) -> float | None:
        waited_s = sum(step.communication_time_s for step in self.recent)
        return waited_s / self.recent_s if self.recent_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """By the median step, since the first one of an attempt warms up and tells little."""
        if self.started is None or self.step is None or len(self.recent) < 2:
            return None
        steps_left = max(0, self.started.total_steps - self.step.step)
        return steps_left * statistics.median(step.step_time_s for step in self.recent)

    def bits_per_byte(self, loss_nats: float) -> float | None:
        bytes_per_token = self.started.bytes_per_token if self.started else None
        return loss_nats / math.log(2) / bytes_per_token if bytes_per_token else None


class Display:
    """Shows a run as it happens.

    Args:
        console: Where to draw; whether it is a terminal decides the form.
        interval_s: Time between plain lines for steps. The first step, validations, checkpoints,
            notices, failures and the end are always shown.
    """

    def __init__(self, console: Console, *, interval_s: float = 10.0) -> None:
        self._console = console
        self._interval_s = interval_s
        self._state = _State()
        self._last_line_s = -math.inf
        self._last_drawn_s = -math.inf
        self._now_s = -math.inf
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            # Only tick() draws: no thread. stdout stays as it is, since data go there.
            self._live = Live(
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                get_renderable=self._panel,
            )
            self._live.start()

    def handle(self, event: Event) -> None:
        """Take one event. Steps of other ranks than 0 are passed over."""
        if isinstance(event, Step) and event.rank != 0:
            return
        self._state.take(event)
        self._now_s = max(self._now_s, event.time_s)
        if isinstance(event, Step):
            if event.time_s - self._last_line_s >= self._interval_s:
                self._show_step()
            return
        if isinstance(event, RunFinished | Stopped):
            self._show_step()
        line = self._line(event)
        stays = not isinstance(event, CheckpointSaved | Validation)
        if line is not None and (stays or self._live is None):
            self._console.print(line, highlight=False, soft_wrap=True)

    def tick(self, now_s: float) -> None:
        """Redraw the panel if it is due.

        Args:
            now_s: The time on the events' clock, in seconds since the Unix epoch.
        """
        if self._live is not None and now_s - self._last_drawn_s >= _REDRAW_S:
            self._now_s = self._last_drawn_s = now_s
            self._live.refresh()

    def close(self) -> None:
        """Draw once more and give the terminal back with its cursor. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live, self._last_line_s = None, math.inf  # what was drawn stays and is enough
        else:
            self._show_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _show_step(self) -> None:
        """Print the line of the latest step unless it is there already or the panel shows it."""
        step = self._state.step
        if self._live is None and step is not None and step.time_s > self._last_line_s:
            self._last_line_s = step.time_s
            self._console.print(self._step_line(step), highlight=False, soft_wrap=True)

    def _step_line(self, step: Step) -> Text:
        """``step 120/400  loss 2.310 nats  3.333 bit/B  12.3 k tok/s  ...``."""
        state = self._state
        total = f"/{state.started.total_steps}" if state.started else ""
        parts = [f"step {step.step}{total}", f"loss {words.nats(step.loss_nats)} nats"]
        bits = state.bits_per_byte(step.loss_nats)
        parts += [f"{bits:.3f} bit/B"] if bits is not None else []
        parts += [
            f"{words.count(state.tokens_per_s)} tok/s",
            f"sent {words.nbytes(state.sent_nbytes)}",
            f"comm {words.share(state.communication_share)}",
        ]
        if state.remaining_s is not None:
            parts.append(f"ETA {words.clock(state.remaining_s)}")
        return Text("  ".join(parts))

    def _line(self, event: Event) -> Text | None:
        """The line for an event that is shown whenever it happens; None for one that has none."""
        match event:
            case RunStarted():
                ranks = words.things(event.world_size, "rank")
                begin = f"resumes after step {event.start_step}" if event.start_step else "starts"
                return Text.assemble(
                    (event.name, "bold"),
                    f" {begin}: {ranks} on {event.device} by {event.launcher}, "
                    f"{words.count(event.num_params)} parameters, {event.total_steps} steps",
                )
            case Validation():
                return Text(f"validation at step {event.step}: {self._validation(event)}")
            case CheckpointSaved():
                return Text(f"checkpoint at step {event.step}: {_checkpoint(event)}")
            case CheckpointLoaded():
                return Text(f"goes on from the checkpoint of step {event.step}: {event.path}")
            case CheckpointRejected():
                return Text(f"checkpoint {event.path} passed over: {event.reason}", "yellow")
            case Notice(level="info"):
                return Text(event.message)
            case Notice():
                return Text(f"warning: {event.message} (rank {event.rank})", "yellow")
            case Failure():
                what = f"{event.error_type}: {event.message}"
                return Text(f"rank {event.rank} on {event.host} failed: {what}", "red")
            case FaultInjected():
                return Text(event.summary, "yellow")
            case Stopped():
                return Text(f"stopped at step {event.step} by {event.reason}", "yellow")
            case RunFinished():
                took = words.seconds(event.duration_s)
                return Text(f"finished {words.things(event.step, 'step')} in {took}", "green")
        return None

    def _validation(self, event: Validation) -> str:
        parts = [f"{words.nats(event.loss_nats)} nats"]
        parts += [f"{event.bits_per_byte:.3f} bit/B"] if event.bits_per_byte is not None else []
        if self._state.baselines is not None:
            parts.append(f"bigram {words.nats(self._state.baselines.bigram_nats)}")
            parts.append(f"trigram {words.nats(self._state.baselines.trigram_nats)}")
        return "  ".join(parts)

    def _panel(self) -> RenderableType:
        state = self._state
        if state.started is None:
            return Text("waiting for the ranks to meet", "dim")
        step = state.step.step if state.step else state.started.start_step
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        eta = words.ABSENT if state.remaining_s is None else words.clock(state.remaining_s)
        elapsed = words.clock(self._now_s - state.started.time_s)
        head.add_row(
            Text.assemble("step ", (f"{step}", "bold"), f"/{state.started.total_steps}"),
            ProgressBar(total=state.started.total_steps, completed=step),
            Text(f"{elapsed}  ETA {eta}"),
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for label, text in self._rows():
            rows.add_row(label, text)
        return Group(head, rows)

    def _rows(self) -> list[tuple[str, str]]:
        state = self._state
        rows = []
        if (step := state.step) is not None:
            bits = state.bits_per_byte(step.loss_nats)
            loss = f"{words.nats(step.loss_nats)} nats"
            loss += f"  {bits:.3f} bit/B" if bits is not None else ""
            rows.append(("loss", f"{loss}  {self._spark()}"))
            mfu = f"  MFU {words.share(step.mfu)}" if step.mfu is not None else ""
            rows.append(("speed", f"{words.count(state.tokens_per_s)} tok/s{mfu}"))
            waited = words.share(state.communication_share)
            sent = words.nbytes(state.sent_nbytes)
            rows.append(("network", f"rank 0 sent {sent}  {waited} of the time"))
            if (silent_s := self._now_s - step.time_s) > max(5.0, 5 * step.step_time_s):
                rows.append(("waiting", f"no step for {words.seconds(silent_s)}"))
        if state.validation is not None:
            at = f"  at step {state.validation.step}"
            rows.append(("validation", self._validation(state.validation) + at))
        if state.checkpoint is not None:
            at = f"at step {state.checkpoint.step}"
            rows.append(("checkpoint", f"{at}: {_checkpoint(state.checkpoint)}"))
        return rows

    def _spark(self, width: int = 32) -> str:
        """The latest losses as a line of blocks, where the console can show them."""
        finite = [loss for loss in self._state.losses if math.isfinite(loss)]
        if self._console.options.ascii_only or len(finite) < 2:
            return ""
        size = math.ceil(len(finite) / width)
        means = [
            math.fsum(finite[at : at + size]) / len(finite[at : at + size])
            for at in range(0, len(finite), size)
        ]
        low, high = min(means), max(means)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _checkpoint(event: CheckpointSaved) -> str:
    return f"{words.nbytes(event.nbytes)} in {words.seconds(event.duration_s)}  {event.path}"
