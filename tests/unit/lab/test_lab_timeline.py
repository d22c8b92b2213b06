"""Timeline files: what they may say, and what is said about those that may not."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from isthmus.errors import ConfigError
from isthmus.lab.knobs import (
    Cut,
    LinkIsUp,
    LinkSpeed,
    LinkWire,
    NicIsUp,
    Override,
    Quality,
    Reset,
    Running,
    Signal,
    groups_of_hosts,
)
from isthmus.lab.timeline import AnyFault, Fault, fault_of, load_timeline
from isthmus.spec.cluster import ClusterSpec, Link

CLUSTER = ClusterSpec.model_validate(
    {
        "name": "test",
        "sites": [
            {
                "name": site,
                "hosts": [
                    {"name": site[0], "count": 2, "nics": [{"bandwidth_bytes_per_s": 1e6}]},
                ],
            }
            for site in ("paris", "oslo", "rome")
        ],
        "links": [
            {"between": ["paris", "oslo"], "bandwidth": "10 Mbit/s", "latency": "10 ms"},
            {"between": ["oslo", "rome"], "bandwidth": "10 Mbit/s"},
        ],
    }
)

EVERY_KIND = """
[[fault]]
kind = "link_down"
between = ["paris", "oslo"]
at = "5 s"
lasts = "2 s"
[[fault]]
kind = "link_up"
between = ["oslo", "paris"]
at_step = 20
[[fault]]
kind = "link_flap"
between = ["oslo", "rome"]
down = "100 ms"
up = "1 s"
times = 3
[[fault]]
kind = "link_rate"
between = ["oslo", "rome"]
bandwidth = "1 Mbit/s"
[[fault]]
kind = "link_quality"
between = ["oslo", "rome"]
latency = "50 ms"
loss = 0.01
[[fault]]
kind = "nic_down"
host = "p0"
[[fault]]
kind = "nic_up"
host = "p0"
[[fault]]
kind = "nic_flap"
host = "p1"
nic = "eth0"
down = "1 s"
up = "1 s"
[[fault]]
kind = "nic_rate"
host = "o0"
bandwidth = "5 Mbit/s"
lasts = "1 min"
[[fault]]
kind = "partition"
groups = [["paris", "o0"], ["rome"]]
[[fault]]
kind = "heal"
at = "9 s"
[[fault]]
kind = "stop"
host = "r1"
lasts = "3 s"
[[fault]]
kind = "continue"
host = "r1"
[[fault]]
kind = "kill"
host = "r0"
"""


@pytest.fixture
def write(tmp_path: Path) -> Path:
    return tmp_path / "faults.toml"


def test_a_timeline_may_hold_every_kind_of_fault(write: Path) -> None:
    write.write_text(EVERY_KIND)
    timeline = load_timeline(write, CLUSTER)
    kinds = {kind.model_fields["kind"].default for kind in get_args(get_args(AnyFault)[0])}
    assert {fault.kind for fault in timeline.fault} == kinds
    down, up, flap, rate, quality, *_ = timeline.fault
    assert (down.at_s, down.at_step, up.at_step) == (5.0, None, 20)
    assert down.moves() == (Override(LinkIsUp("oslo", "paris"), False, 0.0, 2.0),)
    assert up.moves() == (Reset(LinkIsUp("oslo", "paris")),)
    assert [(m.begins_s, m.ends_s) for m in flap.moves() if isinstance(m, Override)] == [
        (0.0, 0.1),
        (1.1, pytest.approx(1.2)),
        (2.2, pytest.approx(2.3)),
    ]
    assert rate.moves() == (Override(LinkSpeed("oslo", "rome"), 125_000.0),)
    assert quality.moves() == (Override(LinkWire("oslo", "rome"), Quality(0.05, None, 0.01)),)


def test_every_fault_reads_back_from_what_it_is_sent_as(write: Path) -> None:
    write.write_text(EVERY_KIND)
    for fault in load_timeline(write, CLUSTER).fault:
        assert fault_of(fault.model_dump(mode="json", exclude_none=True), CLUSTER) == fault


def test_moves_of_hosts_and_of_the_whole_cluster() -> None:
    def moves(**table: object) -> object:
        return fault_of(table, CLUSTER).moves()

    assert moves(kind="nic_down", host="p0") == (Override(NicIsUp("p0", "eth0"), False),)
    assert moves(kind="stop", host="p0", lasts_s=1) == (Override(Running("p0"), False, 0.0, 1.0),)
    assert moves(kind="continue", host="p0") == (Reset(Running("p0")),)
    assert moves(kind="partition", groups=[["oslo"]]) == (Override(Cut(), (("oslo",),)),)
    assert moves(kind="heal") == (Reset(Cut()),)
    (kill,) = fault_of({"kind": "kill", "host": "p0"}, CLUSTER).moves()
    assert isinstance(kill, Signal)
    assert kill.number == 9


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "link_down", "between": ["paris", "rome"]}, "no link 'paris - rome'"),
        ({"kind": "link_down", "between": ["paris", "osla"]}, "did you mean oslo - paris?"),
        ({"kind": "nic_down", "host": "p7"}, "no host 'p7'; there are: p0, p1"),
        ({"kind": "nic_down", "host": "p0", "nic": "eth1"}, "no interface of p0 'eth1'"),
        ({"kind": "stop", "host": "oslo"}, "no host 'oslo'; "),
        ({"kind": "kill", "host": "p"}, "no host 'p'"),
        ({"kind": "partition", "groups": [["oslo"], ["o0"]]}, "o0 is in two groups"),
        ({"kind": "partition", "groups": [["oslo", "rome", "paris"]]}, "nothing is cut"),
        ({"kind": "partition", "groups": [["madrid"]]}, "no site or host 'madrid'"),
        ({"kind": "partition", "groups": []}, "groups: "),
        ({"kind": "link_down"}, "between: Field required"),
        ({"kind": "link_down", "between": ["paris", "oslo"], "lasts": 2}, "lasts needs a unit"),
        ({"kind": "link_down", "between": ["paris", "oslo"], "lasts": "0 s"}, "greater than 0"),
        ({"kind": "link_rate", "between": ["paris", "oslo"], "bandwidth": "0 bit/s"}, "greater"),
        ({"kind": "link_quality", "between": ["paris", "oslo"]}, "give latency, jitter or loss"),
        ({"kind": "link_quality", "between": ["paris", "oslo"], "loss": 1.0}, "less than 1"),
        ({"kind": "heal", "at": "1 s", "at_step": 3}, "either at or at_step"),
        ({"kind": "meteor"}, "link_down"),
        ({"at": "1 s"}, "kind"),
        ("link_down", "this is no fault"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(table: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fault_of(table, CLUSTER)
    assert said in str(refused.value)


def test_all_problems_of_a_file_are_said_at_once(write: Path) -> None:
    write.write_text(
        '[[fault]]\nkind = "stop"\nhost = "p0"\n'
        '[[fault]]\nkind = "stop"\nhost = "nobody"\n'
        '[[fault]]\nkind = "link_up"\nbetween = ["paris", "rome"]\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_timeline(write, CLUSTER)
    assert "fault.0" not in str(refused.value)
    assert "fault.1 (stop): there is no host 'nobody'" in str(refused.value)
    assert "fault.2 (link_up): there is no link 'paris - rome'" in str(refused.value)


def test_an_unknown_key_names_the_file(write: Path) -> None:
    write.write_text('[[fault]]\nkind = "stop"\nhost = "p0"\nlast = "2 s"\n')
    with pytest.raises(ConfigError, match=r"last: unknown key .*faults\.toml"):
        load_timeline(write, CLUSTER)


def test_hosts_that_no_group_names_are_a_group_of_their_own() -> None:
    assert groups_of_hosts((("paris", "o0"), ("rome",)), CLUSTER) == (
        ("p0", "p1", "o0"),
        ("r0", "r1"),
        ("o1",),
    )
    assert groups_of_hosts((("paris",), ("oslo", "rome")), CLUSTER) == (
        ("p0", "p1"),
        ("o0", "o1", "r0", "r1"),
    )


def test_a_quality_leaves_what_it_does_not_name_as_declared() -> None:
    link = Link(
        between=("a", "b"), bandwidth_bytes_per_s=1, latency_s=0.01, jitter_s=0.001, loss=0.1
    )
    assert tuple(Quality(loss=0.0).over(link)) == (0.01, 0.001, 0.0, False)
    assert tuple(Quality(0.0, 0.5).over(link)) == (0.0, 0.5, 0.1, False)
    assert str(Quality(0.02, None, 0.01)) == "latency 20 ms, loss 0.01"


def test_no_fault_is_left_without_its_checks() -> None:
    for kind in get_args(get_args(AnyFault)[0]):
        assert kind.moves is not Fault.moves
        assert kind.problems is not Fault.problems
