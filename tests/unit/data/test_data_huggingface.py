"""Hugging Face datasets and tokenizers, with real ones made on the spot; nothing is downloaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.data import TextData, open_data
from isthmus.data.encode import TokenizerEncoder, UnsuitableTextError, encoder_for
from isthmus.data.huggingface import HuggingFaceSource
from isthmus.errors import ConfigError, DataError
from isthmus.spec.data import FilesData, HuggingFaceData

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
tqdm = pytest.importorskip("tqdm")

Opener = Callable[..., TextData]
WORDS = "the quick brown fox jumps over the lazy dog while it rains".split()  # noqa: SIM905
ROWS = [" ".join(WORDS[i % 7 : i % 7 + 3 + i % 5]) + f" {i}" for i in range(2500)]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread that outlives the test


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset directory with two splits of JSON lines."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "test.jsonl", [f"validation row {i}" for i in range(30)])
    return folder


def write_rows(path: Path, rows: list[Any]) -> None:
    lines = [json.dumps({"text": row, "id": i}) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines))


@pytest.fixture
def open_dataset(dataset: Path, tmp_path: Path) -> Opener:
    def open_it(**fields: Any) -> TextData:
        wanted: dict[str, Any] = {"dataset": str(dataset), "sequence_length": 16, **fields}
        spec = HuggingFaceData(**wanted)
        return open_data(spec, cache_dir=tmp_path / "cache", seed=0)

    return open_it


def make_tokenizer(path: Path, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """A byte-level BPE tokenizer, trained on the rows."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(ROWS, trainer)
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


def tokens_of(data: TextData, split: str) -> bytes:
    return (data.path / f"{split}.bin").read_bytes()


def test_rows_are_documents(open_dataset: Opener) -> None:
    data = open_dataset(validation_split="test")
    assert tokens_of(data, "train") == b"".join(row.encode() + b"\0" for row in ROWS)
    assert tokens_of(data, "validation").startswith(b"validation row 0\0validation row 1\0")
    assert [(e.name, e.split, e.documents) for e in data.manifest.entries] == [
        ("train[0:1024]", "train", 1024),
        ("train[1024:2048]", "train", 1024),
        ("train[2048:3072]", "train", 452),
        ("test[0:1024]", "validation", 30),
    ]


def test_without_a_validation_split_rows_are_held_out(open_dataset: Opener) -> None:
    data = open_dataset()
    train = tokens_of(data, "train").split(b"\0")[:-1]
    validation = tokens_of(data, "validation").split(b"\0")[:-1]
    assert sorted(train + validation) == sorted(row.encode() for row in ROWS)
    assert not set(train) & set(validation)
    assert 180 < len(validation) < 320  # 250 expected, standard deviation 15


def test_equal_rows_are_on_the_same_side(open_dataset: Opener, dataset: Path) -> None:
    write_rows(dataset / "train.jsonl", ROWS + ROWS)
    data = open_dataset()
    train = set(tokens_of(data, "train").split(b"\0")[:-1])
    assert not train & set(tokens_of(data, "validation").split(b"\0")[:-1])


def test_max_documents(open_dataset: Opener) -> None:
    data = open_dataset(validation_split="test", max_documents=20)
    assert tokens_of(data, "train").count(b"\0") == 20
    assert tokens_of(data, "validation").count(b"\0") == 20


def test_a_warm_open_does_not_read_the_dataset(
    open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_dataset()
    monkeypatch.setattr("isthmus.data.cache.write_tokens", None)
    assert open_dataset().digest == first.digest


def test_changed_rows_are_other_data(open_dataset: Opener, dataset: Path) -> None:
    first = open_dataset(validation_split="test")
    write_rows(dataset / "train.jsonl", [*ROWS[:-1], "a last row that is new"])
    second = open_dataset(validation_split="test")
    changed = set(first.manifest.entries) - set(second.manifest.entries)
    assert [entry.name for entry in changed] == ["train[2048:3072]"]


def test_formats_with_data_files(tmp_path: Path, open_dataset: Opener) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(ROWS))
    data = open_dataset(dataset="text", data_files=(str(lines),))
    assert sum(entry.documents for entry in data.manifest.entries) == 2500
    parquet = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"body": ROWS}).to_parquet(parquet)
    same = open_dataset(dataset="parquet", data_files=(str(parquet),), text_column="body")
    assert same.digest == data.digest


