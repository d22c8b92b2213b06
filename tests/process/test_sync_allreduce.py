"""Gradients averaged during backward: equal to DistributedDataParallel, in bytes as declared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from isthmus.codec.bf16 import BFloat16
from isthmus.codec.int8 import Int8
from isthmus.codec.none import Uncompressed
from isthmus.errors import ConfigError, IsthmusError
from isthmus.spec.codec import CodecSpec, describe
from isthmus.sync import Replica, replicate
from isthmus.sync.allreduce import AllReduce

SMALL_BUCKETS = {"bucket_bytes": 4096, "first_bucket_bytes": 512}
CODECS = [
    Uncompressed(),
    BFloat16(),
    Int8(),
    Int8(block=64, rounding="stochastic"),
]


class Net(nn.Module):
    """Tied weights, a bias, a norm, a buffer, a frozen parameter, odd sizes, one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 23)
        self.first = nn.Linear(23, 41)
        self.norm = nn.LayerNorm(41)
        self.gain = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(41, 23)
        self.head = nn.Linear(23, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("offset", torch.randn(23))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.offset
        hidden = hidden + self.second(torch.tanh(self.norm(self.first(hidden))) * self.gain)
        return self.head(hidden)


def batches(rank: int, count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    draws = [torch.randint(37, (2, size, 6), generator=generator) for _ in range(count)]
    return [(tokens, targets) for tokens, targets in draws]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def digest(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def make(rank: int, spec: AllReduce, seed: int = 0) -> tuple[nn.Module, Any, Replica]:
    """A replica; ranks start with different values, so what they share came from rank 0."""
    torch.manual_seed(seed + rank)
    model = Net()
    optimizer = adamw(model)
    return model, optimizer, replicate(model, optimizer, spec)


# --- equal to DDP ---------------------------------------------------------------------------


def train_like_ddp(
    rank: int, world_size: int, accumulate: int, set_to_none: bool
) -> tuple[float, str, int]:
    """Largest difference to DDP in any parameter or gradient over 6 clipped AdamW steps."""
    ours, optimizer, replica = make(rank, AllReduce(**SMALL_BUCKETS))
    torch.manual_seed(0)
    theirs = Net()
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=0.004)
    ddp_optimizer = adamw(theirs)
    worst = 0.0
    for step in range(6):
        micro_batches = batches(rank + 10 * step, accumulate)
        optimizer.zero_grad(set_to_none=set_to_none)
        ddp_optimizer.zero_grad(set_to_none=set_to_none)
        with replica.no_sync(), ddp.no_sync():
            for batch in micro_batches[:-1]:
                (loss_of(ours, batch) / accumulate).backward()
                (loss_of(ddp, batch) / accumulate).backward()
        (loss_of(ours, micro_batches[-1]) / accumulate).backward()
        (loss_of(ddp, micro_batches[-1]) / accumulate).backward()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (ours, theirs)]
        worst = max(worst, abs(norms[0] - norms[1]).item())
        optimizer.step()
        ddp_optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            worst = max(worst, (mine - other).abs().max().item())
            if mine.requires_grad:
                worst = max(worst, (mine.grad - other.grad).abs().max().item())
    return worst, digest(ours), replica.metrics().synchronisations


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("accumulate", "set_to_none"), [(1, True), (3, True), (2, False)])
def test_clipped_and_accumulated_training_equals_ddp(
    ranks: RankPool, world_size: int, accumulate: int, set_to_none: bool
) -> None:
    results = ranks.run(train_like_ddp, world_size, accumulate=accumulate, set_to_none=set_to_none)
    # Two numbers have one sum; of more, gloo's order of adding depends on their place in a bucket.
    tolerance = 0.0 if world_size == 2 else 2e-6
    for worst, _, synchronisations in results:
        assert worst <= tolerance
        assert synchronisations == 6
    assert len({checksum for _, checksum, _ in results}) == 1


def gradients_of_one_big_batch(rank: int, world_size: int) -> float:
    model, _, _ = make(rank, AllReduce(**SMALL_BUCKETS))
    alone = Net()
    alone.load_state_dict(model.state_dict())
    parts = [batches(r, 1)[0] for r in range(world_size)]
    loss_of(model, parts[rank]).backward()
    loss_of(alone, (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))).backward()
    return max(
        (mine.grad - other.grad).abs().max().item()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True)
        if mine.grad is not None
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_equal_those_of_one_process_with_the_whole_batch(
    ranks: RankPool, world_size: int
) -> None:
    assert max(ranks.run(gradients_of_one_big_batch, world_size)) <= 1e-6


