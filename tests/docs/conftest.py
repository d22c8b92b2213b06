"""Tests of the documentation. The pages' Python runs on ranks from a pool of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "process"))

from pool import RankPool

POOL = pytest.StashKey[RankPool]()


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
