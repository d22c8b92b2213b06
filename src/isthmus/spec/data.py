"""What to train on: where the text comes from and how it becomes tokens.

One class a source, chosen by ``kind``; :data:`DataSpec` is the type of a field that takes any of
them, or the bare name ``"stdlib"``. The runtime is :mod:`isthmus.data`; nothing here reads a file.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from isthmus.spec.base import Spec

BYTES: Final = "bytes"
"""Name of the tokenizer that needs none: each byte is a token."""
BYTES_VOCAB_SIZE: Final = 256


class TextDataSpec(Spec):
    """What all sources of text have in common."""

    sequence_length: int = Field(default=128, ge=1)
    """Tokens of a sample; the model predicts as many, each from those before it."""
    tokenizer: str = Field(default=BYTES, min_length=1)
    """``bytes``, a path to a ``tokenizer.json``, or the name of a tokenizer on the Hugging Face hub
    (the last two need ``isthmus[huggingface]``)."""
    end_of_document: str = ""
    """The token written after each document. Empty: the NUL byte for ``bytes``; else the
    tokenizer's only token that is known to mean it, such as ``<|endoftext|>`` or ``</s>``."""
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the documents that is kept from training and validated on."""
    split_salt: str = ""
    """Another text draws another validation set. The seed of a run never does."""

    @property
    def vocab_size(self) -> int | None:
        """Number of distinct tokens; None if only the tokenizer's file knows."""
        return BYTES_VOCAB_SIZE if self.tokenizer == BYTES else None


class StdlibData(TextDataSpec):
    """The source text of the running Python's standard library: real text, nothing to download."""

    kind: Literal["stdlib"] = "stdlib"
    """Which source this is."""


class FilesData(TextDataSpec):
    """Files of this machine; each file is a document."""

    kind: Literal["files"] = "files"
    """Which source this is."""
    paths: tuple[str, ...] = Field(min_length=1)
    """Directories (read with all below them), files, or patterns such as ``corpus/**/*.txt``.
    Names that begin with a dot are left out of directories, and so are runs of isthmus."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files to take from directories, such as ``.txt``; empty takes all."""
    split: Literal["file", "tail"] = "file"
    """``file`` validates on whole files, chosen by a hash of their names; ``tail`` on the last part
    of every file, which suits one long file."""


class HuggingFaceData(TextDataSpec):
    """A dataset read with Hugging Face datasets (``isthmus[huggingface]``), each row a document."""

    kind: Literal["huggingface"] = "huggingface"
    """Which source this is."""
    dataset: str = Field(min_length=1)
    """Name on the hub, a local directory, or a format: ``text``, ``json``, ``parquet``, ``csv``."""
    config_name: str | None = None
    """Which configuration of the dataset, where it has several."""
    data_files: tuple[str, ...] = ()
    """Files to read, where ``dataset`` is a format or only some of its files are wanted."""
    revision: str | None = None
    """Commit, tag or branch on the hub. A commit alone can't change under a run."""
    train_split: str = "train"
    """The split to train on."""
    validation_split: str | None = None
    """The split to validate on; without one, documents of ``train_split`` are held out, chosen by a
    hash of their text, so that equal documents are on the same side."""
    text_column: str = "text"
    """The column that has the text."""
    max_documents: int | None = Field(default=None, ge=1)
    """Read no more than this many rows of each split."""


def _from_bare_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


DataSpec = Annotated[
    StdlibData | FilesData | HuggingFaceData,
    Field(discriminator="kind"),
    BeforeValidator(_from_bare_name),
]
"""Any source: a member, a table with ``kind``, or the bare name of one that needs no more."""
