"""Every event survives the way through its line, whatever its numbers and texts are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.observe import Event, Notice, Step
from isthmus.observe.events import AnyEvent, UnknownEventError, decode_event, encode_event

KINDS = get_args(AnyEvent)


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(KINDS))
    fields: dict[str, Any] = {}
    for name, annotation in get_type_hints(kind).items():
        if not name.startswith("__"):
            values = st.integers(0, 2**53) if annotation is int else st.from_type(annotation)
            fields[name] = draw(values)
    return kind(**fields)


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


@given(events())
def test_an_event_is_one_line_of_strict_json_and_comes_back(event: Event) -> None:
    line = encode_event(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=refuse)
    assert repr(decode_event(line)) == repr(event)  # by repr, since nan != nan


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_comes_back_as_itself(
    value: float, make_step: Callable[..., Step]
) -> None:
    line = encode_event(make_step(1, loss_nats=value, mfu=value))
    assert str(value).encode() in line
    read = decode_event(line)
    assert isinstance(read, Step)
    assert repr((read.loss_nats, read.mfu)) == repr((value, value))


def test_text_that_is_not_unicode_is_spelled_out() -> None:
    line = encode_event(Notice(time_s=1.0, rank=0, message="caf\udce9"))
    read = decode_event(line)
    assert isinstance(read, Notice)
    assert read.message == "caf\\udce9"


def test_a_field_of_a_newer_version_is_skipped(make_step: Callable[..., Step]) -> None:
    step = make_step(3)
    newer = json.loads(encode_event(step)) | {"later": [1, {"a": None}]}
    assert decode_event(json.dumps(newer).encode()) == step


def test_an_event_type_of_a_newer_version_is_named_as_such() -> None:
    with pytest.raises(UnknownEventError):
        decode_event(b'{"event":"link_switched","time_s":1.0,"rank":0,"path":3}')


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"event":"step"}',
        b'{"event":3}',
        b'{"event":"notice","time_s":1,"rank":0,"message":"\xff"}',
    ],
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decode_event(line)


def test_types_are_named_in_the_log_by_their_class() -> None:
    tags = {kind.__struct_config__.tag for kind in KINDS}
    assert len(tags) == len(KINDS)
    assert {"run_started", "checkpoint_saved", "step"} <= tags
