"""The live view: a panel on a terminal, plain lines elsewhere, and a terminal left as it was."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from isthmus.observe import (
    Baselines,
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Display,
    Failure,
    FaultInjected,
    Notice,
    RunFinished,
    RunStarted,
    Step,
    Stopped,
    Validation,
)

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def terminal_console(**changes: object) -> Console:
    settings = {"width": 120, "height": 40, "force_terminal": True, "_environ": {"TERM": "xterm"}}
    return Console(file=io.StringIO(), **(settings | changes))  # type: ignore[arg-type]


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(console: Console) -> list[str]:
    return written(console).splitlines()


def test_elsewhere_a_step_line_comes_at_most_once_an_interval(
    make_step: Callable[..., Step], make_run_started: Callable[..., RunStarted]
) -> None:
    console = plain_console()
    with Display(console, interval_s=10.0) as display:
        display.handle(make_run_started(total_steps=30, bytes_per_token=1.0))
        for step in range(1, 31):
            display.handle(make_step(step, time_s=1000.0 + step))
            display.tick(1000.0 + step)
    shown = [line.split()[1] for line in lines(console) if line.startswith("step ")]
    assert shown == ["1/30", "11/30", "21/30", "30/30"]  # the last one when it closes
    assert "\x1b" not in written(console)


def test_a_plain_step_line_says_how_far_how_good_how_fast_and_what_it_sent(
    make_step: Callable[..., Step], make_run_started: Callable[..., RunStarted]
) -> None:
    console = plain_console()
    display = Display(console, interval_s=0.0)
    display.handle(make_run_started(total_steps=12, bytes_per_token=2.0))
    for step in (1, 2):
        display.handle(make_step(step, loss_nats=math.log(2)))
    assert lines(console)[-1] == (
        "step 2/12  loss 0.693 nats  0.500 bit/B  16.4 k tok/s  sent 8 kB  comm 25 %  ETA 0:00:05"
    )


def test_what_happens_once_is_always_shown(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
) -> None:
    console = plain_console()
    display = Display(console, interval_s=1e9)
    at = {"time_s": 1001.5, "rank": 0}
    for event in (
        make_run_started(start_step=4),
        CheckpointRejected(**at, path="c/5", reason="a flipped byte"),
        CheckpointLoaded(**at, step=4, path="c/4"),
        Baselines(**at, bigram_nats=2.5, trigram_nats=1.75),
        make_step(5),
        make_validation(5, loss_nats=2.0),
        CheckpointSaved(**at, step=5, path="c/5", nbytes=2_000_000, duration_s=0.5),
        Notice(**at, message="slow disk"),
        Failure(time_s=1002.0, rank=1, host="b", error_type="OSError", message="gone"),
        FaultInjected(
            **at, fault="nic_down", target="a0:eth0", value="down", since_start_s=1.0
        ),
        Stopped(**at, step=5, reason="SIGINT"),
        RunFinished(**at, step=10, duration_s=30.0),
    ):
        display.handle(event)
    display.close()
    assert lines(console) == [
        "first resumes after step 4: 2 ranks on cpu by local, 1.2 M parameters, 10 steps",
        "checkpoint c/5 passed over: a flipped byte",
        "goes on from the checkpoint of step 4: c/4",
        "step 5/10  loss 1.000 nats  16.4 k tok/s  sent 4 kB  comm 25 %",
        "validation at step 5: 2.000 nats  2.885 bit/B  bigram 2.500  trigram 1.750",
        "checkpoint at step 5: 2 MB in 500 ms  c/5",
        "warning: slow disk (rank 0)",
        "rank 1 on b failed: OSError: gone",
        "nic_down: a0:eth0 is down",
        "stopped at step 5 by SIGINT",
        "finished 10 steps in 30 s",
    ]


def test_the_last_step_is_shown_before_the_end(
    make_step: Callable[..., Step], make_run_started: Callable[..., RunStarted]
) -> None:
    console = plain_console()
    with Display(console, interval_s=1e9) as display:
        display.handle(make_run_started())
        for step in (1, 2, 3):
            display.handle(make_step(step))
        display.handle(RunFinished(time_s=1004.0, rank=0, step=3, duration_s=4.0))
    assert [line.split()[0:2] for line in lines(console)[1:]] == [
        ["step", "1/10"],
        ["step", "3/10"],
        ["finished", "3"],
    ]


def test_steps_of_other_ranks_are_not_shown(make_step: Callable[..., Step]) -> None:
    console = plain_console()
    with Display(console, interval_s=0.0) as display:
        display.handle(make_step(1, rank=1))
    assert written(console) == ""


def test_markup_in_a_message_is_text() -> None:
    console = plain_console()
    Display(console).handle(Notice(time_s=1.0, rank=0, message="[red]x[/red] :smile: [/]"))
    assert lines(console) == ["warning: [red]x[/red] :smile: [/] (rank 0)"]


def test_losses_that_are_not_finite_are_shown(
    make_step: Callable[..., Step], make_run_started: Callable[..., RunStarted]
) -> None:
    for console in (plain_console(), terminal_console()):
        with Display(console, interval_s=0.0) as display:
            display.handle(make_run_started(bytes_per_token=1.0))
            for step, loss in ((1, math.nan), (2, math.inf), (3, 1.0), (4, math.nan)):
                display.handle(make_step(step, loss_nats=loss))
                display.tick(1000.0 + step)
        assert "nan nats" in written(console)


@pytest.fixture
def panel(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
) -> Callable[[Console], Display]:
    """Draws a run on a console up to its fifth step."""

    def draw(console: Console) -> Display:
        display = Display(console, interval_s=0.0)
        display.handle(make_run_started(bytes_per_token=1.0))
        display.handle(Baselines(time_s=1000.0, rank=0, bigram_nats=2.5, trigram_nats=1.75))
        for step in range(1, 6):
            display.handle(make_step(step))
        display.handle(make_validation(5, loss_nats=2.0))
        display.handle(
            CheckpointSaved(
                time_s=1005.0, rank=0, step=5, path="c/5", nbytes=1_000_000, duration_s=0.1
            )
        )
        display.tick(1005.0)
        return display

    return draw


def test_on_a_terminal_the_panel_shows_the_run(panel: Callable[[Console], Display]) -> None:
    console = terminal_console(no_color=True)
    panel(console).close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written(console))
    for part in (
        "step 5/10",
        "0:00:05  ETA 0:00:02",
        "1.000 nats  1.443 bit/B  █▄▂▁▁",
        "16.4 k tok/s",
        "rank 0 sent 20 kB  25 % of the time",
        "2.000 nats  2.885 bit/B  bigram 2.500  trigram 1.750  at step 5",
        "at step 5: 1 MB in 100 ms  c/5",
    ):
        assert part in text
    assert not re.search(r"\n(validation at|checkpoint at)", text)  # these stay in the panel


def test_the_terminal_gets_its_cursor_back(panel: Callable[[Console], Display]) -> None:
    console = terminal_console()
    display = panel(console)
    assert HIDE_CURSOR in written(console)
    assert SHOW_CURSOR not in written(console)
    display.close()
    display.close()
    assert written(console).count(HIDE_CURSOR) == written(console).count(SHOW_CURSOR) == 1
    assert written(console).endswith(f"\n{SHOW_CURSOR}")


def test_the_panel_is_drawn_at_most_ten_times_a_second(
    panel: Callable[[Console], Display],
) -> None:
    console = terminal_console()
    display = panel(console)
    before = written(console)
    for hundredth in range(1, 10):
        display.tick(1005.0 + hundredth / 100)
    assert written(console) == before
    display.tick(1005.11)
    assert written(console) != before
    display.close()


def test_the_panel_says_when_no_step_comes(panel: Callable[[Console], Display]) -> None:
    console = terminal_console()
    display = panel(console)
    assert "no step for" not in written(console)
    display.tick(1045.0)
    assert "no step for 40 s" in written(console)
    display.close()


def test_no_color_is_honoured(panel: Callable[[Console], Display]) -> None:
    environment = {"TERM": "xterm-256color"}
    for extra, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        console = terminal_console(_environ=environment | extra, color_system="standard")
        panel(console).close()
        assert bool(re.search(r"\x1b\[[0-9;]*[39][0-7]m", written(console))) is is_coloured


def test_a_dumb_terminal_gets_plain_lines(panel: Callable[[Console], Display]) -> None:
    console = terminal_console(_environ={"TERM": "dumb"})
    panel(console).close()
    assert HIDE_CURSOR not in written(console)
    assert lines(console)[1].startswith("step 1/10")


def test_before_the_run_starts_the_panel_says_what_it_waits_for() -> None:
    console = terminal_console()
    with Display(console) as display:
        display.tick(1.0)
    assert "waiting for the ranks to meet" in written(console)
