"""Specs are closed and frozen, carry their units, and find their kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.spec.base import ByKind, KindSpec, Spec, kinds_of
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.run import RunSpec
from isthmus.spec.tree import spec_classes, walk
from isthmus.spec.units import Bytes, BytesPerSecond, Seconds


class Wire(Spec):
    rate_bytes_per_s: BytesPerSecond = 1.0
    latency_s: Seconds = 0.0
    queue_bytes: Bytes = 0


def test_a_short_name_takes_text_with_a_unit() -> None:
    wire = Wire.model_validate({"rate": "8 Mbit/s", "latency": "3 ms", "queue": "1 MiB"})
    assert (wire.rate_bytes_per_s, wire.latency_s, wire.queue_bytes) == (1e6, 0.003, 2**20)


@pytest.mark.parametrize("key", ["rate", "latency", "queue"])
def test_a_short_name_refuses_a_bare_number(key: str) -> None:
    with pytest.raises(ValidationError, match="needs a unit"):
        Wire.model_validate({key: 3})


def test_a_value_given_under_both_names_is_refused() -> None:
    with pytest.raises(ValidationError, match="not both"):
        Wire.model_validate({"latency": "3 ms", "latency_s": 0.003})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "-3 ms"])
def test_negative_and_non_finite_quantities_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Wire.model_validate({"latency_s": value})


def test_specs_are_frozen_and_closed() -> None:
    wire = Wire()
    with pytest.raises(ValidationError, match="frozen"):
        wire.latency_s = 2.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="extra"):
        Wire.model_validate({"unknown": 1})


def test_replace_validates_the_whole() -> None:
    assert Wire(latency_s=1).replace(queue_bytes=5) == Wire(latency_s=1, queue_bytes=5)
    with pytest.raises(ValidationError):
        Wire().replace(latency_s=-1)


class Shape(KindSpec):
    room: ClassVar[str] = "isthmus.spec"  # any package: these kinds are defined right here


class Square(Shape):
    kind: Literal["square"] = "square"
    side: int = 1


class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: int = 2


class Picture(Spec):
    shape: Annotated[Shape, ByKind()] = Square()


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [
        ("circle", Circle()),
        ({"kind": "circle", "radius": 7}, Circle(radius=7)),
        (Square(side=3), Square(side=3)),
    ],
)
def test_a_kind_is_given_by_name_by_table_or_as_itself(given_as: object, expected: Shape) -> None:
    picture = Picture.model_validate({"shape": given_as})
    assert picture.shape == expected
    assert Picture.model_validate(picture.model_dump(mode="json")) == picture


@pytest.mark.parametrize(
    "wrong", ["cube", {"kind": "cube"}, {"kind": "circle", "side": 1}, {"radius": 1}, 3]
)
def test_what_no_kind_takes_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        Picture.model_validate({"shape": wrong})


def test_a_table_without_a_kind_is_of_the_default_kind() -> None:
    assert Picture.model_validate({"shape": {"side": 4}}).shape == Square(side=4)
    run = RunSpec.model_validate(
        {"data": {"sequence_length": 64}, "optimizer": {"schedule": {"warmup_steps": 3}}}
    )
    assert (run.data.kind, run.optimizer.schedule.kind) == ("stdlib", "wsd")


def test_a_label_says_what_differs_from_the_default() -> None:
    from isthmus.codec.int8 import Int8
    from isthmus.sync.allreduce import AllReduce

    assert AllReduce().label() == "allreduce"
    assert AllReduce(codec=Int8(block=64)).label() == "allreduce(codec=int8(block=64))"


def test_families_do_not_share_members() -> None:
    assert set(kinds_of(Shape)) == {"square", "circle"}


@pytest.mark.parametrize("root", [RunSpec, ClusterSpec])
def test_every_key_is_documented_and_every_unit_is_in_a_name(root: type[Spec]) -> None:
    keys = list(walk(root))
    assert len(keys) > 10
    assert [key.path for key in keys if not key.help] == []
    for key in keys:
        units = {Seconds: "_s", Bytes: "_bytes", BytesPerSecond: "_bytes_per_s"}
        for unit, suffix in units.items():
            if key.field.metadata and key.field.metadata[: len(unit.__metadata__)] == list(
                unit.__metadata__
            ):
                assert key.path.endswith(suffix), key.path
        assert key.owner.__doc__, key.owner


def test_the_default_run_is_complete_and_survives_json() -> None:
    run = RunSpec()
    assert RunSpec.model_validate_json(run.model_dump_json()) == run
    assert spec_classes(RunSpec.model_fields["sync"])


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_batch_divides_or_says_what_would(batch: int, ranks: int) -> None:
    from isthmus.errors import ConfigError
    from isthmus.spec.run import TrainSpec

    train = TrainSpec(global_batch_size=batch)
    if batch % ranks == 0:
        assert train.accumulation_steps(ranks) == 1
    else:
        with pytest.raises(ConfigError, match="does not divide") as caught:
            train.accumulation_steps(ranks)
        suggested = [
            int(word) for word in caught.value.hint.replace(",", "").split() if word.isdigit()
        ]
        assert suggested
        assert all(size % ranks == 0 for size in suggested)
