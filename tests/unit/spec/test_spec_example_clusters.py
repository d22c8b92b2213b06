"""The clusters in recipes/clusters: each is read, can be built, and says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load

FILES = sorted((Path(__file__).parents[3] / "recipes" / "clusters").glob("*.toml"))
SCALES = {"a twentieth": 20, "a fiftieth": 50}


def cluster(path: Path) -> ClusterSpec:
    return load(ClusterSpec, path).spec


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_read_is_named_as_its_file_and_opens_with_what_it_shows(path: Path) -> None:
    spec = cluster(path)
    assert spec.name == path.stem
    assert spec.host_names()
    head = path.read_text().split("\nname =")[0].splitlines()
    assert len(head) >= 2
    assert all(line.startswith("# ") for line in head)
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_the_rates_are_those_that_the_files_are_about() -> None:
    by_name = {path.stem: cluster(path) for path in FILES}
    assert by_name["one-machine"].num_devices == 2
    assert by_name["two-sites"].num_devices == 4
    [shared] = by_name["two-sites"].links
    assert shared.bandwidth_bytes_per_s == 100e6 / 8
    lines = [site.hosts[0].nics[0] for site in by_name["four-homes"].sites]
    rates = sorted(nic.bandwidth_bytes_per_s * 8e-6 for nic in lines)
    assert (rates[0], rates[-1], len(rates)) == (20, 50, 4)
    assert len(by_name["mixed-nics"].sites[0].hosts[0].nics) == 2


@pytest.mark.parametrize("name", ["two-universities", "four-regions", "world-wide"])
def test_what_is_scaled_says_by_how_much_and_keeps_the_range_of_its_source(name: str) -> None:
    [path] = [path for path in FILES if path.stem == name]
    spec = cluster(path)
    head = " ".join(path.read_text().split("\nname =")[0].replace("\n# ", " ").split())
    assert "DS3Lab/DT-FM" in head
    [scale] = [scale for words, scale in SCALES.items() if f"every rate to {words}" in head]
    found = re.search(r"([\d.]+)(?: to ([\d.]+))? Gbit/s and (\d+)(?: to (\d+))? ms between", head)
    assert found
    slowest, fastest = float(found[1]), float(found[2] or found[1])
    nearest, farthest = int(found[3]), int(found[4] or found[3])
    rates = [link.bandwidth_bytes_per_s * 8e-9 * scale for link in spec.links]
    delays = [link.latency_s * 1e3 for link in spec.links]
    assert (min(rates), max(rates)) == (pytest.approx(slowest), pytest.approx(fastest))
    assert (min(delays), max(delays)) == (pytest.approx(nearest), pytest.approx(farthest))
    sites = len(spec.sites)
    assert len({frozenset(link.between) for link in spec.links}) == sites * (sites - 1) // 2
