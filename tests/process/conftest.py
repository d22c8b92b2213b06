"""Process tests: they start real processes, share one warm pool, and never run under xdist."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool import RankPool

HERE = Path(__file__).parent
POOL = pytest.StashKey[RankPool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def _not_under_xdist() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("process tests share one pool: run them in a session of their own, without -n")


@pytest.fixture
def own_resources(pytestconfig: pytest.Config) -> Callable[[], set[str]]:
    """What the pool holds is no test's leak."""

    def held() -> set[str]:
        pool = pytestconfig.stash.get(POOL, None)
        return pool.own_resources if pool else set()

    return held


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """Run functions on a few ranks: ``ranks.run(fn, world_size, **kwargs) -> results``."""
    pool = RankPool()
    pytestconfig.stash[POOL] = pool
    yield pool
    pool.close()
