"""All-reduce: the mean of the gradients, every step, while backward still runs.

Formula: ``g ← mean over ranks of g``, through any codec.
Bytes: those of the codec's reducer for each bucket (uncompressed: the gradient once), and one byte
a parameter to agree on which gradients there are.
Use it on links that carry the gradient within a step: it changes nothing about training (with
``codec = "none"``). On slower links compress, or synchronise less often.

What differs from DistributedDataParallel: it is complete when ``backward()`` returns without a
wrapper around the model; gradients live in the buckets, so they are copied once instead of twice;
a parameter without a gradient is an error that names it, on every rank, in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from isthmus.codec.none import Uncompressed
from isthmus.spec.base import ByKind
from isthmus.spec.codec import Collective, ReducerSpec, TensorInfo, Traffic
from isthmus.spec.sync import SyncSpec, plan_buckets
from isthmus.spec.units import Bytes
from isthmus.sync.gradients import GradientStrategy
from isthmus.sync.strategy import Setting, Strategy


class AllReduce(SyncSpec):
    """Average gradients over all replicas at each backward."""

    kind: Literal["allreduce"] = "allreduce"
    """Every step, overlapped with backward."""
    codec: Annotated[ReducerSpec, ByKind()] = Uncompressed()
    """What encodes gradients on their way."""
    bucket_bytes: Annotated[Bytes, Field(gt=0)] = 25 * 2**20
    """Gradients are sent in buckets that are closed when they reach this size."""
    first_bucket_bytes: Annotated[Bytes, Field(gt=0)] = 2**20
    """Size of the first bucket: small, so that sending starts early."""
    unused: Literal["error", "zero"] = "error"
    """A parameter without a gradient: ``error`` raises on all ranks; ``zero`` counts it as zero
    where it is missing, and leaves it without a gradient if it is missing everywhere."""

    def buckets(self, tensors: Sequence[TensorInfo]) -> list[list[int]]:
        """Indices into ``tensors`` for each bucket, in the order of launches."""
        return plan_buckets(
            tensors, bucket_bytes=self.bucket_bytes, first_bucket_bytes=self.first_bucket_bytes
        )

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """Every bucket's collectives and the flags, for each backward that synchronises."""
        if world_size == 1 or not tensors:
            return Traffic()
        buckets: list[list[Collective]] = []
        for index, members in enumerate(self.buckets(tensors)):
            rounds = self.codec.traffic([tensors[i] for i in members], world_size).collectives
            buckets.append(
                [replace(call, label=f"bucket {index}: {call.label}") for call in rounds]
            )
        flags = Collective("all_reduce", len(tensors), world_size, "which gradients there are")
        return Traffic(tuple(_in_order_of_calls([calls for calls in buckets if calls], flags)))

    def build(self, setting: Setting) -> Strategy:
        """Hooks on the gradients of the setting's parameters."""
        return GradientStrategy(
            setting, plan=self.buckets, codec=self.codec, unused=self.unused, kind=self.kind
        )


def _in_order_of_calls(buckets: list[list[Collective]], flags: Collective) -> list[Collective]:
    """First rounds bucket by bucket, each followed by one more round of all earlier buckets."""
    calls: list[Collective] = []
    waiting: list[list[Collective]] = []
    for first, *more in buckets:
        calls.append(first)
        calls.extend(rounds.pop(0) for rounds in waiting if rounds)
        waiting.append(more)
    calls.append(flags)
    while any(waiting):
        calls.extend(rounds.pop(0) for rounds in waiting if rounds)
    return calls
