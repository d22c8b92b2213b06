"""The arithmetic of buckets and traffic, against torch's own and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.codec.int8 import Int8
from isthmus.codec.none import Uncompressed
from isthmus.errors import ConfigError
from isthmus.spec.codec import Collective, TensorInfo, Traffic, split_evenly
from isthmus.spec.sync import plan_buckets
from isthmus.sync.allreduce import AllReduce
from isthmus.sync.none import NoSync


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    bucket_bytes=st.integers(1, 20_000),
    first_bucket_bytes=st.integers(1, 5000),
)
def test_buckets_are_those_of_distributed_data_parallel(
    sizes: list[int], bucket_bytes: int, first_bucket_bytes: int
) -> None:
    reverse = [torch.empty(size) for size in reversed(sizes)]
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(
        reverse, [first_bucket_bytes, bucket_bytes]
    )
    ours = plan_buckets(
        [TensorInfo(str(i), (size,)) for i, size in enumerate(sizes)],
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
    )
    assert ours == [[len(sizes) - 1 - i for i in bucket] for bucket in expected]


@given(
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float64"]), max_size=40),
    limit=st.integers(1, 100),
)
def test_each_tensor_is_in_one_bucket_of_its_dtype(dtypes: list[str], limit: int) -> None:
    tensors = [TensorInfo(str(i), (3,), dtype) for i, dtype in enumerate(dtypes)]
    buckets = plan_buckets(tensors, bucket_bytes=limit, first_bucket_bytes=limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(tensors)))
    assert all(len({dtypes[i] for i in bucket}) == 1 for bucket in buckets)
    last = [bucket[-1] for bucket in buckets]
    assert last == sorted(last, reverse=True)


@given(numel=st.integers(0, 100), parts=st.integers(1, 9))
def test_parts_are_even(numel: int, parts: int) -> None:
    sizes = split_evenly(numel, parts)
    assert sum(sizes) == numel
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_traffic_by_hand() -> None:
    tensors = [TensorInfo("weight", (10, 30)), TensorInfo("bias", (10,))]
    plain = AllReduce().traffic(tensors, 2)
    assert [(call.op, call.nbytes) for call in plain.collectives] == [
        ("all_reduce", 4 * 310),
        ("all_reduce", 2),
    ]
    assert plain.nbytes_per_step == 1242
    assert plain.wire_nbytes_per_step == 1242  # 2 (n-1)/n = 1 for two ranks
    # Per chunk of 155: header 16, one scale 4, 155 codes, padded to 8 bytes = 176.
    coded = AllReduce(codec=Int8()).traffic(tensors, 2)
    assert [(call.op, call.nbytes) for call in coded.collectives] == [
        ("all_to_all", 2 * 176),
        ("all_reduce", 2),
        ("all_gather", 176),
    ]
    assert coded.wire_nbytes_per_step == 176 + 176 + 2


def test_traffic_of_one_replica_and_of_nothing_is_none() -> None:
    assert AllReduce().traffic([TensorInfo("w", (3,))], 1) == Traffic()
    assert AllReduce().traffic([], 4) == Traffic()
    assert NoSync().traffic([TensorInfo("w", (3,))], 4) == Traffic()


def test_traffic_counts_how_often() -> None:
    rare = Collective("all_reduce", 1000, 4, every_steps=10)
    total = Traffic((rare,)) + Traffic((Collective("all_gather", 10, 4),))
    assert total.nbytes == 1010
    assert total.nbytes_per_step == 110
    assert total.wire_nbytes_per_step == pytest.approx(150 + 30)


def test_rounds_of_buckets_interleave() -> None:
    tensors = [TensorInfo(str(i), (100,)) for i in range(3)]
    spec = AllReduce(codec=Int8(), bucket_bytes=1, first_bucket_bytes=1)
    labels = [
        call.label.split(":")[0] + call.op[4:6] for call in spec.traffic(tensors, 2).collectives
    ]
    assert labels == [
        "bucket 0to",
        "bucket 1to",
        "bucket 0ga",
        "bucket 2to",
        "bucket 1ga",
        "which gradients there arere",
        "bucket 2ga",
    ]


def test_integers_do_not_travel() -> None:
    with pytest.raises(ConfigError, match="int64"):
        Uncompressed().encoded_nbytes((3,), "int64")
