"""What to train: the whole of a ``run.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from isthmus.errors import ConfigError
from isthmus.spec.base import ByKind, Spec
from isthmus.spec.checkpoint import CheckpointSpec
from isthmus.spec.data import DataSpec, StdlibData
from isthmus.spec.deadlines import Deadlines
from isthmus.spec.model import ModelSpec
from isthmus.spec.optimizer import OptimizerSpec
from isthmus.spec.parallel import ParallelSpec
from isthmus.spec.sync import SyncSpec
from isthmus.spec.units import Seconds

Precision = Literal["auto", "fp32", "bf16"]

NOT_IDENTITY: Final = frozenset({"name", "ranks", "parallel", "checkpoint", "deadlines", "observe"})
"""Tables that do not change what is learned: a run resumes although they differ."""


class TrainSpec(Spec):
    """The training loop."""

    steps: int = Field(500, ge=1, le=10**12)
    """Optimizer steps of the whole run."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Samples per forward pass and rank; unset means the rank's whole share at once."""
    precision: Precision = "auto"
    """``bf16`` computes in bfloat16 and keeps fp32 weights; ``auto`` does so on accelerators."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; ``auto`` takes an accelerator if there is one."""
    compile: bool = False
    """Compile the model with torch.compile."""
    validate_every_steps: int = Field(100, ge=0)
    """Steps between two validations; 0 validates only at the end."""
    validation_samples: int = Field(128, ge=1)
    """Samples of each validation, spread evenly over the validation set."""

    def accumulation_steps(self, world_size: int) -> int:
        """Forward passes per rank and optimizer step.

        Raises:
            ConfigError: If the batch does not divide by the ranks, or a rank's share by the
                micro-batch.
        """
        batch = self.global_batch_size
        if batch % world_size:
            lower, upper = batch // world_size * world_size, -(-batch // world_size) * world_size
            nearest = " or ".join(str(size) for size in (lower, upper) if size)
            raise ConfigError(
                f"train.global_batch_size = {batch} does not divide by {world_size} ranks",
                hint=f"use {nearest}, or another number of ranks",
            )
        share = batch // world_size
        micro = self.micro_batch_size or share
        if share % micro:
            raise ConfigError(
                f"each of {world_size} ranks has {share} samples a step, which do not divide by "
                f"train.micro_batch_size = {micro}",
                hint="choose a micro-batch size that divides "
                "train.global_batch_size / number of ranks",
            )
        return share // micro


class ObserveSpec(Spec):
    """What is shown and kept besides the event log."""

    log_interval_s: Seconds = 10.0
    """Time between two lines of progress where there is no terminal."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""


class RunSpec(Spec):
    """One training run."""

    name: str | None = Field(
        None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    """Name of the run and of its directory; unset means MODEL-DATA."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the weights, of the order of the samples and of everything else that is random."""
    ranks: int | None = Field(None, ge=1)
    """Ranks to start on this machine; unset means one per accelerator, or 2 without any."""
    model: ModelSpec = ModelSpec()
    """The model."""
    data: DataSpec = StdlibData()
    """The training data."""
    train: TrainSpec = TrainSpec()
    """The training loop."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer and its schedule."""
    parallel: ParallelSpec = ParallelSpec()
    """Axes of the device mesh."""
    sync: Annotated[SyncSpec, ByKind()] = Field(default=cast("SyncSpec", "allreduce"))
    """How replicas agree."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When checkpoints are written and how many are kept."""
    deadlines: Deadlines = Deadlines()
    """How long each wait may take."""
    observe: ObserveSpec = ObserveSpec()
    """What is shown and kept."""

    @model_validator(mode="after")
    def _model_fits_the_data(self) -> Self:
        length, limit = self.data.sequence_length, self.model.max_sequence_length
        if length > limit:
            raise PydanticCustomError(
                "sequence_length",
                "data.sequence_length = {length} is more than model.max_sequence_length = {limit}",
                {"length": length, "limit": limit},
            )
        vocabulary = self.data.vocab_size
        if vocabulary is not None and vocabulary > self.model.vocab_size:
            raise PydanticCustomError(
                "vocabulary",
                "the tokenizer has {vocabulary} tokens, but model.vocab_size = {size}",
                {"vocabulary": vocabulary, "size": self.model.vocab_size},
            )
        return self

    @property
    def run_name(self) -> str:
        """Name of the run: as given, or made from the model and the data."""
        return self.name or f"{self.model.preset_name or 'custom'}-{self.data.kind}"


def differences(old: RunSpec, new: RunSpec) -> list[tuple[str, Any, Any]]:
    """Keys in which two runs would learn something else, each with the old and the new value."""
    before, after = (dict(_leaves(_identity(run))) for run in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def _identity(run: RunSpec) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude=set(NOT_IDENTITY))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
