"""``python -m isthmus`` is the command ``isthmus``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from isthmus.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
