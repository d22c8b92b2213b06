"""The benchmarks run, and print what they promise. What they measure is no test's business."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if path.stem not in ("__init__", "harness")
)
TINY = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.intermediate_size=32",
    "data.sequence_length=16",
    "train.global_batch_size=1",
)


def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_comparison_prints_one_object_with_ratio_interval_control_and_machine(
    tmp_path: Path,
) -> None:
    options = ["--blocks", "6", "--steps", "1", "--threads", "1"]
    options += [word for setting in TINY for word in ("--set", setting)]
    done = run("loop_overhead", *options, ISTHMUS_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "6 blocks" in done.stderr
    report = json.loads(done.stdout)
    assert report["benchmark"] == "loop_overhead"
    assert report["what"].endswith(".")
    assert report["settings"]["blocks"] == 6
    assert report["machine"].keys() >= {"cores", "cpu", "load_before", "load_after", "scheduling"}
    assert report["versions"]["torch"]
    assert [claim["holds"] in (True, False, None) for claim in report["claims"]] == [True, True]
    for case in report["cases"]:
        assert case["same_work"]["losses_equal"] is True
        assert case["same_work"]["steps_compared"] >= 6 * 2
        for comparison in case["per_step"].values():
            low, high = comparison["interval95"]
            assert 0 < low <= comparison["ratio"] <= high
            low, high = comparison["control_interval"]
            assert 0 < low <= comparison["control_ratio"] <= high
            assert comparison["a"]["median"] > 0 < comparison["b"]["median"]
            assert comparison["blocks"] == 6


@pytest.mark.parametrize("name", NAMES)
def test_each_says_in_its_first_line_what_it_measures(name: str) -> None:
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert text.startswith(f'"""{first}\n'), "scripts/bench reads the first line of the file"
    assert first.endswith(".")


@pytest.mark.parametrize("name", ["first_run", "resume"])
def test_an_unknown_option_is_an_error_and_help_names_the_others(name: str) -> None:
    assert "--quick" in run(name, "--help").stdout
    wrong = run(name, "--quik-ly")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert "Traceback" not in wrong.stderr
