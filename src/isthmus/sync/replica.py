"""One line that makes a model a replica: ``replica = replicate(model, optimizer, "allreduce")``.

The training loop does not change. What happens at start: ranks check that they hold the same model
and the same strategy, then take parameters and buffers from rank 0. What happens later is the
strategy's; see :mod:`isthmus.spec.sync` for the kinds.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isthmus.codec.comm import Comm
from isthmus.errors import CheckpointError, ConfigError
from isthmus.lazy import dist, torch
from isthmus.spec.base import kinds_of
from isthmus.spec.codec import describe
from isthmus.spec.sync import SyncSpec
from isthmus.sync.explain import ExplainRow, Explanation
from isthmus.sync.none import NoSync
from isthmus.sync.strategy import Metrics, Setting

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

_BROADCAST_BYTES = 25 * 2**20
_MARK = "_isthmus_replica_of"


def replicate(
    model: nn.Module,
    optimizer: optim.Optimizer,
    strategy: str | SyncSpec = "allreduce",
    *,
    group: dist.ProcessGroup | None = None,
) -> Replica:
    """Makes this rank's model one of several replicas that are trained as one.

    Call it on every rank, when parameters have the device, dtype and ``requires_grad`` that they
    are trained with, and before the first backward. Parameters and buffers are taken from rank 0
    of the group (not by strategy ``none``, which never communicates).

    Args:
        model: The model; it is not wrapped.
        optimizer: Its optimizer; strategies that act after a step hook into it.
        strategy: A strategy's spec, or the name of a kind that needs no settings.
        group: The ranks that hold a replica; the default process group if None.

    Returns:
        The handle to it. Each backward then averages gradients (means over ranks, so a loss that
        each rank divides by its own count is averaged without weights; normalise by the global
        count times the world size over ranks' counts where they differ).

    Raises:
        ConfigError: The strategy is unknown, needs a process group and there is none, or the ranks
            do not hold the same model.
    """
    spec = _resolve(strategy)
    alone = isinstance(spec, NoSync) or not (dist.is_available() and dist.is_initialized())
    return Replica(model, optimizer, spec, None if alone else Comm(group))


class Replica:
    """A model, its optimizer and the strategy that keeps it in step; made by :func:`replicate`.

    Attributes:
        spec: The strategy's declaration.
        strategy: Its runtime.
        world_size: Number of replicas.
        comm: The door to the process group, which counts; None if there is none.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, spec: SyncSpec, comm: Comm | None
    ) -> None:
        _check_usable(model, optimizer)
        parameters: dict[str, Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        setting = Setting(model, optimizer, parameters, comm)
        self.spec = spec
        self.comm = comm
        self.world_size = setting.world_size
        self._model = model
        self._startup = Metrics()
        self.strategy = spec.build(setting)
        if comm is not None and comm.world_size > 1:
            self._startup = _start_equal(model, spec, Comm(comm.group))
        self.strategy.attach()
        object.__setattr__(model, _MARK, id(model))
        self._handle = optimizer.register_step_post_hook(lambda *_: self.strategy.after_step())

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Inside, gradients accumulate on this rank; the next backward outside averages the sum.

        The way to accumulate: all micro-batches but the last under ``no_sync``.
        """
        before = self.strategy.synchronising
        self.strategy.synchronising = False
        try:
            yield
        finally:
            self.strategy.synchronising = before

    def explain(self) -> Explanation:
        """Every tensor of the model: its bucket, codec, bytes, and why it is as it is."""
        explanation = self.strategy.explain()
        explained = {row.name for row in explanation}
        frozen = describe(dict(self._model.named_parameters()))
        buffers = describe(dict(self._model.named_buffers()))
        rest = [
            ExplainRow(tensor.name, tensor.shape, tensor.dtype, None, "", 0, 0, note)
            for tensors, note in ((frozen, "frozen: has no gradient"), (buffers, "buffer: local"))
            for tensor in tensors
            if tensor.name not in explained
        ]
        return Explanation(explanation.summary, explanation.rows + tuple(rest))

    def metrics(self) -> Metrics:
        """Counters since the replica was made."""
        return Metrics(
            synchronisations=self.strategy.synchronisations,
            calls=self.comm.num_calls if self.comm else 0,
            sent_nbytes=self.comm.sent_nbytes if self.comm else 0,
            communication_time_s=self.strategy.communication_time_s,
            exposed_wait_s=self.strategy.exposed_wait_s,
            startup_calls=self._startup.calls,
            startup_nbytes=self._startup.sent_nbytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """The strategy's kind and state; the model's and the optimizer's are their own."""
        return {"kind": _kind(self.spec), "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; raises CheckpointError if it does not fit."""
        if state.get("kind") != _kind(self.spec):
            raise CheckpointError(
                f"the checkpoint is of strategy {state.get('kind')!r}, not {_kind(self.spec)!r}",
                hint="resume with the strategy that the checkpoint was written with",
            )
        self.strategy.load_state_dict(state["strategy"])

    def close(self) -> None:
        """Removes all hooks: the model is a plain one again."""
        self.strategy.detach()
        self._handle.remove()
        self._model.__dict__.pop(_MARK, None)


def _resolve(strategy: str | SyncSpec) -> SyncSpec:
    if isinstance(strategy, SyncSpec):
        return strategy
    kinds = kinds_of(SyncSpec)
    if strategy not in kinds:
        near = difflib.get_close_matches(str(strategy), kinds, n=1)
        raise ConfigError(
            f"there is no strategy {strategy!r}; expected one of {', '.join(kinds)}",
            hint=f"did you mean {near[0]!r}?" if near else "",
        )
    return kinds[strategy].model_validate({})  # type: ignore[return-value]


def _check_usable(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuses what would train wrongly without a word."""
    if model.__dict__.get(_MARK) == id(model):  # a copy of the model has the mark, not the hooks
        raise ConfigError(
            "this model is a replica already; two would average its gradients twice",
            hint="close() the first one, or keep and use it",
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if stepped and not any(id(p) in stepped for p in model.parameters()):
        raise ConfigError(
            "the optimizer steps none of the model's parameters",
            hint="build the optimizer from the parameters of this very model",
        )


def _kind(spec: SyncSpec) -> str:
    return getattr(spec, "kind", type(spec).__name__)


def _start_equal(model: nn.Module, spec: SyncSpec, comm: Comm) -> Metrics:
    """Checks that all ranks hold the same model, then copies rank 0's values to all."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    _check_same(tensors, spec, comm)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors.values():
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        for some in _groups(group):
            _broadcast(some, comm)
    return Metrics(calls=comm.num_calls, sent_nbytes=comm.sent_nbytes)


def _check_same(tensors: Mapping[str, Tensor], spec: SyncSpec, comm: Comm) -> None:
    lines = [
        f"{name} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}"
        for name, t in tensors.items()
    ]
    digest = zlib.crc32("\n".join([spec.model_dump_json(), *lines]).encode())
    device = next(iter(tensors.values())).device if tensors else None
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    all_ranks = torch.empty(comm.world_size, dtype=torch.int64, device=device)
    comm.all_gather(all_ranks, mine).wait()
    differing = [rank for rank, other in enumerate(all_ranks.tolist()) if other != all_ranks[0]]
    if differing:
        raise ConfigError(
            f"ranks {differing} hold another model or strategy than rank 0 (names, shapes, "
            "strides, dtypes and requires_grad of all tensors must be equal, and the strategy)",
            hint="build the model from the same configuration on every rank",
        )


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, together about as large as is sent at a time."""
    group: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        group.append(tensor)
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _BROADCAST_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _broadcast(tensors: list[Tensor], comm: Comm) -> None:
    """Copies rank 0's values to all, as bytes, in one call."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size + -size % 16)
    packed = torch.zeros(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    if not packed.numel():
        return
    places = [
        packed[start : start + size].view(tensor.dtype).view(tensor.shape)
        for tensor, start, size in zip(tensors, starts, sizes, strict=False)
    ]
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
    comm.broadcast(packed).wait()
    for tensor, place in zip(tensors, places, strict=True):
        tensor.copy_(place)
