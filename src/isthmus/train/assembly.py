"""From a spec to the parts of a training loop, on this rank."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from isthmus.checkpoint import Checkpointer
from isthmus.data import TextData
from isthmus.elastic.environment import RankEnvironment
from isthmus.errors import ConfigError, DataError
from isthmus.model import Transformer
from isthmus.observe.log import EventLog
from isthmus.spec.devices import peak_flops_per_s
from isthmus.spec.optimizer import OptimizerSpec
from isthmus.spec.run import RunSpec
from isthmus.sync import replicate
from isthmus.train.agreement import Agreement
from isthmus.train.preflight import open_checked_data
from isthmus.train.run_directory import RunDirectory
from isthmus.train.state import seed_everything
from isthmus.train.trainer import Parts


def choose_device(spec: RunSpec, environment: RankEnvironment) -> torch.device:
    """The device that this rank computes on.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if spec.train.device == "cuda" and not available:
        raise ConfigError(
            'train.device = "cuda", but torch sees no CUDA device here',
            hint='install a CUDA build of torch, or set train.device = "auto"',
        )
    if spec.train.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", environment.local_rank)


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over a model's parameters: matrices are decayed, vectors are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.epsilon,
        fused=True,
    )


@contextmanager
def assembled(
    spec: RunSpec,
    directory: RunDirectory,
    environment: RankEnvironment,
    device: torch.device,
    log: EventLog,
) -> Generator[Parts, None, None]:
    """Builds the parts of a run and takes them apart again.

    Every rank calls it at the same time: it forms groups and broadcasts the weights.

    Raises:
        ConfigError: What the spec asks for can't be done here.
        DataError: The data are missing, or the ranks found different ones.
    """
    seed_everything(spec.seed, environment.rank)
    several = environment.world_size > 1
    wait = timedelta(seconds=spec.deadlines.checkpoint_s)
    group = dist.new_group(backend="gloo", timeout=wait) if several else None
    data = _open_data_together(spec, environment)
    model = Transformer(spec.model, seed=spec.seed).to(device)
    optimizer = build_optimizer(spec.optimizer, model)
    replica = replicate(model, optimizer, spec.sync)
    autocast = _autocast_dtype(spec, device)
    try:
        yield Parts(
            model=model,
            forward=_compiled(model) if spec.train.compile else model,
            optimizer=optimizer,
            replica=replica,
            data=data,
            checkpointer=Checkpointer(
                directory.checkpoints,
                keep_last=spec.checkpoint.keep_last,
                deadline_s=spec.deadlines.checkpoint_s,
            ),
            agreement=Agreement(group),
            log=log,
            device=device,
            autocast=autocast,
            peak_flops_per_s=_peak(device, autocast),
        )
    finally:
        replica.close()


def versions() -> dict[str, str]:
    """Versions of what decides the numbers of a run."""
    return {
        "isthmus": version("isthmus"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def describe_device(device: torch.device) -> str:
    """The device for people: an accelerator's name, or ``cpu`` with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''} a rank"


def digest(spec: RunSpec) -> str:
    """A short name of a configuration."""
    return xxhash.xxh3_64_hexdigest(spec.model_dump_json().encode())


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model, compiled at its first call.

    Raises:
        ConfigError: That would need a C++ compiler, and there is none.
    """
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and not any(shutil.which(name) for name in compilers):
        raise ConfigError(
            f"train.compile needs a C++ compiler on the CPU; found none of {', '.join(compilers)}",
            hint="install g++, or set train.compile = false",
        )
    return torch.compile(model)


def _open_data_together(spec: RunSpec, environment: RankEnvironment) -> TextData:
    """Opens the data on every rank; the first rank of each host prepares them for the others."""

    def opened() -> TextData:
        return open_checked_data(spec, environment.world_size)

    if environment.world_size == 1:
        return opened()
    first = opened() if environment.local_rank == 0 else None
    wait = timedelta(seconds=spec.deadlines.data_s)
    group: Any = dist.new_group(backend="gloo", timeout=wait)
    digests: list[Any] = [None] * environment.world_size
    dist.all_gather_object(digests, first.digest if first else None, group=group)
    dist.destroy_process_group(group)
    data = first or opened()
    others = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
    if set(others.values()) != {data.digest}:
        found = ", ".join(f"rank {rank}: {digest}" for rank, digest in others.items())
        raise DataError(
            f"rank {environment.rank} found other data ({data.digest}) than the rest ({found})",
            hint="every host must see the same files; with data.kind = stdlib also the same Python",
        )
    return data


def _autocast_dtype(spec: RunSpec, device: torch.device) -> torch.dtype | None:
    wants = spec.train.precision == "bf16" or (
        spec.train.precision == "auto"
        and device.type == "cuda"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return torch.bfloat16 if wants else None


def _peak(device: torch.device, autocast: torch.dtype | None) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops_per_s(torch.cuda.get_device_name(device), "bf16" if autocast else "fp32")
