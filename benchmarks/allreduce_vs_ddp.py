"""Two ranks with ``replicate(model, optimizer, "allreduce")`` against DistributedDataParallel.

Both on gloo, in the same two processes and process group, in turn: the same model from the same
weights, the same batches, AdamW and clipping, buckets of 25 MiB after a first one of 1 MiB (the
defaults of both; the JSON shows what each made of them). DDP (variant A) runs with its default,
gradients copied out of the buckets, and with ``gradient_as_bucket_view``; its broadcast of buffers
before each forward is switched off, since the model's never change: that is in DDP's favour.
With accumulation, all micro-batches but the last run under ``no_sync`` of each.

A run's time is that of the slower rank, its CPU time that of both. Both ranks follow the same
order of runs, by the same seed. One thread a rank, pinned by nothing.

Claim: not slower than DDP beyond 5 %.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from isthmus.measure.timing import compare_each
from isthmus.model import Transformer, token_loss
from isthmus.spec.model import ModelSpec
from isthmus.sync import replicate

RANKS: Final = 2
RATIO_LIMIT: Final = 1.05
BATCH: Final = 4
SEQUENCE: Final = 128
WARM_UP_STEPS: Final = 4
"""More than one: DDP orders its buckets anew after the first."""
_TIMEOUT: Final = timedelta(minutes=10)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        model: A preset.
        accumulation: Micro-batches a step.
        bucket_view: DDP's ``gradient_as_bucket_view``.
        steps: In a run.
    """

    model: str
    accumulation: int
    bucket_view: bool
    steps: int

    def __str__(self) -> str:
        micros = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        return f"{self.model}{micros}{', gradient_as_bucket_view' if self.bucket_view else ''}"


CASES: Final = (
    Case("gpt-1m", 1, bucket_view=False, steps=8),
    Case("gpt-1m", 1, bucket_view=True, steps=8),
    Case("gpt-1m", 4, bucket_view=False, steps=2),
    Case("gpt-1m", 4, bucket_view=True, steps=2),
    Case("gpt-10m", 1, bucket_view=False, steps=1),
    Case("gpt-10m", 1, bucket_view=True, steps=1),
)
QUICK_CASES: Final = (
    Case("gpt-1m", 1, bucket_view=True, steps=4),
    Case("gpt-1m", 4, bucket_view=True, steps=1),
)


def cases_of(options: Namespace) -> list[Case]:
    """The cases that the options ask for."""
    cases = QUICK_CASES if options.quick else CASES
    return [case for case in cases if options.only in str(case)]


class Side:
    """A model with its optimizer, and how it synchronises.

    Args:
        model: Gives logits; the module itself or its DDP wrapper.
        optimizer: Of its parameters.
        no_sync: Makes what keeps a backward local.
        batches: Micro-batches of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        no_sync: Callable[[], AbstractContextManager[None]],
        batches: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.model = model
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._no_sync = no_sync
        self._batches = batches
        self.losses: list[float] = []

    def step(self) -> None:
        """One step of training."""
        *first, last = self._batches
        total = 0.0
        with self._no_sync() if first else contextlib.nullcontext():
            for batch in first:
                total += self._backward(*batch)
        total += self._backward(*last)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(total)

    def run(self, steps: int) -> dict[str, float]:
        """Some steps; returns the seconds a step on the slower rank, and the CPU time of both."""
        dist.barrier()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        slowest, together = torch.tensor(wall_s), torch.tensor(cpu_s)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(together)
        return {"wall_s": float(slowest) / steps, "cpu_s": float(together) / steps}

    def _backward(self, tokens: Tensor, targets: Tensor) -> float:
        loss = token_loss(self.model(tokens), targets) / (targets.numel() * len(self._batches))
        loss.backward()
        return loss.item()


def sides_of(case: Case) -> tuple[Side, Side, dict[str, Any]]:
    """DDP, isthmus, and the buckets of each."""
    spec = ModelSpec.preset(case.model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (case.accumulation, BATCH, SEQUENCE + 1)
    texts = torch.randint(spec.vocab_size, shape, generator=generator)
    batches = [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]

    theirs = DistributedDataParallel(
        Transformer(spec),
        forward_sync_buffers=False,
        gradient_as_bucket_view=case.bucket_view,
    )
    ddp = Side(theirs, _adamw(theirs), theirs.no_sync, batches)
    model = Transformer(spec)
    optimizer = _adamw(model)
    replica = replicate(model, optimizer, "allreduce")
    ours = Side(model, optimizer, replica.no_sync, batches)
    for side in (ddp, ours):
        side.run(WARM_UP_STEPS)
    nbytes = dict[int, int]()
    for row in replica.explain():
        if row.bucket is not None:
            nbytes[row.bucket] = nbytes.get(row.bucket, 0) + _nbytes(model, row.name)
    logged = theirs._get_ddp_logging_data()
    rebuilt = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    buckets = {
        "a_nbytes": [int(size) for size in rebuilt.split(",") if size.strip()],
        "b_nbytes": [nbytes[index] for index in sorted(nbytes)],
    }
    return ddp, ours, buckets


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _nbytes(model: nn.Module, name: str) -> int:
    parameter = model.get_parameter(name)
    return parameter.numel() * parameter.element_size()


def one_rank(rank: int, options: Namespace, place: str) -> None:
    """What each of the two processes does; rank 0 writes the result into ``place``."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{place}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=_TIMEOUT)
    found = [
        one_case(case, options, harness.say if rank == 0 else _silent) for case in cases_of(options)
    ]
    if rank == 0:
        Path(place, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def one_case(case: Case, options: Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Both sides in turn; its part of the JSON."""
    ddp, ours, buckets = sides_of(case)
    blocks = harness.blocks_of(options)
    say(f"{case}: {blocks} blocks, {case.steps} steps a run")
    found = compare_each(
        partial(ddp.run, case.steps),
        partial(ours.run, case.steps),
        blocks=blocks,
        seed=options.seed,
    )
    say(f"{case}: {found['wall_s']}")
    compared = min(len(ddp.losses), len(ours.losses))
    return {
        "model": case.model,
        "accumulation": case.accumulation,
        "gradient_as_bucket_view": case.bucket_view,
        "steps_a_run": case.steps,
        "buckets": buckets,
        "per_step": {name: harness.shown(each) for name, each in found.items()},
        "same_work": {
            "steps_compared": compared,
            "losses_equal": ddp.losses[:compared] == ours.losses[:compared],
        },
        "claims": [
            harness.claim(
                f"{case}: at most {RATIO_LIMIT:g} times DDP's time",
                found["wall_s"].at_most(RATIO_LIMIT),
            )
        ],
    }


def _silent(_: str) -> None:
    pass


def measure(options: Namespace) -> dict[str, Any]:
    if not cases_of(options):
        raise SystemExit(f"error: --only {options.only!r} is in no case's name")
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as place:
        torch.multiprocessing.spawn(one_rank, (options, place), nprocs=RANKS)
        found = json.loads(Path(place, "found.json").read_text())
    return {
        "a": "DistributedDataParallel",
        "b": 'isthmus.replicate(model, optimizer, "allreduce")',
        "claims": [claim for case in found for claim in case.pop("claims")],
        "cases": found,
    }


def add_options(parser: ArgumentParser) -> None:
    harness.add_block_options(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")


if __name__ == "__main__":
    harness.run(__file__, __doc__ or "", measure, add_options)
