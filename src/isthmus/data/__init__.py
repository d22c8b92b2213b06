"""Text to train on: byte-level by default, from sources that need no download.

The way of a byte: ``sources`` finds documents, ``encode`` makes tokens of them, ``write`` puts
these into files described by a ``manifest``, ``cache`` keeps the files in a directory named by
their content; ``text`` hands out batches in the order that ``order`` gives, and ``ngram`` says what
a loss on them is worth. Documents are read once; a step reads its samples from mapped memory.
"""

from __future__ import annotations

from isthmus.data.manifest import Manifest, check_unchanged, describe_change
from isthmus.data.ngram import NgramBaselines
from isthmus.data.text import Batch, TextData, open_data

__all__ = [
    "Batch",
    "Manifest",
    "NgramBaselines",
    "TextData",
    "check_unchanged",
    "describe_change",
    "open_data",
]
