"""The benchmarks that run in a lab, without one."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.model import Transformer
from isthmus.spec.model import ModelSpec

ROOT = Path(__file__).parents[3]
Load = Callable[[str], ModuleType]
TINY = ModelSpec(num_layers=1, hidden_size=32, num_heads=2, intermediate_size=32)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_synthetic_compute_waits_as_long_as_asked_and_readies_gradients_one_by_one(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp_in_lab = load("ddp_in_lab")
    slept_s: list[float] = []
    monkeypatch.setattr(ddp_in_lab.time, "sleep", slept_s.append)
    model = ddp_in_lab.Waiting(Transformer(TINY), forward_s=2.0, backward_s=3.0)
    ready: list[int] = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: ready.append((number, len(slept_s)))
        )
    output = model(torch.zeros(1, 8, dtype=torch.int64))
    assert slept_s == [2.0]
    output.backward()
    assert sum(slept_s) == pytest.approx(5.0)
    last = len(list(model.parameters())) - 1
    assert [number for number, _ in ready] == list(range(last, -1, -1))
    assert [waits for _, waits in ready] == list(range(2, last + 3))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    sizes = {p.numel() for p in model.parameters()}
    assert len(set(slept_s)) > len(sizes) - 1, "the larger waits longer"


def comparison(a: float, b: float, high: float) -> dict[str, Any]:
    return {"a": {"median": a}, "b": {"median": b}, "ratio": b / a, "interval95": (0.9, high)}


@pytest.mark.parametrize(("high", "holds"), [(1.005, True), (1.02, None)])
def test_the_share_of_the_link_is_that_of_the_busier_way(
    load: Load, high: float, holds: bool | None
) -> None:
    found = {
        "steps_a_run": 4,
        "wall_s": comparison(2.0, 1.0, 0.6),
        "nbytes from east east-west": comparison(2e6, 2e6, high),
        "nbytes from west east-west": comparison(1e6, 1e6, 1.0),
    }
    summary = load("ddp_in_lab").summary("16 Mbit/s", found)
    assert summary["share_of_link"] == {"a": pytest.approx(0.5), "b": pytest.approx(1.0)}
    assert set(summary["link_nbytes_a_step"]) == set(found) - {"steps_a_run", "wall_s"}
    [claim] = summary["claims"]
    assert claim["holds"] is holds


def test_rank_0_is_answered_until_it_says_what_it_found(load: Load) -> None:
    said = [{"ask": "counters"}, {"ask": "20 Mbit/s"}, {"found": [1, 2]}, {"ask": "too late"}]
    first = SimpleNamespace(
        stdout=io.StringIO("".join(json.dumps(line) + "\n" for line in said)),
        stdin=io.StringIO(),
    )
    found = load("_lab")._converse(first, lambda question: {"you asked": question})
    assert found == [1, 2]
    answers = [json.loads(line) for line in first.stdin.getvalue().splitlines()]
    assert answers == [{"you asked": "counters"}, {"you asked": "20 Mbit/s"}]
    silent = SimpleNamespace(stdout=io.StringIO(""), stdin=io.StringIO())
    assert load("_lab")._converse(silent, lambda question: None) is None


def test_two_sites_share_one_link_and_a_hall_has_none(load: Load) -> None:
    cluster = load("_lab").two_sites(1e6, hosts=2, latency_s=0.01)
    assert cluster.host_names() == ("east0", "east1", "west0", "west1")
    [link] = cluster.links
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1e6, 0.01)
    hall = load("lab_setup").hall(32)
    assert (len(hall.host_names()), hall.links) == (32, ())
