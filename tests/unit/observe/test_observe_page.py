"""The page opens without a network, runs nothing, and takes no text for markup."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from isthmus.errors import IsthmusError
from isthmus.observe import (
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Failure,
    Notice,
    RankStarted,
    RunStarted,
    Step,
    Validation,
    build_report,
    render_page,
    write_report,
)

WriteRun = Callable[[Iterable[Event]], Path]
VOID = {"meta"}
EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"' &amp;"


class Outline(HTMLParser):
    """Tags, attributes and texts of a page; fails on one that is not well nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def evil_run(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
    write_run: WriteRun,
) -> Path:
    """A run whose every text tries to be markup."""
    at = {"time_s": 1003.0, "rank": 0}
    return write_run(
        [
            make_run_started(
                name=EVIL,
                launcher=EVIL,
                device=EVIL,
                config_digest=EVIL,
                versions={EVIL: EVIL},
                settings={EVIL: EVIL},
            ),
            RankStarted(**at, host=EVIL, pid=1, backend=EVIL, interface=EVIL, device=EVIL),
            make_step(1),
            make_step(2),
            make_validation(2),
            CheckpointSaved(**at, step=2, path=EVIL, nbytes=1, duration_s=0.1),
            CheckpointLoaded(**at, step=2, path=EVIL),
            CheckpointRejected(**at, path=EVIL, reason=EVIL),
            Notice(**at, message=EVIL),
            Failure(
                **at, host=EVIL, error_type=EVIL, message=EVIL, traceback=EVIL + "\x1b[31m", step=2
            ),
            make_run_started(time_s=1004.0, name=EVIL, attempt=2, start_step=1, launcher=EVIL),
            make_step(2, time_s=1005.0),
        ]
    )


def test_every_text_is_escaped(evil_run: Path) -> None:
    page = render_page(build_report(evil_run))
    outline = Outline(page)
    assert not outline.tags & {"script", "img"}
    assert not {name for name in outline.attributes if name.startswith("on")}
    assert outline.text.count("<script>alert(1)</script>") >= 15


def test_the_page_asks_for_nothing(evil_run: Path) -> None:
    page = render_page(build_report(evil_run))
    outline = Outline(page)
    assert not outline.tags & {"link", "script", "iframe", "object", "embed", "image", "use"}
    assert not outline.attributes & {"src", "href", "srcset", "action", "data", "xlink:href"}
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page


def test_each_chart_is_well_formed_and_describes_itself(evil_run: Path) -> None:
    page = render_page(build_report(evil_run))
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        root = ET.fromstring(chart)
        named = set(root.attrib["aria-labelledby"].split())
        texts = {child.attrib["id"]: child.text for child in root if "id" in child.attrib}
        assert named <= texts.keys()
        assert all(texts[name] for name in named)
        assert "nan" not in chart
        assert "inf" not in chart.replace("info", "")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_light_and_dark(evil_run: Path) -> None:
    page = render_page(build_report(evil_run))
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def test_long_lists_are_cut_and_say_so(
    make_run_started: Callable[..., RunStarted], write_run: WriteRun
) -> None:
    notices = [Notice(time_s=1001.0, rank=0, message=f"notice {index}") for index in range(70)]
    saved = [
        CheckpointSaved(time_s=1001.0, rank=0, step=s, path=f"c/{s}", nbytes=1, duration_s=0.1)
        for s in range(20)
    ]
    page = render_page(build_report(write_run([make_run_started(), *notices, *saved])))
    assert "6 more are in report.json" in page
    assert "The 8 rows before these are in report.json" in page
    assert "c/19" in page
    assert "c/7<" not in page


def test_reports_are_written_beside_the_events(evil_run: Path) -> None:
    json_path, html_path = write_report(build_report(evil_run), evil_run)
    assert (json_path.name, html_path.name) == ("report.json", "report.html")
    assert html_path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path.name for path in evil_run.iterdir()} == {"events", "report.json", "report.html"}


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    evil_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = build_report(evil_run)
    json_path, _ = write_report(report, evil_run)
    before = json_path.read_bytes()

    def refuse(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(IsthmusError, match="No space left"):
        write_report(report, evil_run)
    assert json_path.read_bytes() == before
    assert {path.name for path in evil_run.iterdir()} == {"events", "report.json", "report.html"}
