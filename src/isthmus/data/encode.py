"""Text to tokens: bytes as they are, or a Hugging Face tokenizer.

An encoder turns the chunks of one document into arrays of tokens. The separator that follows each
document is written by :mod:`isthmus.data.cache`. For bytes it is NUL, which no text contains: a
document that does is taken for a binary file and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from isthmus.data.extras import import_extra
from isthmus.errors import ConfigError, DataError
from isthmus.spec.data import BYTES, BYTES_VOCAB_SIZE, TextDataSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Dtype = Literal["uint8", "uint16", "uint32"]
_END_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""Tokens that end a document in well-known tokenizers."""


class UnsuitableTextError(Exception):
    """A document that can't be taken; the text says why. Never leaves :mod:`isthmus.data`."""


class Encoder(Protocol):
    """Turns text into tokens."""

    name: str
    """As the user wrote it."""
    hash: str
    """Equal if and only if the same text gives the same tokens."""
    vocab_size: int
    separator: int
    dtype: Dtype

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[np.unsignedinteger]]:
        """The tokens of one document.

        Raises:
            UnsuitableTextError: The document can't be taken.
        """
        ...


def encoder_for(spec: TextDataSpec) -> Encoder:
    """The encoder that a spec asks for.

    Raises:
        ConfigError: There is no such tokenizer, or its extra is not installed.
    """
    if spec.tokenizer != BYTES:
        return TokenizerEncoder(spec.tokenizer, spec.end_of_document)
    if spec.end_of_document:
        raise ConfigError(
            "end_of_document is set, but the bytes tokenizer always ends a document with NUL",
            hint="remove end_of_document, or name a tokenizer",
        )
    return ByteEncoder()


class ByteEncoder:
    """Each byte is a token; NUL ends a document."""

    name = BYTES
    hash = BYTES
    vocab_size = BYTES_VOCAB_SIZE
    separator = 0
    dtype: Dtype = "uint8"

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[np.unsignedinteger]]:
        """The bytes, chunk by chunk."""
        for chunk in chunks:
            yield np.frombuffer(chunk, np.uint8)


class TokenizerEncoder:
    """A Hugging Face tokenizer. A document is tokenized whole, so it must fit in memory.

    Args:
        name: Path of a ``tokenizer.json`` or of the directory that has it, else a name on the hub.
        end_of_document: Text of the token that ends a document; empty to find it.
    """

    def __init__(self, name: str, end_of_document: str = "") -> None:
        self.name = name
        self._tokenizer = _load(name)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = _end_token(name, vocabulary, end_of_document)
        self.dtype: Dtype = _smallest_dtype(self.vocab_size)
        self.hash = xxhash.xxh3_128_hexdigest(self._tokenizer.to_str().encode())

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[np.unsignedinteger]]:
        """The tokens of the whole document, at once."""
        try:
            text = b"".join(chunks).decode()
        except UnicodeDecodeError as error:
            raise UnsuitableTextError(f"not UTF-8 at byte {error.start}") from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        yield np.array(ids, np.dtype(self.dtype))


def _load(name: str) -> Tokenizer:
    tokenizers = import_extra("tokenizers", extra="huggingface", wanted_by=f"tokenizer = {name!r}")
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        elif path.suffix == ".json" or path.is_absolute():
            raise DataError(f"there is no tokenizer file {path}")
        else:
            tokenizer = tokenizers.Tokenizer.from_pretrained(name)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for all that can go wrong
        raise DataError(
            f"cannot load the tokenizer {name!r}: {error}",
            hint="give the path of a tokenizer.json, or a name on the Hugging Face hub",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(name: str, vocabulary: dict[str, int], wanted: str) -> int:
    candidates = [wanted] if wanted else list(_END_TOKENS)
    found = [token for token in candidates if token in vocabulary]
    if len(found) == 1:
        return vocabulary[found[0]]
    if wanted:
        problem = f"the tokenizer {name!r} has no token {wanted!r}"
    elif found:
        problem = f"the tokenizer {name!r} has several tokens that may end a document: {found}"
    else:
        problem = f"the tokenizer {name!r} has no token that is known to end a document"
    raise ConfigError(problem, hint="name the token in end_of_document, as it is in its vocabulary")


def _smallest_dtype(vocab_size: int) -> Dtype:
    if vocab_size <= 2**8:
        return "uint8"
    return "uint16" if vocab_size <= 2**16 else "uint32"
