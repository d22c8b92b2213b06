"""The library's face is what it says it is."""

from __future__ import annotations

import pytest

import isthmus


def test_every_public_name_can_be_imported_and_nothing_else_is_named() -> None:
    assert sorted(isthmus.__all__) == sorted(isthmus._HOMES) == dir(isthmus)
    for name in isthmus.__all__:
        found = getattr(isthmus, name)
        assert found.__name__ == name
        assert found.__module__.startswith("isthmus.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'replicat'"):
        isthmus.replicat  # noqa: B018
