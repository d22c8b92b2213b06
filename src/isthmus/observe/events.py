"""What happened, as typed events: the vocabulary of the event log.

Every view of a run (live display, report, TensorBoard) is made from these events alone, so what is
not said here is not shown anywhere. Neighbours: :mod:`isthmus.observe.log` writes and reads them,
one JSON object a line.

Each event carries the wall clock (``time_s``, seconds since the Unix epoch) and the rank that
speaks. Unless its docstring says that every rank writes it, only rank 0 does. Fields with a default
may be absent; a field or an event type added later is skipped by an older reader, and an old log
stays readable as long as new fields have defaults.

JSON has no NaN and no infinity: a number that is not finite is written as the text ``"nan"``,
``"inf"`` or ``"-inf"`` and read back as the number.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, get_args

import msgspec


def _tag(class_name: str) -> str:
    """``CheckpointSaved`` is written as ``"checkpoint_saved"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag=_tag
):
    """Base of all events.

    Attributes:
        time_s: Wall clock when it happened, in seconds since the Unix epoch.
        rank: Who says so.
    """

    time_s: float
    rank: int


class RunStarted(Event, frozen=True, kw_only=True):
    """An attempt at the run began; a resumed run has several.

    Attributes:
        name: Name of the run.
        attempt: 1 for the first attempt, one more for each time it was resumed.
        world_size: Number of ranks of this attempt.
        total_steps: Step at which the run will be finished.
        start_step: Steps that were complete when this attempt began (0, or a checkpoint's).
        launcher: Who started the ranks: ``"local"``, ``"torchrun"``, ``"slurm"``.
        device: What rank 0 computes on, for people: ``"cpu"``, ``"NVIDIA H200"``.
        num_params: Parameters of the model.
        config_digest: Digest of the resolved configuration.
        bytes_per_token: Mean bytes of text behind one token (1 for bytes); None if not known.
        versions: Version by package: ``{"isthmus": ..., "torch": ..., "python": ...}``.
        settings: Further lines for people, as label and text: ``{"strategy": "allreduce"}``.
        git: Commit of the working tree, if there is one.
    """

    name: str
    attempt: int
    world_size: int
    total_steps: int
    launcher: str
    device: str
    num_params: int
    config_digest: str
    start_step: int
    bytes_per_token: float | None = None
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    git: str | None = None


class RankStarted(Event, frozen=True, kw_only=True):
    """A rank joined the group. Every rank writes it.

    Attributes:
        host: Host name.
        pid: Process id on that host.
        backend: Backend of its process group, such as ``"gloo"``.
        interface: Network interface that the backend uses, if it is known.
        device: What this rank computes on.
    """

    host: str
    pid: int
    backend: str
    interface: str | None = None
    device: str | None = None


class Baselines(Event, frozen=True, kw_only=True):
    """Cross-entropy of counting models on the same validation text, in nats per token."""

    bigram_nats: float
    trigram_nats: float


class Step(Event, frozen=True, kw_only=True):
    """One optimizer step is complete. Every rank writes it.

    Attributes:
        step: Its number, counted from 1 over the whole run.
        loss_nats: Mean training loss over all targets of the global batch, in nats per token.
        grad_norm: Norm of the averaged gradient before clipping.
        learning_rate: Of this step.
        tokens: Tokens of the global batch: what all ranks together took in this step.
        step_time_s: Wall time of the step on this rank.
        communication_time_s: Part of it in which this rank waited for the network.
        sent_nbytes: Payload that this rank handed to its process groups in this step.
        mfu: Model FLOPs utilisation, 0 to 1; None where the device's peak is not known.
    """

    step: int
    loss_nats: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_time_s: float
    communication_time_s: float
    sent_nbytes: int
    mfu: float | None = None