# --- codecs ---------------------------------------------------------------------------------


def train_with_codec(rank: int, world_size: int, codec: CodecSpec, dtype: str) -> dict[str, Any]:
    spec = AllReduce(codec=codec, **SMALL_BUCKETS)
    torch.manual_seed(rank)
    model = Net().to(getattr(torch, dtype))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replica = replicate(model, optimizer, spec)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert replica.comm is not None
    replica.comm.record = True
    errors = []
    for step in range(3):
        optimizer.zero_grad()
        batch = batches(rank + 10 * step, 1)[0]
        with replica.no_sync():
            loss_of(model, batch).backward()
        exact = {name: p.grad.double() for name, p in trained.items()}
        for gradient in exact.values():
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        difference = torch.cat(
            [(p.grad.double() - exact[name]).flatten() for name, p in trained.items()]
        )
        errors.append(
            (difference.norm() / torch.cat([g.flatten() for g in exact.values()]).norm()).item()
        )
        optimizer.step()
    declared = spec.traffic(describe(trained), world_size)
    calls = [(call.op, call.nbytes) for call in replica.comm.calls]
    return {
        "digest": digest(model),
        "error": max(errors),
        "calls": calls,
        "declared": [(call.op, call.nbytes) for call in declared.collectives] * 3,
        "sent_nbytes": replica.metrics().sent_nbytes,
        "declared_nbytes": 3 * declared.nbytes,
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_replicas_stay_bit_equal_and_send_what_they_declare(
    ranks: RankPool, world_size: int, codec: CodecSpec, dtype: str
) -> None:
    results = ranks.run(train_with_codec, world_size, codec=codec, dtype=dtype)
    assert len({result["digest"] for result in results}) == 1
    allowed = {"none": 1e-6, "bf16": 2**-7, "int8": 0.1}[codec.model_dump()["kind"]]
    if dtype == "bfloat16":
        allowed += 2**-6
    for result in results:
        assert result["calls"] == result["declared"]
        assert result["sent_nbytes"] == result["declared_nbytes"]
        assert result["error"] <= allowed


def mean_of_few_elements(
    rank: int, world_size: int, codec: CodecSpec, numel: int
) -> tuple[list[float], int]:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(numel))})
    replica = replicate(model, torch.optim.SGD(model.parameters()), AllReduce(codec=codec))
    (model["w"] * torch.arange(1, numel + 1) * (rank + 1)).sum().backward()
    return model["w"].grad.tolist(), replica.metrics().sent_nbytes


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5])
def test_fewer_elements_than_ranks_and_uneven_ones(
    ranks: RankPool, codec: CodecSpec, numel: int
) -> None:
    results = ranks.run(mean_of_few_elements, 4, codec=codec, numel=numel)
    expected = [2.5 * i for i in range(1, numel + 1)]
    for gradient, _ in results:
        assert gradient == pytest.approx(expected, rel=0.02)
    assert all(result == results[0] for result in results)


