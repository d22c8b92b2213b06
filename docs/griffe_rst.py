"""Lets mkdocstrings show docstrings that use two marks of reStructuredText, as ours do.

``:class:`~isthmus.sync.Replica``` becomes a code span with the last name, and a paragraph that ends
in ``::`` before an indented block ends in ``:`` and makes the block a fenced one.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?(?:isthmus\.(?:\w+\.)*)?([^`]+)`")
_LITERAL = re.compile(r"::\n\n((?:(?: {4}.*)?\n)*(?: {4}.*))(?=\n*(?:\n\S|$))")


def to_markdown(text: str) -> str:
    """The docstring's text with roles and literal blocks as Markdown."""
    text = _ROLE.sub(r"`\1`", text)
    return _LITERAL.sub(lambda found: f":\n\n```text\n{_dedented(found[1])}\n```", text)


def _dedented(block: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


class RstDocstrings(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for modules, classes, functions and attributes."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
