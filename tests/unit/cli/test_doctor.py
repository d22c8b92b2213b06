from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from isthmus.cli import doctor
from isthmus.measure import doctor as list_of_checks
from isthmus.measure.finding import Check, Finding, Surroundings, fails, passes, warns


def check(name: str, finding: Finding, *, measures: bool = False) -> Check:
    return Check(name, lambda _: finding, measures=measures)


GOOD = check("cores", passes("8 of 8", usable=8))
POOR = check("disk", warns("slow", "buy one", rate_bytes_per_s=1.5), measures=True)
BAD = check("torch", fails("none", "install it"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> object:
    app = typer.Typer()
    app.command()(doctor.doctor)

    def with_checks(checks: Sequence[Check], *arguments: str) -> Result:
        monkeypatch.setattr(list_of_checks, "CHECKS", tuple(checks))
        return CliRunner().invoke(app, arguments)

    return with_checks


def test_lines_hints_and_summary(run) -> None:
    result = run([GOOD, POOR])
    assert result.stdout.splitlines() == [
        "PASS  cores          8 of 8",
        "WARN  disk           slow",
        "                     hint: buy one",
        "1 passed, 1 warning, 0 failed",
    ]
    assert result.exit_code == 0


def test_a_failure_is_exit_code_1(run) -> None:
    result = run([GOOD, BAD])
    assert result.exit_code == 1
    assert "FAIL  torch          none" in result.stdout
    assert "\x1b" not in result.output


def test_json_is_one_object_and_all_of_stdout(run) -> None:
    result = run([GOOD, POOR, BAD], "--json")
    found = json.loads(result.stdout)
    assert found["status"] == "fail"
    assert found["checks"][1] == {
        "name": "disk",
        "status": "warn",
        "finding": "slow",
        "hint": "buy one",
        "values": {"rate_bytes_per_s": 1.5},
    }
    assert result.exit_code == 1


def test_quick_leaves_out_what_measures(run) -> None:
    result = run([GOOD, POOR, BAD], "--quick", "--json")
    assert [found["name"] for found in json.loads(result.stdout)["checks"]] == ["cores", "torch"]


def test_the_directory_is_what_checks_look_at(run, tmp_path: Path) -> None:
    seen: list[Surroundings] = []
    looking = Check("x", lambda surroundings: seen.append(surroundings) or passes("ok"))
    run([looking], "--directory", str(tmp_path))
    assert seen[0].directory == tmp_path


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_columns_and_colours_unless_it_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if colour:
        monkeypatch.delenv("NO_COLOR", raising=False)
    else:
        monkeypatch.setenv("NO_COLOR", "1")
    console = Console(force_terminal=True, width=60, highlight=False, record=True)
    with console.capture() as capture:
        doctor._show(console, POOR, warns("word " * 30, "do it"))
    lines = capture.get().splitlines()
    assert len(lines) > 3
    assert ("\x1b[33m" in lines[0]) == colour
    assert all(line.startswith(" " * 20) for line in lines[1:-1])


def test_the_verb_and_the_measuring_functions_load_no_torch() -> None:
    code = (
        "import sys, isthmus.cli.doctor; assert 'isthmus.measure' not in sys.modules;"
        "import isthmus.measure.doctor; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