class Validation(Event, frozen=True, kw_only=True):
    """The validation text was scored.

    Attributes:
        step: Steps complete when it was scored.
        loss_nats: Mean loss in nats per token.
        bits_per_byte: The same per byte of text, in bits; None if bytes per token are not known.
        tokens: Number of targets scored.
        duration_s: Wall time it took.
    """

    step: int
    loss_nats: float
    tokens: int
    bits_per_byte: float | None = None
    duration_s: float | None = None


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint is complete on disk: its step, path, size and how long training waited."""

    step: int
    path: str
    nbytes: int
    duration_s: float


class CheckpointLoaded(Event, frozen=True, kw_only=True):
    """Training goes on from this checkpoint."""

    step: int
    path: str


class CheckpointRejected(Event, frozen=True, kw_only=True):
    """A checkpoint could not be trusted and was passed over, with the reason."""

    path: str
    reason: str


class Notice(Event, frozen=True, kw_only=True):
    """Something that people should know. Any rank may write it.

    Attributes:
        message: One sentence.
        level: How much it matters.
        once_key: If given, only the first notice with this key is kept, per rank and attempt.
    """

    message: str
    level: Literal["info", "warning"] = "warning"
    once_key: str = ""


class Failure(Event, frozen=True, kw_only=True):
    """A rank failed. Any rank may write it, or the launcher for a rank that can't any more.

    Attributes:
        host: Host of the rank that failed.
        error_type: Class of the error, or the signal that ended the process.
        message: Its text.
        traceback: Empty if there is none.
        step: The last complete step, if known.
    """

    host: str
    error_type: str
    message: str
    traceback: str = ""
    step: int | None = None


class FaultInjected(Event, frozen=True, kw_only=True):
    """A fault was made, or ended, on purpose. A lab writes it, to a log of its own.

    Attributes:
        fault: Its kind: ``"link_down"``, ``"partition"``.
        target: What it befell: ``"oslo-paris"`` (a link), ``"a0:eth0"`` (a NIC), ``"a0"`` (a host).
        value: What the target is from now on: ``"down"``, ``"20 Mbit/s"``, ``"as declared"``.
        is_end: Whether the fault, or this part of it, ended.
        since_start_s: Time since the lab started its command.
        step: The last complete step that the lab knew of, if it followed a run's.
        cause: ``"timeline"``, or ``"command"`` for a fault given by hand.
        error: Why it could not be made; empty if it was.
    """

    fault: str
    target: str
    value: str
    is_end: bool = False
    since_start_s: float
    step: int | None = None
    cause: str = "timeline"
    error: str = ""

    @property
    def summary(self) -> str:
        """One line for people: ``link_down: oslo-paris is down``."""
        ends = " ends" if self.is_end else ""
        failed = f", which failed: {self.error}" if self.error else ""
        return f"{self.fault}{ends}: {self.target} is {self.value}{failed}"


class Stopped(Event, frozen=True, kw_only=True):
    """The run stopped early on request, such as ``"SIGINT"``; the same command goes on."""

    step: int
    reason: str


class RunFinished(Event, frozen=True, kw_only=True):
    """All steps are done; ``duration_s`` is the wall time of this attempt."""

    step: int
    duration_s: float


AnyEvent = (
    RunStarted
    | RankStarted
    | Baselines
    | Step
    | Validation
    | CheckpointSaved
    | CheckpointLoaded
    | CheckpointRejected
    | Notice
    | Failure
    | FaultInjected
    | Stopped
    | RunFinished
)


class UnknownEventError(ValueError):
    """The line is a sound event of a type that this version does not know."""


class _Head(msgspec.Struct):
    event: str


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(AnyEvent, strict=False)  # not strict: "nan" is read as a float
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_KNOWN_TAGS = frozenset(_tag(kind.__name__) for kind in get_args(AnyEvent))


def encode_event(event: Event) -> bytes:
    """One line of JSON with its newline. Strict JSON whatever the numbers and texts are."""
    try:
        line = _ENCODER.encode(event)
    except UnicodeEncodeError:  # text from the system, such as a path that is not UTF-8
        line = _ENCODER.encode(_speakable(msgspec.to_builtins(event)))
    # msgspec writes NaN and infinity as null. Absent fields are omitted, so null is rare.
    if b"null" in line:
        line = _ENCODER.encode(_speakable(msgspec.to_builtins(event)))
    return line + b"\n"


def decode_event(line: bytes) -> Event:
    """The event of one line.

    Raises:
        UnknownEventError: The event is of a type that this version does not know.
        msgspec.DecodeError: The line is torn, or is no event.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        if _HEAD_DECODER.decode(line).event not in _KNOWN_TAGS:
            raise UnknownEventError(line.decode(errors="replace")) from None
        raise


def _speakable(value: Any) -> Any:
    """``value`` with numbers and texts that JSON can't hold spelled out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    return value
