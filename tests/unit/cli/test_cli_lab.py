"""What ``isthmus lab`` refuses and foretells, before it builds anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cli.app import run as run_cli

CLUSTER = """
name = "pair"
[[sites]]
name = "east"
hosts = [{name = "e", nics = [{bandwidth = "100 Mbit/s"}]}]
[[sites]]
name = "west"
hosts = [{name = "w", nics = [{bandwidth = "100 Mbit/s"}]}]
[[links]]
between = ["east", "west"]
bandwidth = "50 Mbit/s"
"""


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.toml").write_text(CLUSTER)
    return "pair.toml"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pair.toml"], "no command is given"),
        (["pair.toml", "--", "no-such-program"], "no program 'no-such-program'"),
        (["missing.toml", "--", "true"], "no file missing.toml"),
        (["pair.toml", "--train", "run.toml", "--", "true"], "both --train and a command"),
        (["pair.toml", "--set", "a=b", "--", "true"], "for --train alone"),
        (["pair.toml", "--allow-missing", "x", "--", "true"], "latency, memory, not 'x'"),
        (["pair.toml", "--timeline", "missing.toml", "--", "true"], "no file missing.toml"),
    ],
)
def test_bad_input_is_refused(
    cluster_file: str, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["lab", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_built(
    cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["lab", cluster_file, "--dry-run", "--", "true"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "host e in east: eth0 10.77.1.2 100 Mbit/s",
        "host w in west: eth0 10.77.2.2 100 Mbit/s",
        "link east - west: 50 Mbit/s",
        "would run in each: true",
    ]
    assert run_cli(["lab", cluster_file, "--dry-run", "--json", "--", "true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["command"] == ["true"]
    assert [host["name"] for host in plan["hosts"]] == ["e", "w"]


def test_a_dry_run_of_training_names_its_command_and_directory(
    cluster_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('name = "mine"\n')
    words = ["--train", "run.toml", "--set", "train.steps=3", "--dry-run", "--json"]
    assert run_cli(["lab", cluster_file, *words]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert command[1:] == [
        *("-m", "isthmus", "train", "run.toml", "--run-dir", "runs/mine-in-pair"),
        *("--set", "train.steps=3"),
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "check", "fault", "status"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["lab", verb, "--help"]) == 0
    assert f"isthmus lab {verb}" in capsys.readouterr().out


def test_a_file_with_the_name_of_a_verb_can_be_reached_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check").write_text(CLUSTER)
    assert run_cli(["lab", "./check", "--dry-run", "--", "true"]) == 0
    assert "link east - west" in capsys.readouterr().out
