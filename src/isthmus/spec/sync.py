"""What a synchronisation strategy declares.

A strategy says how replicas of a model agree: what travels, when, with whom, and how. Members live
in :mod:`isthmus.sync`, one file each, beside their runtime. A spec is data and arithmetic; the same
one is read by the planner and run by :func:`isthmus.sync.replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from isthmus.spec.base import KindSpec
from isthmus.spec.codec import TensorInfo, Traffic

if TYPE_CHECKING:
    from isthmus.sync.strategy import Setting, Strategy


class SyncSpec(KindSpec):
    """Base of all strategies; chosen by ``kind``."""

    room: ClassVar[str] = "isthmus.sync"
    replicas_equal: ClassVar[bool] = True
    """Whether all replicas hold the same parameters after a step; a checkpoint then keeps one."""

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """The collectives of a rank in steady state, in the order of the calls, and when.

        Args:
            tensors: The parameters that are trained, in the order of registration.
            world_size: Number of replicas.
        """
        raise NotImplementedError

    def build(self, setting: Setting) -> Strategy:
        """The runtime of this strategy for one model, its optimizer and its process group."""
        raise NotImplementedError


def plan_buckets(
    tensors: Sequence[TensorInfo], *, bucket_bytes: int, first_bucket_bytes: int
) -> list[list[int]]:
    """Groups tensors into buckets in the order in which backward reaches them.

    Backward is taken to go through parameters in reverse order of registration. A bucket holds one
    dtype and is closed by the tensor that fills it, so a large tensor never splits; the first one
    of each dtype is small, so that communication starts early. The same rule as
    DistributedDataParallel's. Buckets are listed in the order in which their last gradient comes.

    Returns:
        Indices into ``tensors``, bucket by bucket.
    """
    closed: list[list[int]] = []
    open_by_dtype: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    limits: dict[str, int] = {}
    for index in reversed(range(len(tensors))):
        dtype = tensors[index].dtype
        open_by_dtype.setdefault(dtype, []).append(index)
        filled[dtype] = filled.get(dtype, 0) + tensors[index].nbytes
        if filled[dtype] >= limits.setdefault(dtype, first_bucket_bytes):
            closed.append(open_by_dtype.pop(dtype))
            filled[dtype] = 0
            limits[dtype] = bucket_bytes
    closed.extend(open_by_dtype.values())
    return sorted(closed, key=lambda bucket: -bucket[-1])
