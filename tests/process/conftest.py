"""Process tests: they start real processes, share one warm pool, and never run under xdist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def _not_under_xdist() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("process tests share one pool: run them in a session of their own, without -n")
