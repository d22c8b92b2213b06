"""Strategies that reduce gradients: hooks, buckets, overlap, completion.

The way of a gradient: backward accumulates it into ``parameter.grad``; the hook that fills the next
bucket in order makes all its gradients views of the bucket (one copy, none if they are views
already) and launches the bucket's reduction; when backward has reached every leaf, a callback of
the autograd engine launches what is left, waits for all, and backward returns.

Every rank calls the same collectives in the same order whatever arrives when: buckets are launched
strictly in order, all of them, every time; a reduction of several rounds goes on by one round
whenever a later bucket is launched, and at the end.

Limits: a backward that reaches no parameter at all on one rank calls nothing there, and the others
wait until the process group's timeout. Reentrant activation checkpointing runs a backward of its
own for each segment, which then counts as one: an error, since it reaches that segment only; use
``use_reentrant=False``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from isthmus.codec.comm import Comm
from isthmus.codec.reducer import Bucket, Reducer, Slot
from isthmus.errors import CheckpointError, ConfigError, IsthmusError
from isthmus.lazy import torch
from isthmus.spec.codec import ReducerSpec, TensorInfo, describe
from isthmus.sync.explain import ExplainRow, Explanation
from isthmus.sync.strategy import Setting, Strategy

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

Plan = Callable[[Sequence[TensorInfo]], list[list[int]]]
"""Groups tensors into buckets, in the order of launches."""


class GradientStrategy(Strategy):
    """Reduces gradients bucket by bucket during backward.

    Args:
        setting: Model, parameters and ranks.
        plan: Which parameters share a bucket.
        codec: Makes the reducer.
        unused: What a parameter without a gradient is; see ``AllReduce``.
        kind: Name of the strategy, for people.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        plan: Plan,
        codec: ReducerSpec,
        unused: Literal["error", "zero"],
        kind: str,
    ) -> None:
        super().__init__()
        if setting.comm is None:
            raise ConfigError(
                f"strategy {kind!r} needs a process group, and there is none",
                hint="call torch.distributed.init_process_group() first, or take strategy 'none'",
            )
        self._comm = setting.comm
        self._kind = kind
        self._codec = codec
        self._unused = unused
        self._reducer = codec.build_reducer()
        self._tensors = describe(setting.parameters)
        self._plan = plan(self._tensors)
        self._handles: list[Any] = []
        self._buckets: list[_Filling] = []
        self._pass: _Pass | None = None
        self._failure: BaseException | None = None
        if self._comm.world_size > 1:
            self._fill_buckets(list(setting.parameters.values()))

    def attach(self) -> None:
        """Registers a hook on each parameter; none if this process is alone."""
        for filling in self._buckets:
            hook = partial(self._on_gradient, filling)
            for gradient in filling.gradients:
                handle = gradient.parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)

    def detach(self) -> None:
        """Removes the hooks. Gradients stay views of the buckets."""
        while self._handles:
            self._handles.pop().remove()

    def _fill_buckets(self, parameters: list[Tensor]) -> None:
        for members in self._plan:
            first = parameters[members[0]]
            numel = sum(self._tensors[i].numel for i in members)
            flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
            slots = tuple(_lay_out(flat, members, self._tensors, parameters))
            gradients = tuple(
                _Gradient(i, slot.info.name, parameters[i], slot.view)
                for i, slot in zip(members, slots, strict=True)
            )
            bucket = Bucket(len(self._buckets), flat, slots)
            self._buckets.append(_Filling(bucket, gradients, len(gradients)))
        device = parameters[0].device if parameters else None
        self._flags = torch.zeros(len(parameters), dtype=torch.uint8, device=device)
        self._task_of_engine = torch._C._current_graph_task_id

    # During backward.

    def _on_gradient(self, filling: _Filling, _: Tensor) -> None:
        """The hook: autograd has just accumulated a gradient that belongs into ``filling``."""
        if not self.synchronising:
            return
        current = self._pass
        try:
            if current is None or current.task != self._task_of_engine():
                current = self._begin()
            filling.pending -= 1
            if filling.pending == 0:
                self._launch_filled(current)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _begin(self) -> _Pass:
        """Start of a backward that synchronises: have the engine call :meth:`_on_end`."""
        if self._failure is not None or (self._pass is not None and self._pass.launched):
            raise IsthmusError(
                "an earlier backward failed after it had begun to send gradients, so this rank may "
                "be out of step with the others",
                hint="restart from the last checkpoint; if it was the first backward, use "
                "activation checkpointing with use_reentrant=False",
            ) from self._failure
        self._reset()
        self._pass = _Pass(self._comm, self._reducer, self._task_of_engine())
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._on_end, self._pass))
        return self._pass

    def _launch_filled(self, current: _Pass) -> None:
        """Launches, in order, the buckets that are full and whose predecessors are launched."""
        while current.launched < len(self._buckets):
            filling = self._buckets[current.launched]
            if filling.pending:
                return
            current.missing.extend(filling.gather())
            current.launch(filling.bucket, step=self.synchronisations)

    # At its end.

    def _on_end(self, current: _Pass) -> None:
        """The engine's callback: backward has reached every leaf."""
        if current is not self._pass or self._failure is not None:
            return
        try:
            for filling in self._buckets:
                filling.pending = 0
            self._launch_filled(current)
            agreed = self._comm.all_reduce(self._raise_flags(current.missing), op="max")
            current.finish(agreed)
            flagged = self._flags.nonzero().flatten().tolist()
        except BaseException as error:
            self._failure = error
            raise
        self.exposed_wait_s += current.exposed_wait_s
        self.communication_time_s += perf_counter() - current.began_at_s
        self.synchronisations += 1
        self._reset()
        self._settle_missing(current.missing, set(flagged))

    def _raise_flags(self, missing: list[_Gradient]) -> Tensor:
        """One byte a parameter: it is missing here (``error``), or present here (``zero``)."""
        self._flags.fill_(self._unused == "zero")
        for gradient in missing:
            self._flags[gradient.index] = self._unused == "error"
        return self._flags

    def _settle_missing(self, missing: list[_Gradient], flagged: set[int]) -> None:
        """Flagged are those missing anywhere (``error``) or present anywhere (``zero``)."""
        if self._unused == "zero":
            for gradient in missing:
                if gradient.index in flagged:
                    gradient.parameter.grad = gradient.view
        elif flagged:
            here = {gradient.index for gradient in missing}
            names = ", ".join(
                self._tensors[i].name + ("" if i in here else " (on other ranks)")
                for i in sorted(flagged)
            )
            raise ConfigError(
                f"backward gave no gradient to {len(flagged)} of {len(self._tensors)} "
                f"parameters: {names}",
                hint="freeze what is not used (requires_grad=False), or use allreduce with "
                "unused='zero'; of several backward passes, put all but the last under no_sync(); "
                "use activation checkpointing with use_reentrant=False",
            )

    def _reset(self) -> None:
        self._pass = None
        for filling in self._buckets:
            filling.pending = len(filling.gradients)

    # What it says of itself.

    def explain(self) -> Explanation:
        """Bucket, codec and bytes of each parameter."""
        world_size = self._comm.world_size
        name = getattr(self._codec, "kind", type(self._codec).__name__)
        rows: dict[int, ExplainRow] = {}
        for index, members in enumerate(self._plan):
            tensors = [self._tensors[i] for i in members]
            sent = self._codec.traffic(tensors, world_size).wire_nbytes_per_step
            numel = sum(tensor.numel for tensor in tensors)
            for i, tensor in zip(members, tensors, strict=True):
                plain = 2 * tensor.nbytes * (world_size - 1) / world_size
                share = sent * tensor.numel / numel if numel else 0.0
                note = "" if name != "none" else "codec none was asked for"
                rows[i] = ExplainRow(
                    tensor.name, tensor.shape, tensor.dtype, index, name, plain, share, note
                )
        return Explanation(
            f"strategy {self._kind}, codec {self._codec.label()}: {len(self._tensors)} gradients "
            f"in {len(self._plan)} buckets, mean of {world_size} replicas at each backward; bytes "
            "are the least that a rank puts on the network",
            tuple(rows[i] for i in range(len(self._tensors))),
        )

    def state_dict(self) -> dict[str, Any]:
        """The reducer's state, and the count that seeds random rounding."""
        return {
            "synchronisations": self.synchronisations,
            "reducer": self._reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        if state.keys() != {"synchronisations", "reducer"}:
            raise CheckpointError(
                f"the state of strategy {self._kind!r} has synchronisations and reducer; "
                f"got {sorted(state)}",
                hint="resume with the strategy that the checkpoint was written with",
            )
        self._reducer.load_state_dict(state["reducer"])
        self.synchronisations = int(state["synchronisations"])


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """A parameter and the place of its gradient in a bucket."""

    index: int
    name: str
    parameter: Tensor
    view: Tensor


@dataclass(slots=True, eq=False)
class _Filling:
    """A bucket, and how many of its gradients this backward has yet to bring."""

    bucket: Bucket
    gradients: tuple[_Gradient, ...]
    pending: int

    def gather(self) -> list[_Gradient]:
        """Makes every gradient a view of the bucket, and returns those that do not exist.

        One that was accumulated before (under ``no_sync``) takes part although this backward did
        not touch it; one that does not exist counts as zero.
        """
        missing: list[_Gradient] = []
        views: list[Tensor] = []
        found: list[Tensor] = []
        for gradient in self.gradients:
            value = gradient.parameter.grad
            if value is gradient.view:
                continue
            if value is None:
                gradient.view.zero_()
                missing.append(gradient)
                continue
            _check_can_travel(gradient.name, value)
            views.append(gradient.view)
            found.append(value)
            gradient.parameter.grad = gradient.view
        if found:
            torch._foreach_copy_(views, found)
        return missing


def _check_can_travel(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse or gradient.requires_grad:
        kind = "is sparse" if gradient.is_sparse else "has a graph (create_graph=True)"
        raise ConfigError(
            f"the gradient of {name} {kind} and cannot be put into a bucket",
            hint="use sparse=False, or torch.autograd.grad() for derivatives of gradients",
        )


class _Pass:
    """The reductions of one backward.

    Attributes:
        task: The engine's number of this backward.
        launched: Number of buckets launched.
        missing: Their gradients that do not exist on this rank.
        began_at_s: When the first one was.
        exposed_wait_s: Time spent waiting.
    """

    def __init__(self, comm: Comm, reducer: Reducer, task: int) -> None:
        self.task = task
        self.launched = 0
        self.missing: list[_Gradient] = []
        self.began_at_s = perf_counter()
        self.exposed_wait_s = 0.0
        self._comm = comm
        self._reducer = reducer
        self._reductions: list[_Reduction] = []

    def launch(self, bucket: Bucket, *, step: int) -> None:
        """Begins a bucket's reduction and takes each earlier one a round further."""
        if self.launched == 0:
            self.began_at_s = perf_counter()
        self.launched += 1
        if bucket.flat.numel() == 0:
            return
        earlier = list(self._reductions)
        rounds = self._reducer.reduce(bucket, self._comm, step=step)
        self._reductions.append(_Reduction(rounds, next(rounds)))
        self._advance(earlier)

    def finish(self, last: dist.Work) -> None:
        """Runs all reductions to their end, and waits for the collective that was called last."""
        while self._advance(self._reductions):
            pass
        for reduction in self._reductions:
            self._wait(reduction.work)
            if next(reduction.rounds, None) is not None:
                raise RuntimeError(f"{self._reducer} has more than {self._reducer.rounds} rounds")
        self._wait(last)

    def _advance(self, reductions: Sequence[_Reduction]) -> bool:
        """Begins the next round of those that have one; says whether there were any."""
        behind = [reduction for reduction in reductions if reduction.begun < self._reducer.rounds]
        for reduction in behind:
            self._wait(reduction.work)
            reduction.work = next(reduction.rounds)
            reduction.begun += 1
        return bool(behind)

    def _wait(self, work: dist.Work) -> None:
        began_at_s = perf_counter()
        work.wait()
        self.exposed_wait_s += perf_counter() - began_at_s


@dataclass(slots=True, eq=False)
class _Reduction:
    """A reducer at work on a bucket, the collective under way, and how many it has begun."""

    rounds: Iterator[dist.Work]
    work: dist.Work
    begun: int = 1


def _lay_out(
    flat: Tensor, members: list[int], tensors: Sequence[TensorInfo], parameters: list[Tensor]
) -> Iterator[Slot]:
    """Slots one after the other, each strided as its parameter where that leaves no gaps."""
    offset = 0
    for i in members:
        parameter = parameters[i]
        # empty_like keeps the strides of what is dense and packs what is not.
        strides = torch.empty_like(parameter, device="meta").stride()
        yield Slot(tensors[i], offset, flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
