"""The one guard around packages that only an extra installs."""

from __future__ import annotations

import importlib
from typing import Any

from isthmus.errors import ConfigError


def import_extra(module: str, *, extra: str, wanted_by: str) -> Any:
    """Imports a module of an extra.

    Raises:
        ConfigError: It is not installed; the hint is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(
            f"{wanted_by} needs the package {module!r}, which is not installed",
            hint=f"pip install 'isthmus[{extra}]'",
        ) from None
