"""config.json of a Llama checkpoint, read into a :class:`ModelSpec` and written from one.

The list of keys is closed, as every specification here is: a key that would change what the model
computes, or that nobody here has heard of, is refused rather than skipped. Its neighbour
``huggingface.py`` moves the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError

from isthmus.errors import ConfigError
from isthmus.spec.model import ModelSpec

CONFIG_FILE: Final = "config.json"

_SIZES: Final[Mapping[str, str]] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}
"""Keys of config.json that must be there, and the fields that they fill."""

_OPTIONS: Final[Mapping[str, tuple[str, Any]]] = {
    "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embeddings": ("max_sequence_length", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tied_embeddings", False),
    "initializer_range": ("init_std", 0.02),
}
"""Keys that may be absent, the fields that they fill, and LlamaConfig's defaults for them."""

_REQUIRED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
}
"""Keys whose other values would change what the model computes; absent means the first."""

_ROPE_KEYS: Final = {"rope_theta", "rope_scaling", "rope_parameters"}
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("_name_or_path", "bos_token_id", "chunk_size_feed_forward", "dtype"),
        *("eos_token_id", "id2label", "is_encoder_decoder", "label2id", "output_attentions"),
        *("output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type"),
        *("return_dict", "torch_dtype", "transformers_version", "use_cache"),
    )
)
"""Keys that don't change the logits of a causal language model."""

_SCALING_KEYS: Final[Mapping[str, str]] = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_max_sequence_length",
}
_MOST_PROBLEMS_SHOWN: Final = 12


def read_huggingface_spec(directory: Path | str) -> ModelSpec:
    """The model that a directory's config.json describes.

    Raises:
        ConfigError: config.json is missing or not JSON, or describes something that
            :class:`Transformer` does not compute; every reason is listed.
    """
    path = Path(directory) / CONFIG_FILE
    config = read_json(path)
    problems = [
        f"{key} is {config.get(key)!r}; expected {allowed[0]!r}"
        for key, allowed in _REQUIRED_VALUES.items()
        if config.get(key, allowed[0]) not in allowed
    ]
    if "model_type" not in config:
        problems.append("model_type is missing; expected 'llama'")
    problems += [f"{key} is missing" for key in _SIZES if key not in config]
    known = _SIZES.keys() | _OPTIONS.keys() | _REQUIRED_VALUES.keys() | _ROPE_KEYS | _WITHOUT_EFFECT
    problems += [f"{key} is not an option isthmus knows" for key in sorted(config.keys() - known)]
    rope, rope_problems = _read_rope(config)
    refuse(path, problems + rope_problems)
    fields = {field: config[key] for key, field in _SIZES.items()} | rope
    fields |= {field: config.get(key, default) for key, (field, default) in _OPTIONS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    if fields["head_dim"] is None:
        del fields["head_dim"]
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as problem:
        where = [(".".join(map(str, error["loc"])), error["msg"]) for error in problem.errors()]
        refuse(path, [f"{key}: {text}" if key else text for key, text in where])
        raise  # not reached: a ValidationError has at least one error


def _read_rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The spec's rotary fields: transformers 5 writes rope_parameters, older ones two keys."""
    if config.get("rope_scaling") and config.get("rope_parameters"):
        return {}, ["rope_scaling and rope_parameters are both given"]
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return {}, [f"rope_scaling is {given!r}; expected a table"]
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0)} | given
    fields: dict[str, Any] = {"rope_theta": rope.pop("rope_theta")}
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope} or {"default"}
    if kinds == {"default"}:
        return fields, [f"rotary option {key} is not known" for key in sorted(rope)]
    if kinds != {"llama3"}:
        names = " and ".join(sorted(map(str, kinds)))
        return fields, [f"rotary scaling is {names!r}; expected 'default' or 'llama3'"]
    problems = [f"rotary option {key} is missing" for key in _SCALING_KEYS if key not in rope]
    problems += [
        f"rotary option {key} is not known" for key in sorted(rope.keys() - _SCALING_KEYS.keys())
    ]
    fields["rope_scaling"] = {
        field: rope[key] for key, field in _SCALING_KEYS.items() if key in rope
    }
    return fields, problems


def huggingface_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Content of config.json, with the rotary keys that every version of transformers reads."""
    scaling = spec.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(spec, field) for key, field in _SIZES.items()},
        **{key: getattr(spec, field) for key, (field, _) in _OPTIONS.items()},
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3"}
        | {key: getattr(scaling, field) for key, field in _SCALING_KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: The file is missing, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem}",
            hint="give the directory of a Llama checkpoint: config.json beside safetensors files",
        ) from problem
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists all problems, if there are any."""
    if not problems:
        return
    lines = list(problems[:_MOST_PROBLEMS_SHOWN])
    if len(problems) > len(lines):
        lines.append(f"... and {len(problems) - len(lines)} more")
    raise ConfigError(
        "\n  ".join([f"{path} is not a checkpoint that this model can take:", *lines]),
        hint="isthmus opens unquantised Llama checkpoints (model_type 'llama', no biases) whose "
        "shapes are those of config.json",
    )
