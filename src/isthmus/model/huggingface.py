"""Llama checkpoints of Hugging Face: a directory of config.json and safetensors files.

:func:`load_huggingface` opens one, :func:`save_huggingface` writes one, and ``transformers`` and
this package then give the same logits. Nothing is permuted or fused on the way, so weights come
back bit for bit (in the type they were stored in, or a wider one).

What this package cannot compute as the checkpoint means it (another architecture, biases, other
rotary scalings, quantised weights, options it does not know) is refused with all reasons at once;
nothing is skipped in silence. Not carried: tokenizers, generation settings, special token ids.
``transformers`` is not needed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isthmus.errors import ConfigError
from isthmus.model.huggingface_config import (
    CONFIG_FILE,
    huggingface_config,
    read_huggingface_spec,
    read_json,
    refuse,
)
from isthmus.model.transformer import Transformer

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OUTER_NAMES: Final[Mapping[str, str]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_STORED_TYPES: Final = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class _Stored:
    """Where one tensor lies, as its file's header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def huggingface_name(name: str) -> str:
    """The name in a Llama checkpoint of one of :class:`Transformer`'s parameters."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    layers, number, rest = name.split(".", 2)
    return f"model.{layers}.{number}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def load_huggingface(
    directory: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a directory, with its weights.

    Args:
        directory: Holds config.json and either model.safetensors or an index and its shards.
        dtype: Type of the parameters. Stored weights are converted to it; fp32 holds every type
            that is accepted (fp32, fp16, bf16) exactly.
        device: Where the parameters are put.

    Raises:
        ConfigError: As for :func:`read_huggingface_spec` and :func:`load_huggingface_weights`.
    """
    with torch.device("meta"):
        model = Transformer(read_huggingface_spec(directory))
    model = model.to(dtype).to_empty(device=device)
    model.reset_position_tables()
    load_huggingface_weights(model, directory)
    return model


@torch.no_grad()
def load_huggingface_weights(model: Transformer, directory: Path | str) -> None:
    """Copy a directory's weights into a model of the same shape, one tensor at a time.

    Names, shapes and types are checked before anything is copied.

    Raises:
        ConfigError: Weights are missing, unexpected, of another shape, quantised, or the files
            are damaged; every reason is listed and the model is unchanged.
    """
    directory = Path(directory)
    stored, problems = _read_headers(directory)
    wanted = {huggingface_name(name): tensor for name, tensor in model.named_parameters()}
    with _open_files() as read:
        problems += _compare(wanted, stored, tied=model.head is None, read=read)
        refuse(directory, problems)
        for name, parameter in wanted.items():
            parameter.copy_(read(name, stored[name].file))


@torch.no_grad()
def save_huggingface(
    model: Transformer,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5 * 10**9,
) -> None:
    """Write a model as a Llama checkpoint that ``transformers`` opens.

    The directory appears whole or not at all: files are written and synced beside it, under a
    hidden name, and renamed into place.

    Args:
        model: What to write.
        directory: Must not exist, or be empty.
        dtype: Type to store; by default that of the parameters.
        max_shard_nbytes: Size above which weights are split over several files with an index.

    Raises:
        ConfigError: The directory holds something already.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} is not an empty directory; a checkpoint is never mixed with other files",
            hint="give a new directory, or remove this one",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        dtype = dtype or model.embedding.weight.dtype
        _write_json(partial / CONFIG_FILE, huggingface_config(model.spec, dtype))
        _write_weights(model, partial, dtype, max_shard_nbytes)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        partial.replace(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_headers(directory: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Every tensor that the directory's weight files hold, without reading the weights."""
    files, index = _weight_files(directory)
    stored: dict[str, _Stored] = {}
    problems: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
                    entry = opened.get_slice(name)
                    if name in stored:
                        problems.append(f"{name} is in {stored[name].file.name} and {file.name}")
                    stored[name] = _Stored(file, tuple(entry.get_shape()), entry.get_dtype())
        except (OSError, SafetensorError) as problem:
            problems.append(f"{file.name} cannot be read: {problem}")
    if not problems:
        problems = [
            f"{name} is not in {file}, where {INDEX_FILE} puts it"
            for name, file in index.items()
            if name not in stored or stored[name].file.name != file
        ]
    return stored, problems


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE], {}
    if not (directory / INDEX_FILE).is_file():
        raise ConfigError(
            f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            hint="give the directory of a checkpoint in safetensors format; "
            "transformers converts others with save_pretrained",
        )
    index = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ConfigError(f"{directory / INDEX_FILE} has no weight_map, or an empty one")
    names = sorted({str(name) for name in index.values()})
    refuse(
        directory / INDEX_FILE,
        [f"{name!r} is not a plain file name" for name in names if Path(name).name != name],
    )
    return [directory / name for name in names], index


def _compare(
    wanted: Mapping[str, torch.Tensor],
    stored: dict[str, _Stored],
    *,
    tied: bool,
    read: Callable[[str, Path], torch.Tensor],
) -> list[str]:
    """What keeps the stored tensors from being exactly the wanted ones."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    for name, entry in stored.items():
        if name in wanted:
            if entry.shape != tuple(wanted[name].shape):
                expected = list(wanted[name].shape)
                problems.append(f"{name} has shape {list(entry.shape)}; expected {expected}")
            if entry.dtype not in _STORED_TYPES:
                types = ", ".join(sorted(_STORED_TYPES))
                problems.append(f"{name} is stored as {entry.dtype}; expected one of {types}")
        elif name == "lm_head.weight" and tied:
            # Some writers store a tied head again; that is harmless only while it is a copy.
            embedding = stored.get("model.embed_tokens.weight")
            if embedding is not None and not torch.equal(
                read(name, entry.file), read("model.embed_tokens.weight", embedding.file)
            ):
                problems.append(f"{name} differs from the embedding that it is tied to")
        elif not name.endswith("rotary_emb.inv_freq"):  # a table that old writers stored
            problems.append(f"{name} is unexpected")
    return problems


@contextmanager
def _open_files() -> Generator[Callable[[str, Path], torch.Tensor]]:
    """A reader of single tensors that keeps each file open until the end."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(name: str, file: Path) -> torch.Tensor:
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            return opened[file].get_tensor(name)

        yield read


def _write_weights(
    model: Transformer, directory: Path, dtype: torch.dtype, max_shard_nbytes: int
) -> None:
    shards: list[list[str]] = [[]]
    filled_nbytes = total_nbytes = 0
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        nbytes = parameter.numel() * dtype.itemsize
        if shards[-1] and filled_nbytes + nbytes > max_shard_nbytes:
            shards.append([])
            filled_nbytes = 0
        shards[-1].append(name)
        filled_nbytes += nbytes
        total_nbytes += nbytes
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = WEIGHTS_FILE if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            huggingface_name(name): parameters[name].detach().to("cpu", dtype).contiguous()
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total_nbytes}, "weight_map": index}
        _write_json(directory / INDEX_FILE, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
