"""A stop request: what handlers note, and what they leave alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from isthmus.elastic.signals import STOP_SIGNALS, StopRequest


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopRequest() as request:
        assert request.requested is None
        os.kill(os.getpid(), number)
        assert request.requested == number.name
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert request.requested == number.name


def test_the_first_signal_is_the_one_named() -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested == "SIGUSR1"


def test_a_second_ctrl_c_is_an_order_but_an_echo_is_not() -> None:
    clock = Clock()
    with StopRequest(clock_s=clock) as request:
        os.kill(os.getpid(), signal.SIGINT)
        clock.now_s = 0.1
        os.kill(os.getpid(), signal.SIGINT)
        assert request.requested == "SIGINT"
        clock.now_s = 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_can_be_read_without_torch() -> None:
    script = "import sys, isthmus.elastic.signals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
