"""What ``replicate`` does at start and what a replica says of itself."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn

from isthmus.codec.int8 import Int8
from isthmus.errors import CheckpointError, ConfigError
from isthmus.spec.codec import describe
from isthmus.sync import replicate
from isthmus.sync.allreduce import AllReduce
from isthmus.sync.none import NoSync

PLUGIN = '''
"""Halves: each element as fp16."""
from __future__ import annotations
import math
from typing import Literal
from isthmus.codec.base import Codec
from isthmus.lazy import torch
from isthmus.spec.codec import CodecProperties, CodecSpec

class Half(CodecSpec):
    kind: Literal["half"] = "half"
    """fp16."""

    @property
    def properties(self):
        return CodecProperties(True, False, None, False, "kept")

    def body_nbytes(self, shape, dtype):
        return 2 * math.prod(shape)

    def build(self):
        return HalfCodec(self)

class HalfCodec(Codec):
    def write_body(self, flat, body, *, seed):
        body[: 2 * flat.numel()].view(torch.float16).copy_(flat)
        return 2 * flat.numel()

    def read_body(self, body, out, *, dtype):
        out.copy_(body[: 2 * out.numel()].view(torch.float16))
'''


def start(rank: int, world_size: int, strategy: Any) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    model[2].weight.requires_grad_(False)
    model.register_buffer("mask", torch.rand(9) > 0.5)
    model.register_buffer("narrow", torch.randn(3).bfloat16(), persistent=False)
    replica = replicate(model, torch.optim.SGD(model.parameters()), strategy)
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": [tensor.detach().double().tolist() for tensor in tensors],
        "metrics": replica.metrics(),
        "world_size": replica.world_size,
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_start_as_rank_0(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(start, world_size, strategy="allreduce")
    assert all(result["values"] == results[0]["values"] for result in results)
    assert results[0]["world_size"] == world_size
    metrics = results[0]["metrics"]
    assert (metrics.calls, metrics.sent_nbytes) == (0, 0)
    assert metrics.startup_calls == (2 if world_size > 1 else 0)
    # A digest of 8 bytes; then 92 float32, an int64, 9 bools and 3 bf16, each tensor padded to 16:
    # 5*7, 7, 7, 7, 3*7 parameters; 7, 7 statistics; a count; a mask; a half.
    padded = [144, 32, 32, 32, 96, 32, 32, 16, 16, 16]
    assert metrics.startup_nbytes == (8 + sum(padded) if world_size > 1 else 0)


def test_none_leaves_replicas_as_they_are(ranks: RankPool) -> None:
    first, second = ranks.run(start, 2, strategy="none")
    assert first["values"] != second["values"]
    assert first["metrics"].startup_calls == 0


def different_models(rank: int, world_size: int, what: str) -> str:
    model = nn.Linear(3, 3 + (rank == 1 and what == "shape"))
    model.bias.requires_grad_(not (rank == 1 and what == "frozen"))
    codec = Int8(block=64 + 64 * (rank == 1 and what == "strategy"))
    try:
        replicate(model, torch.optim.SGD(model.parameters()), AllReduce(codec=codec))
    except ConfigError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("what", ["shape", "frozen", "strategy"])
def test_different_models_are_refused_on_every_rank(ranks: RankPool, what: str) -> None:
    for text in ranks.run(different_models, 3, what=what):
        assert text.startswith("ranks [1] hold another model or strategy")


def explain(rank: int, world_size: int) -> tuple[str, list[Any], float, float]:
    model = nn.Sequential(nn.Linear(300, 10), nn.BatchNorm1d(10), nn.Linear(10, 4))
    model[2].bias.requires_grad_(False)
    spec = AllReduce(codec=Int8(), first_bucket_bytes=64)
    replica = replicate(model, torch.optim.SGD(model.parameters()), spec)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wire = spec.traffic(describe(trained), world_size).wire_nbytes_per_step
    flags = 2 * len(trained) * (world_size - 1) / world_size
    return str(replica.explain()), list(replica.explain()), wire, flags


def test_explain_lists_every_tensor(ranks: RankPool) -> None:
    text, rows, wire, flags = ranks.run(explain, 2)[0]
    names = [row.name for row in rows]
    assert names[:5] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert set(names[5:]) == {"2.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    by_name = {row.name: row for row in rows}
    assert by_name["2.bias"].note == "frozen: has no gradient"
    assert by_name["1.running_mean"].note == "buffer: local"
    assert by_name["2.weight"].bucket == 0
    assert by_name["0.weight"].codec == "int8"
    assert by_name["0.weight"].plain_nbytes == 4 * 3000
    assert by_name["0.weight"].sent_nbytes < 3100
    assert sum(row.sent_nbytes for row in rows) == pytest.approx(wire - flags)
    assert "0.weight" in text
    assert "10x300" in text


def counters_and_state(rank: int, world_size: int) -> dict[str, Any]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = replicate(model, optimizer, AllReduce(codec=Int8(rounding="stochastic")))
    before = replica.metrics()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
    step = replica.metrics() - before
    state = replica.state_dict()
    replica.close()
    other = replicate(model, optimizer, AllReduce(codec=Int8(rounding="stochastic")))
    other.load_state_dict(state)
    errors = []
    for wrong in ({"kind": "none", "strategy": {}}, {"kind": "allreduce", "strategy": {}}):
        with pytest.raises(CheckpointError) as info:
            other.load_state_dict(wrong)
        errors.append(str(info.value))
    other.close()
    optimizer.zero_grad()
    model(torch.ones(1, 3) * rank).sum().backward()
    return {
        "step": step,
        "state": state,
        "same": other.state_dict() == state,
        "errors": errors,
        "local": model.weight.grad[0, 0].item(),
    }


def test_counters_state_and_closing(ranks: RankPool) -> None:
    for rank, result in enumerate(ranks.run(counters_and_state, 2)):
        step = result["step"]
        assert step.synchronisations == 3
        assert step.calls == 9
        assert step.communication_time_s >= step.exposed_wait_s > 0
        assert step.startup_nbytes == 0
        assert result["state"] == {
            "kind": "allreduce",
            "strategy": {"synchronisations": 3, "reducer": {}},
        }
        assert result["same"]
        assert "'none'" in result["errors"][0]
        assert result["local"] == rank


def subgroup(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(rank)
    codec = Int8()
    spec = AllReduce(codec=codec)
    replicate(model, torch.optim.SGD(model.parameters()), spec, group=groups[rank % 2])
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [model.weight.item(), model.weight.grad.item()]


def test_replicas_may_be_some_of_the_ranks(ranks: RankPool) -> None:
    results = ranks.run(subgroup, 4)
    assert [value for value, _ in results] == [0, 1, 0, 1]
    assert [gradient for _, gradient in results] == pytest.approx([2, 3, 2, 3], rel=0.01)


def plugin(rank: int, world_size: int, directory: str) -> tuple[float, bool]:
    sys.path.insert(0, directory)
    try:
        import a_codec_of_my_own as mine
    finally:
        sys.path.remove(directory)
    model = nn.Linear(3, 3)
    spec = AllReduce(codec=mine.Half())
    replica = replicate(model, torch.optim.SGD(model.parameters()), spec)
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    declared = spec.traffic(describe(dict(model.named_parameters())), world_size).nbytes
    return model.weight.grad[0, 0].item(), replica.metrics().sent_nbytes == declared


def test_a_codec_is_one_file(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a_codec_of_my_own.py").write_text(PLUGIN)
    assert ranks.run(plugin, 2, directory=str(tmp_path)) == [(1.5, True)] * 2


def test_one_process_needs_no_group_for_strategy_none() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    replica = replicate(model, optimizer, NoSync())
    with replica.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert replica.world_size == 1
    assert replica.metrics().calls == 0
    assert [row.note for row in replica.explain()] == ["stays local"] * 2
    replica.load_state_dict(replica.state_dict())
    replica.close()


def test_what_cannot_be_done_is_said() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="needs a process group") as info:
        replicate(model, optimizer, "allreduce")
    assert "init_process_group" in info.value.hint
    with pytest.raises(ConfigError, match="no strategy 'alreduce'") as info:
        replicate(model, optimizer, "alreduce")
    assert info.value.hint == "did you mean 'allreduce'?"


def replicate_twice(rank: int, world_size: int) -> list[str]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = replicate(model, optimizer)
    said = []
    for strategy in ("allreduce", "none"):
        with pytest.raises(ConfigError, match="is a replica already") as caught:
            replicate(model, optimizer, strategy)
        said.append(caught.value.hint)
    copy = deepcopy(model)
    replicate(copy, torch.optim.SGD(copy.parameters(), lr=0.1)).close()
    first.close()
    replicate(model, optimizer).close()
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        replicate(model, torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="there is no strategy"):
        replicate(model, optimizer, None)  # type: ignore[arg-type]
    return said


def test_a_model_is_one_replica_at_a_time_and_the_optimizer_its_own(ranks: RankPool) -> None:
    assert ranks.run(replicate_twice, 2)[0] == ranks.run(replicate_twice, 1)[0]