def nan_on_one_rank(rank: int, world_size: int, codec: CodecSpec) -> tuple[bool, bool]:
    model, _, _ = make(rank, AllReduce(codec=codec, **SMALL_BUCKETS))
    loss = loss_of(model, batches(rank, 1)[0])
    (loss * (torch.nan if rank == 1 else 1.0)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.isnan().item(), True


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_nan_reaches_every_rank(ranks: RankPool, codec: CodecSpec) -> None:
    assert all(seen for seen, _ in ranks.run(nan_on_one_rank, 3, codec=codec))


def adds_in_fp32(rank: int, world_size: int) -> float:
    """In bf16, 256 + 1 = 256; in fp32 it is 257, so the mean of 256, 1, 1, 1 is 64.75."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))})
    replicate(model, torch.optim.SGD(model.parameters()), AllReduce(codec=BFloat16()))
    (model["w"] * (256 if rank == 0 else 1)).sum().backward()
    return model["w"].grad[0].item()


def test_codes_are_never_added(ranks: RankPool) -> None:
    assert ranks.run(adds_in_fp32, 4) == [float(torch.tensor(64.75).bfloat16())] * 4


# --- ways to use backward ------------------------------------------------------------------


def several_backwards(rank: int, world_size: int) -> list[float]:
    """Differences of gradients to the mean over ranks, for odd ways to call backward."""
    model, optimizer, replica = make(rank, AllReduce(unused="zero", **SMALL_BUCKETS))
    trained = [p for p in model.parameters() if p.requires_grad]
    one, two = batches(rank, 2)
    worst = []

    def expect(run: Callable[[], object]) -> None:
        optimizer.zero_grad()
        with replica.no_sync():
            run()
        expected = [p.grad.clone() for p in trained]
        for gradient in expected:
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
        optimizer.zero_grad()
        run()
        worst.append(
            max((p.grad - g).abs().max().item() for p, g in zip(trained, expected, strict=True))
        )

    def twice() -> None:
        loss_of(model, one).backward()
        loss_of(model, two).backward()

    def retained() -> None:
        loss = loss_of(model, one)
        loss.backward(retain_graph=True)
        loss.backward()

    def checkpointed() -> None:
        out = torch.utils.checkpoint.checkpoint(model, one[0], use_reentrant=False)
        F.cross_entropy(out.flatten(0, 1), one[1].flatten()).backward()

    def replaced() -> None:
        loss_of(model, one).backward()
        for parameter in trained:
            parameter.grad = parameter.grad * 2
        loss_of(model, two).backward()

    def in_parts() -> None:
        model.first(torch.ones(2, 23)).sum().backward()
        loss_of(model, two).backward()

    for run in (twice, retained, checkpointed, replaced, in_parts):
        expect(run)
    return worst


def test_every_way_to_call_backward_gives_the_mean(ranks: RankPool) -> None:
    for worst in ranks.run(several_backwards, 3):
        assert max(worst) <= 1e-6


def gradients_live_in_buckets(rank: int, world_size: int) -> tuple[int, bool]:
    model, optimizer, _ = make(rank, AllReduce())
    model.to(memory_format=torch.contiguous_format)
    loss_of(model, batches(rank, 1)[0]).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    storages = {p.grad.untyped_storage().data_ptr() for p in trained}
    before = [p.grad for p in trained]
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batches(rank, 1)[0]).backward()
    return len(storages), all(p.grad is g for p, g in zip(trained, before, strict=True))


def test_gradients_are_views_of_one_bucket(ranks: RankPool) -> None:
    assert ranks.run(gradients_live_in_buckets, 2) == [(1, True)] * 2


def strided_and_mixed(rank: int, world_size: int) -> tuple[float, bool, int]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
            "wide": nn.Linear(7, 3).double(),
            "narrow": nn.Linear(7, 3).bfloat16(),
        }
    )
    replica = replicate(model, torch.optim.SGD(model.parameters()), AllReduce(**SMALL_BUCKETS))
    image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))

    def loss() -> Tensor:
        wide = model["wide"](torch.full((1, 7), rank + 1.0).double()).sum()
        narrow = model["narrow"](torch.full((1, 7), rank + 1.0).bfloat16()).sum()
        return model["conv"](image).square().sum() + wide + narrow

    with replica.no_sync():
        loss().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for gradient in expected:
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
    model.zero_grad()
    loss().backward()
    worst = max(
        (p.grad - g).abs().max().item() for p, g in zip(model.parameters(), expected, strict=True)
    )
    weight = model["conv"].weight
    buckets = {row.bucket for row in replica.explain()}
    return worst, weight.grad.stride() == weight.stride(), len(buckets)


def test_mixed_dtypes_and_strided_parameters(ranks: RankPool) -> None:
    for worst, same_strides, num_buckets in ranks.run(strided_and_mixed, 2):
        assert worst <= 1e-5
        assert same_strides
        assert num_buckets >= 3


class Branches(nn.Module):
    """Three branches; the caller says which of them take part."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in names]).sum()


def error_for_unused(rank: int, world_size: int, names: list[list[str]]) -> tuple[str, str, bool]:
    model = Branches()
    replica = replicate(model, torch.optim.SGD(model.parameters()), AllReduce(**SMALL_BUCKETS))
    x = torch.ones(1, 3)
    try:
        model(x, names[rank]).backward()
        error = ""
    except ConfigError as problem:
        error, hint = problem.message, problem.hint
    # The ranks are still in step: the next backward works.
    model.zero_grad()
    model(x, ["left", "middle", "right"]).backward()
    replica.close()
    return error, hint, all(p.grad is not None for p in model.parameters())


def test_an_unused_parameter_is_named_on_every_rank(ranks: RankPool) -> None:
    names = [["left", "middle", "right"], ["left", "right"]]
    (first, hint, went_on), (second, _, _) = ranks.run(error_for_unused, 2, names=names)
    assert "no gradient to 2 of 6 parameters" in first
    assert "middle.weight (on other ranks), middle.bias (on other ranks)" in first
    assert "middle.weight, middle.bias" in second
    assert "unused='zero'" in hint
    assert went_on


def unused_as_zero(rank: int, world_size: int) -> dict[str, Any]:
    model = Branches()
    replicate(model, torch.optim.SGD(model.parameters()), AllReduce(unused="zero", **SMALL_BUCKETS))
    results: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        names = ["left", "right"] if rank == 0 else ["left"]
        model(torch.full((1, 3), rank + 1.0 + step), names).backward()
        results = {
            name: None if p.grad is None else p.grad.flatten()[0].item()
            for name, p in model.named_parameters()
        }
    return results


def test_unused_may_count_as_zero(ranks: RankPool) -> None:
    for result in ranks.run(unused_as_zero, 2):
        assert result["left.weight"] == pytest.approx(2.5)  # the mean of 2 and 3
        assert result["right.weight"] == pytest.approx(1.0)  # the mean of 2 and nothing
        assert result["middle.weight"] is None


def sequence_of_events(rank: int, world_size: int) -> list[str]:
    """What happens in which order during one backward through four layers."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    replica = replicate(
        model, torch.optim.SGD(model.parameters()), AllReduce(bucket_bytes=1, first_bucket_bytes=1)
    )
    events: list[str] = []
    assert replica.comm is not None
    original = replica.comm.all_reduce

    def all_reduce(tensor: Tensor, **kwargs: Any) -> dist.Work:
        events.append(f"launch {tensor.numel()}")
        return original(tensor, **kwargs)

    replica.comm.all_reduce = all_reduce  # type: ignore[method-assign]
    for index, layer in enumerate(model):
        layer.register_full_backward_pre_hook(lambda *_, i=index: events.append(f"layer {i}"))
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    return events


def test_buckets_are_launched_while_backward_goes_on(ranks: RankPool) -> None:
    expected = [word for i in (3, 2, 1, 0) for word in (f"layer {i}", "launch 64")]
    assert ranks.run(sequence_of_events, 2) == [[*expected, "launch 4"]] * 2


# --- errors surface -------------------------------------------------------------------------


def failing_reducer(rank: int, world_size: int, in_round: int) -> list[str]:
    model, _, replica = make(rank, AllReduce(codec=Int8(), **SMALL_BUCKETS))
    reducer = replica.strategy._reducer  # type: ignore[attr-defined]
    method = "encode" if in_round == 1 else "add_decoded"

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("broken codec")

    setattr(reducer.codec, method, broken)
    texts = []
    for _ in range(2):
        try:
            loss_of(model, batches(rank, 1)[0]).backward()
        except (ValueError, IsthmusError) as problem:
            texts.append(f"{type(problem).__name__}: {problem}")
    return texts


@pytest.mark.parametrize("in_round", [1, 2])
def test_an_error_in_a_codec_comes_out_of_backward(ranks: RankPool, in_round: int) -> None:
    for first, second in ranks.run(failing_reducer, 2, in_round=in_round):
        assert first == "ValueError: broken codec"
        assert second.startswith("IsthmusError: an earlier backward failed")


def failing_model(rank: int, world_size: int) -> tuple[str, bool]:
    """A backward that fails before a bucket is full has sent nothing; the next one works."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("no gradient today")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replicate(model, torch.optim.SGD(model.parameters()), AllReduce())
    x = torch.ones(1, 3)
    try:
        model[1](Fails.apply(model[0](x))).sum().backward()
        text = ""
    except ArithmeticError as problem:
        text = str(problem)
    model.zero_grad()
    model(x * (rank + 1)).sum().backward()
    gradient = model[1].bias.grad
    return text, bool((gradient == 1).all())


def test_a_backward_that_failed_early_may_be_repeated(ranks: RankPool) -> None:
    assert ranks.run(failing_model, 2) == [("no gradient today", True)] * 2


def refused_gradients(rank: int, world_size: int, what: str) -> str:
    embedding = nn.Embedding(5, 3, sparse=True)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = embedding if what == "sparse" else layers
    replicate(model, torch.optim.SGD(model.parameters()), AllReduce())
    x = torch.ones(1, 3, requires_grad=True)
    try:
        if what == "sparse":
            embedding(torch.tensor([1])).sum().backward()
        elif what == "graph":
            layers(x).square().sum().backward(create_graph=True)
        else:
            for layer in layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            x.sum().backward()
    except IsthmusError as problem:
        return f"{problem} ({problem.hint})"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "words"),
    [("sparse", "is sparse"), ("graph", "create_graph"), ("reentrant", "use_reentrant=False")],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_cannot_travel_are_refused(ranks: RankPool, what: str, words: str) -> None:
    for text in ranks.run(refused_gradients, 2, what=what):
        assert words in text