def test_rows_without_text_are_counted(open_dataset: Opener, dataset: Path) -> None:
    write_rows(dataset / "train.jsonl", [*ROWS, None, "", None, "with \0 inside"])
    skipped = open_dataset(validation_split="test").manifest.skipped
    assert {(s.name, s.reason, s.documents) for s in skipped} == {
        ("train[2048:3072]", "no text", 2),
        ("train[2048:3072]", "empty", 1),
        ("train[2048:3072]", "contains NUL, as binary files do", 1),
    }


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"text_column": "body"}, "has no column 'body'", "text, id"),
        ({"text_column": "id"}, "has int where text was expected", "text, id"),
        ({"train_split": "dev"}, "cannot read the split 'dev'", "data.dataset"),
        ({"dataset": "/nowhere/at/all"}, "cannot open the dataset", "data.dataset"),
        ({"config_name": "other"}, "cannot open the dataset", "data.dataset"),
    ],
)
def test_what_is_wrong_is_said(
    open_dataset: Opener, fields: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(**fields)
    assert hint in caught.value.hint


def test_tokens_decode_to_the_documents(open_dataset: Opener, tokenizer_file: Path) -> None:
    data = open_dataset(validation_split="test", tokenizer=str(tokenizer_file))
    assert data.vocab_size == 400
    assert data.manifest.dtype == "uint16"
    stream = data.samples(0, 1)
    assert stream.tokens.max() < 400
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokens = memoryview(tokens_of(data, "train")).cast("H").tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.split("<|endoftext|>")[:-1] == ROWS


def test_bits_per_byte_with_a_tokenizer(open_dataset: Opener, tokenizer_file: Path) -> None:
    as_bytes = open_dataset(validation_split="test")
    as_tokens = open_dataset(validation_split="test", tokenizer=str(tokenizer_file))
    bytes_file = as_bytes.manifest.files["validation"]
    tokens_file = as_tokens.manifest.files["validation"]
    assert tokens_file.text_nbytes == bytes_file.text_nbytes == bytes_file.tokens
    ratio = tokens_file.tokens / bytes_file.tokens
    assert ratio < 0.9
    assert as_tokens.nats_per_byte(2.0) == pytest.approx(2.0 * ratio)
    assert as_tokens.baselines() is None


def test_a_directory_with_a_tokenizer(tmp_path: Path, tokenizer_file: Path) -> None:
    by_file, by_folder = TokenizerEncoder(str(tokenizer_file)), TokenizerEncoder(str(tmp_path))
    assert by_file.hash == by_folder.hash


def test_another_tokenizer_is_other_data(
    tmp_path: Path, open_dataset: Opener, tokenizer_file: Path
) -> None:
    other = make_tokenizer(tmp_path / "other.json", special=("</s>",))
    first = open_dataset(tokenizer=str(tokenizer_file))
    assert first.digest != open_dataset(tokenizer=str(other)).digest


def test_text_that_is_not_utf8_is_skipped(
    corpus: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    (corpus / "latin1.txt").write_bytes(b"caf\xe9")
    spec = FilesData(paths=(str(corpus),), sequence_length=16, tokenizer=str(tokenizer_file))
    data = open_data(spec, cache_dir=tmp_path / "cache", seed=0)
    assert [(s.name, s.reason) for s in data.manifest.skipped] == [
        ("latin1.txt", "not UTF-8 at byte 3")
    ]


def test_encoder_raises_on_bad_utf8(tokenizer_file: Path) -> None:
    encoder = TokenizerEncoder(str(tokenizer_file))
    with pytest.raises(UnsuitableTextError, match="byte 2"):
        list(encoder.encode([b"ab", b"\xff"]))
    assert list(next(encoder.encode(["ä".encode()[:1], "ä".encode()[1:]])))


@pytest.mark.parametrize(
    ("special", "wanted", "message"),
    [
        (("<pad>",), "", "no token that is known to end a document"),
        (("</s>", "<eos>"), "", "several tokens that may end a document"),
        (("</s>",), "<end>", "has no token '<end>'"),
    ],
)
def test_the_end_of_a_document_must_be_known(
    tmp_path: Path, special: tuple[str, ...], wanted: str, message: str
) -> None:
    path = make_tokenizer(tmp_path / "t.json", special)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenizerEncoder(str(path), wanted)
    assert "end_of_document" in caught.value.hint


def test_the_end_of_a_document_can_be_chosen(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json", ("</s>", "<eos>"))
    assert TokenizerEncoder(str(path), "<eos>").separator == 1


@pytest.mark.parametrize("name", ["/nowhere/tokenizer.json", "missing.json"])
def test_a_missing_tokenizer_file(name: str) -> None:
    with pytest.raises(DataError, match="no tokenizer file"):
        TokenizerEncoder(name)


def test_a_broken_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        TokenizerEncoder(str(tmp_path / "broken.json"))


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("datasets", lambda: HuggingFaceSource(HuggingFaceData(dataset="x"))),
        ("tokenizers", lambda: encoder_for(FilesData(paths=("x",), tokenizer="gpt2"))),
    ],
)
def test_without_the_extra_the_command_is_shown(
    monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package '{package}'") as caught:
        use()
    assert caught.value.hint == "pip install 'isthmus[huggingface]'"
