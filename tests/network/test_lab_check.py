"""Links of a real lab, measured. How fast they are is for the benchmarks; here: never too fast."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from isthmus.cli.app import run
from isthmus.cli.lab_check import Probe, ways
from isthmus.errors import EXIT_FAILED, EXIT_OK, LaunchError
from isthmus.lab import Cluster
from isthmus.measure.links import StreamPlan, goodputs, round_trips
from isthmus.measure.ways import measure
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load

pytestmark = pytest.mark.network

if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
    pytest.skip("needs root and network namespaces", allow_module_level=True)

PAIRS = """
name = "pairs"
[[sites]]
name = "a"
hosts = [{ name = "a", count = 2, nics = [{ bandwidth = "400 Mbit/s" }] }]
[[sites]]
name = "b"
hosts = [{ name = "b", count = 2, nics = [{ bandwidth = "400 Mbit/s" }] }]
[[links]]
between = ["a", "b"]
bandwidth = "40 Mbit/s"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.toml"
    path.write_text(PAIRS)
    return path


def spec_of(file: Path) -> ClusterSpec:
    return load(ClusterSpec, file).spec


def test_no_stream_beats_its_link_alone_shared_or_both_ways(file: Path) -> None:
    with Cluster(spec_of(file)) as cluster, Probe(cluster) as probe:
        [link] = ways(cluster.topology, ["a-b"])
        before = cluster.counters()["a0", "eth0"].sent_nbytes
        found = measure(link, probe.at, quick=True)
        sent_nbytes = cluster.counters()["a0", "eth0"].sent_nbytes - before
    assert (found.there.source, found.back.source) == ("a0", "b0")
    for way in (found.there, found.back):
        assert len(way.shared) == 2
        for rate in (way.alone.high, way.both_ways.high, way.shared_bytes_per_s):
            assert rate is not None
            assert 0 < rate < 1.05 * 40e6 / 8
    windows_nbytes = 0.3 * sum(
        sample.median for sample in (found.there.alone, found.there.both_ways)
    )
    assert sent_nbytes > windows_nbytes, "it went over the emulated network"
    assert found.round_trips.returned == found.round_trips.sent == 50


def test_a_changed_rate_is_what_is_measured(file: Path) -> None:
    with Cluster(spec_of(file)) as cluster, Probe(cluster) as probe:
        [link] = ways(cluster.topology, ["a-b"])
        a, b = (probe.at(end) for end in link.pairs[0])
        cluster.set_link_rate("a", "b", 4e6 / 8)
        [slow] = goodputs([(a, b)], StreamPlan.for_link(4e6 / 8, windows=1))
    assert slow.median < 1.1 * 4e6 / 8


def test_a_link_that_is_down_is_an_error_that_names_the_ends(file: Path) -> None:
    with Cluster(spec_of(file)) as cluster, Probe(cluster) as probe:
        [link] = ways(cluster.topology, ["a-b"])
        a, b = (probe.at(end) for end in link.pairs[0])
        cluster.link_down("a", "b")
        with pytest.raises(LaunchError, match=r"from 10\.77\.1\.2 to 10\.77\.2\.2 none came back"):
            round_trips(a, b, count=3, wait_s=0.05)


def test_the_command_prints_json_and_its_code_says_whether_all_is_as_asked(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(["lab", "check", str(file), "--quick", "--json", "--only", "a"])
    found = json.loads(capfd.readouterr().out)
    assert found["cluster"] == "pairs"
    assert found["relays"] == {}
    [way] = found["ways"]
    assert way["way"]["name"] == "a0-a1 eth0"
    assert way["there"]["alone"]["median"] > 0
    assert code == (EXIT_FAILED if way["problems"] else EXIT_OK)
