"""The guides about the lab: their commands and their Python run, and print what they show."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from isthmus.cli.app import run
from isthmus.lab.timeline import AnyFault, load_timeline
from isthmus.observe import FaultInjected
from isthmus.observe.log import lab_events_path, read_events
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load

pytestmark = pytest.mark.network

if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
    pytest.skip("needs root and network namespaces", allow_module_level=True)

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
TRY, FAULTS = "try-a-strategy-on-a-network.md", "write-a-fault-timeline.md"
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SLOW = ("--train", "check", "fault", "status", "torchrun")
"""Commands that take long, or need another one beside them; other tests run these."""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the recipes, in an environment of nobody's rank."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ISTHMUS_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, desk: Path) -> str:
    """The guide, after its titled blocks have become files."""
    text = (GUIDES / name).read_text()
    for _, title, code in BLOCK.findall(text):
        if title:
            (desk / title).write_text(code)
    return text


def commands(text: str) -> list[tuple[list[str], list[str]]]:
    """The words of each command that is quick, and the lines that the guide shows below it."""
    found: list[tuple[list[str], list[str]]] = []
    for language, _, code in BLOCK.findall(text):
        for part in (
            re.split(r"^\$ ", code, flags=re.MULTILINE)[1:] if language == "console" else ()
        ):
            command, *shown = part.splitlines()
            words = shlex.split(command)
            if words[0] == "isthmus" and not set(words) & set(SLOW):
                found.append((words[1:], [line for line in shown if line != "..."]))
    return found


def test_commands_print_what_the_guide_shows(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = commands(written(TRY, desk))
    assert len(found) == 2
    for words, shown in found:
        assert run(words) == 0
        printed = capfd.readouterr().out.splitlines()
        assert [line for line in shown if line not in printed] == []


def test_the_python_of_the_guide_runs(desk: Path) -> None:
    written(TRY, desk)
    found = runpy.run_path("first_contact.py")
    assert set(found["sent"]) == {"east", "west"}


def test_the_timeline_of_the_guide_was_played_and_recorded(desk: Path) -> None:
    [(words, _)] = commands(written(FAULTS, desk))
    assert run(words) == 0
    events = read_events(lab_events_path(desk / "runs" / "lab-in-two-sites")).events
    faults = [event for event in events if isinstance(event, FaultInjected)]
    assert len(faults) == len(events) == 8
    assert [fault.error for fault in faults] == [""] * 8
    assert {fault.fault for fault in faults} == {"link_rate", "link_flap", "nic_down"}
    assert sum(fault.is_end for fault in faults) == 4


def test_every_timeline_fits_and_every_kind_is_in_the_table(desk: Path) -> None:
    text = written(FAULTS, desk)
    cluster = load(ClusterSpec, Path("recipes/clusters/two-sites.toml")).spec
    for name in ("faults.toml", "at-a-step.toml"):
        assert load_timeline(Path(name), cluster).fault
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} - {"kind"}
    kinds = AnyFault.__args__[0].__args__
    assert named == {kind.model_fields["kind"].default for kind in kinds}
