"""Documents from Hugging Face datasets, streamed: nothing but the prepared tokens is stored.

Rows are accounted for in blocks of 1024, so that the manifest of millions of rows stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import xxhash

from isthmus.data.extras import import_extra
from isthmus.data.manifest import Skipped, Split
from isthmus.data.sources import Document, side_of
from isthmus.errors import DataError
from isthmus.spec.data import HuggingFaceData

_ROWS_PER_ENTRY: Final = 1024


class HuggingFaceSource:
    """The rows of one column of a dataset.

    Raises:
        ConfigError: The extra is not installed.
        DataError: The dataset can't be opened, or lacks a split or the column.
    """

    nbytes: int | None = None
    drops_duplicates = False
    """Not among millions of rows; a hash of the text holds equal rows on one side instead."""

    def __init__(self, spec: HuggingFaceData) -> None:
        self.label = f"dataset {spec.dataset}"
        self._spec = spec
        datasets = import_extra(
            "datasets", extra="huggingface", wanted_by=f"dataset = {spec.dataset!r}"
        )
        try:
            self._builder = datasets.load_dataset_builder(
                str(Path(spec.dataset).expanduser()),
                spec.config_name,
                data_files=[str(Path(file).expanduser()) for file in spec.data_files] or None,
                revision=spec.revision,
            )
        except Exception as error:  # datasets raises some twenty kinds, many of them built in
            raise self._cannot("open", error) from error

    def fingerprint(self) -> bytes | None:
        """The builder's cache key: a hash of its configuration, revision and files."""
        wanted = self._spec.model_dump_json(exclude={"sequence_length", "tokenizer"})
        return f"{self._builder.cache_dir}\n{wanted}".encode()

    def documents(self) -> Iterator[Document | Skipped]:
        """Rows with text, in the dataset's order."""
        spec = self._spec
        if spec.validation_split is None:
            yield from self._rows_of(spec.train_split, None)
        else:
            yield from self._rows_of(spec.train_split, "train")
            yield from self._rows_of(spec.validation_split, "validation")

    def _rows_of(self, split: str, side: Split | None) -> Iterator[Document | Skipped]:
        spec = self._spec
        for i, row in enumerate(islice(self._stream(split), spec.max_documents)):
            text = row.get(spec.text_column)
            block = i - i % _ROWS_PER_ENTRY
            name = f"{split}[{block}:{block + _ROWS_PER_ENTRY}]"
            if text is None:
                yield Skipped(name, "no text")
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"column {spec.text_column!r} of {spec.dataset} has {type(text).__name__} "
                    "where text was expected",
                    hint=f"set data.text_column to one of: {', '.join(row)}",
                )
            encoded = text.encode("utf-8", "surrogatepass")
            yield _document(name, side or self._draw(encoded), encoded)

    def _draw(self, text: bytes) -> Split:
        key = xxhash.xxh3_128_digest(text)
        return side_of(key, salt=self._spec.split_salt, fraction=self._spec.validation_fraction)

    def _stream(self, split: str) -> Iterator[Mapping[str, Any]]:
        try:
            rows: Iterable[Mapping[str, Any]] = self._builder.as_streaming_dataset(split=split)
            for i, row in enumerate(rows):
                if i == 0 and self._spec.text_column not in row:
                    raise DataError(
                        f"{self._spec.dataset} has no column {self._spec.text_column!r}",
                        hint=f"set data.text_column to one of: {', '.join(row)}",
                    )
                yield row
        except DataError:
            raise
        except Exception as error:  # as above; also what the network does while streaming
            raise self._cannot(f"read the split {split!r} of", error) from error

    def _cannot(self, what: str, error: Exception) -> DataError:
        return DataError(
            f"cannot {what} the dataset {self._spec.dataset!r}: {type(error).__name__}: {error}",
            hint="check data.dataset, config_name, data_files, splits and the network",
        )


def _document(name: str, split: Split, text: bytes) -> Document:
    return Document(name, split, lambda: iter((text,)))
