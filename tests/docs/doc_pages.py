"""The pages of the documentation as data: their code blocks, code spans and links.

Nothing here knows what is right; the tests say that. A fenced block may be given a name with
``title="run.toml"``, as mkdocs-material shows it, and may follow one of two comments::

    <!-- not run: why it can't be -->      the block is shown, not executed
    <!-- ranks: 2 -->                      anywhere: the page's Python runs on so many ranks
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference" / "generated"

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([\w+-]*)(.*)")
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_RANKS = re.compile(r"^<!-- ranks: (\d) -->$", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*(?:\{#([\w-]+)\})?$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: First word after the fence; empty if there is none.
        title: The name that it was given, as for a file; empty if none.
        line: Number of its first line of code in the page.
        code: Its text, without the fence's indentation.
        not_run: Why it is not executed; empty if it is.
    """

    language: str
    title: str
    line: int
    code: str
    not_run: str


@dataclass(frozen=True)
class Command:
    """A command of a console or shell block, with what is shown below it.

    Attributes:
        line: Its line in the page.
        words: The words after ``isthmus``, if that is what it runs.
        text: As it stands.
        shown: The output that the page shows, line by line.
        not_run: Why it is not executed; empty if it may be.
    """

    line: int
    words: tuple[str, ...]
    text: str
    shown: tuple[str, ...]
    not_run: str = ""


@dataclass(frozen=True)
class Page:
    """A page of Markdown."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def num_ranks(self) -> int:
        """On how many ranks the page's Python runs."""
        found = _RANKS.search(self.text)
        return int(found[1]) if found else 1

    @cached_property
    def blocks(self) -> list[Block]:
        return list(_blocks(self.text))

    @cached_property
    def prose(self) -> str:
        """The text with its fenced blocks blanked out."""
        lines = self.text.splitlines()
        for block in self.blocks:
            start, length = block.line - 1, block.code.count("\n")
            lines[start - 1 : start + length + 1] = [""] * (length + 2)
        return "\n".join(lines)

    @property
    def spans(self) -> list[str]:
        """Inline code."""
        return _SPAN.findall(self.prose)

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures, code left out."""
        return _LINK.findall(_SPAN.sub("", self.prose))

    @property
    def anchors(self) -> set[str]:
        """What can follow ``#`` in a link to this page."""
        return {given or slug(text) for text, given in _HEADING.findall(self.prose)}

    def of(self, *languages: str) -> list[Block]:
        """The blocks of some languages that are not marked as not run."""
        return [b for b in self.blocks if b.language in languages and not b.not_run]

    @property
    def commands(self) -> list[Command]:
        """All commands of all console and shell blocks."""
        return [
            command
            for block in self.blocks
            if block.language in ("console", "bash", "sh")
            for command in _commands(block)
        ]


def pages() -> list[Page]:
    """All pages that people write, in order of their names."""
    tops = list(ROOT.glob("*.md"))
    below = [
        path
        for folder in ("docs", "recipes", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.md")
        if GENERATED not in path.parents
    ]
    return [Page(path) for path in sorted(tops + below)]


def slug(heading: str) -> str:
    """The anchor that both the site and a code host make of a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())


def _blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    place, comment = 0, ""
    while place < len(lines):
        line = lines[place]
        opening = _FENCE.fullmatch(line)
        if opening is None:
            if line.strip():
                comment = line
            place += 1
            continue
        indent, fence, language, rest = opening.groups()
        end = next(
            (i for i in range(place + 1, len(lines)) if lines[i].strip() == fence), len(lines)
        )
        code = "".join(f"{each.removeprefix(indent)}\n" for each in lines[place + 1 : end])
        title, marked = _TITLE.search(rest), _NOT_RUN.fullmatch(comment.strip())
        yield Block(
            language, title[1] if title else "", place + 2, code, marked[1] if marked else ""
        )
        place, comment = end + 1, ""


def _commands(block: Block) -> Iterator[Command]:
    """Commands of a block: lines after ``$`` in a console, all lines of a script."""
    lines = block.code.replace("\\\n", " ").splitlines()
    for place, line in enumerate(lines):
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            following = lines[place + 1 :]
            shown = following[: next((i for i, s in enumerate(following) if s[:2] == "$ "), None)]
            text = line[2:]
        else:
            shown, text = [], line
        for words in _simple_commands(text):
            yield Command(
                block.line + place, _after_isthmus(words), text, tuple(shown), block.not_run
            )


def _simple_commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;"):
            yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


def _after_isthmus(words: list[str]) -> tuple[str, ...]:
    """The arguments of ``isthmus``, also behind srun or torchrun; empty if it is not run."""
    for place, word in enumerate(words):
        if word == "isthmus" and "pip" not in words:
            return ("isthmus", *words[place + 1 :])
    return ()
