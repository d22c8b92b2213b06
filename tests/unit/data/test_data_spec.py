"""Specs of data: the union, its bare name, and what they answer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from isthmus.data.encode import encoder_for
from isthmus.errors import ConfigError
from isthmus.spec.data import DataSpec, FilesData, HuggingFaceData, StdlibData

DATA = TypeAdapter(DataSpec)


def test_bare_name() -> None:
    assert DATA.validate_python("stdlib") == StdlibData()


def test_kinds() -> None:
    assert DATA.validate_python({"kind": "files", "paths": ["a"]}) == FilesData(paths=("a",))
    assert DATA.validate_python({"kind": "huggingface", "dataset": "d"}) == HuggingFaceData(
        dataset="d"
    )
    assert DATA.validate_python(StdlibData(sequence_length=4)) == StdlibData(sequence_length=4)


@pytest.mark.parametrize(
    "wrong",
    [
        "files",
        "nonsense",
        3,
        {},
        {"kind": "files", "paths": []},
        {"kind": "stdlib", "paths": ["a"]},
        {"kind": "stdlib", "validation_fraction": 1.0},
        {"kind": "stdlib", "validation_fraction": 0},
        {"kind": "stdlib", "sequence_length": 0},
        {"kind": "stdlib", "tokenizer": ""},
        {"kind": "huggingface", "dataset": "d", "max_documents": 0},
    ],
)
def test_what_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        DATA.validate_python(wrong)


def test_vocabulary() -> None:
    assert StdlibData().vocab_size == 256
    assert StdlibData(tokenizer="tokenizer.json").vocab_size is None


def test_bytes_have_their_own_end_of_document() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        encoder_for(StdlibData(end_of_document="</s>"))


def test_round_trip() -> None:
    spec = FilesData(paths=("a", "b"), suffixes=(".txt",), split="tail", split_salt="x")
    assert DATA.validate_python(spec.model_dump()) == spec
    assert DATA.validate_json(spec.model_dump_json()) == spec


def test_every_field_is_documented() -> None:
    for spec in (StdlibData, FilesData, HuggingFaceData):
        undocumented = [n for n, field in spec.model_fields.items() if not field.description]
        assert undocumented == []


def test_reading_specs_imports_neither_torch_nor_numpy() -> None:
    code = "import isthmus.spec.data, sys; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
