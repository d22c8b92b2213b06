"""Llama checkpoints: exact in both directions, against transformers, and refused with reasons."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_strategies import small_specs
from safetensors.torch import load_file, save_file

from isthmus.errors import ConfigError
from isthmus.model import (
    Transformer,
    load_huggingface,
    load_huggingface_weights,
    read_huggingface_spec,
    save_huggingface,
)
from isthmus.model import huggingface as module
from isthmus.spec.model import ModelSpec, RopeScaling

transformers = pytest.importorskip("transformers")

SMALL = ModelSpec(
    vocab_size=99,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    max_sequence_length=256,
)
STRETCHED = SMALL.replace(
    rope_theta=500_000.0,
    tied_embeddings=False,
    rope_scaling=RopeScaling(factor=8.0, original_max_sequence_length=64),
)
SPECS = {
    "tied, grouped": SMALL,
    "untied, one key per head": SMALL.replace(tied_embeddings=False, num_kv_heads=4),
    "own head_dim, multi-query": SMALL.replace(head_dim=24, num_kv_heads=1, norm_eps=1e-6),
    "Llama 3.1 rotary scaling": STRETCHED,
}
TOKENS = torch.randint(99, (2, 200), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=list(SPECS.values()), ids=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return request.param


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_huggingface(Transformer(SMALL), tmp_path / "saved")
    return tmp_path / "saved"


def llama(spec: ModelSpec) -> Any:
    """The same shape in transformers, with weights of its own."""
    scaling = spec.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_sequence_length,
        }
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_sequence_length,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        initializer_range=spec.init_std,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_weights(a: Transformer, b: Transformer) -> None:
    assert a.spec == b.spec
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_what_transformers_saved_gives_its_logits(
    spec: ModelSpec, shard_size: str, tmp_path: Path
) -> None:
    theirs = llama(spec)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "5GB")
    ours = load_huggingface(tmp_path)
    assert ours.spec == spec
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-4, atol=2e-5)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.state_dict()[module.huggingface_name(name)]), name


@pytest.mark.parametrize("max_shard_nbytes", [5 * 10**9, 60_000])
def test_transformers_opens_what_we_saved(
    spec: ModelSpec, max_shard_nbytes: int, tmp_path: Path
) -> None:
    ours = Transformer(spec, seed=5)
    save_huggingface(ours, tmp_path / "m", max_shard_nbytes=max_shard_nbytes)
    assert (tmp_path / "m/model.safetensors.index.json").exists() == (max_shard_nbytes == 60_000)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "m", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-4, atol=2e-5)
    assert_same_weights(load_huggingface(tmp_path / "m"), ours)


@settings(max_examples=30)
@given(spec=small_specs(), max_shard_nbytes=st.integers(1, 100_000), seed=st.integers(0, 99))
def test_any_model_comes_back_as_it_was(spec: ModelSpec, max_shard_nbytes: int, seed: int) -> None:
    model = Transformer(spec, seed=seed)
    with tempfile.TemporaryDirectory() as parent:
        save_huggingface(model, Path(parent) / "m", max_shard_nbytes=max_shard_nbytes)
        loaded = load_huggingface(Path(parent) / "m")
    assert_same_weights(loaded, model)
    tokens = torch.arange(8).remainder(spec.vocab_size).unsqueeze(0)
    assert torch.equal(loaded(tokens), model(tokens))


def test_transformers_is_not_imported() -> None:
    code = "import sys, isthmus.model; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rotary_tables_are_those_of_transformers(spec: ModelSpec) -> None:
    theirs = llama(spec).model.rotary_emb.inv_freq
    with torch.device("meta"):
        model = Transformer(spec)
    model = model.to_empty(device="cpu")
    model.reset_position_tables()
    position = 7
    torch.testing.assert_close(model.cos_TR[position], (theirs * position).cos())
    torch.testing.assert_close(model.sin_TR[position], (theirs * position).sin())


def test_bf16_survives_a_trip_through_fp32(tmp_path: Path) -> None:
    narrow = Transformer(SMALL).bfloat16()
    save_huggingface(narrow, tmp_path / "a")
    wide = load_huggingface(tmp_path / "a")
    assert wide.embedding.weight.dtype == torch.float32
    save_huggingface(wide, tmp_path / "b", dtype=torch.bfloat16)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == torch.bfloat16 for name in a)
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same_weights(load_huggingface(tmp_path / "b", dtype=torch.bfloat16), narrow)


def test_shards_hold_each_weight_once_and_the_index_counts_their_bytes(tmp_path: Path) -> None:
    model = Transformer(SMALL)
    save_huggingface(model, tmp_path / "m", max_shard_nbytes=60_000)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    held = {
        name: path.name
        for path in (tmp_path / "m").glob("*.safetensors")
        for name in load_file(path)
    }
    assert held == index["weight_map"]
    assert len(held) == len(list(model.parameters()))
    assert index["metadata"]["total_size"] == 4 * SMALL.num_parameters
    assert len(set(held.values())) > 2


def test_the_config_of_llama_3_1_405b_is_read(tmp_path: Path) -> None:
    """As published, in the older layout of the rotary keys."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 16384,
        "initializer_range": 0.02,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": False,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert read_huggingface_spec(tmp_path).preset_name == "llama3-405b"


def test_absent_options_take_the_values_that_transformers_gives_them(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    spec = read_huggingface_spec(tmp_path)
    defaults = transformers.LlamaConfig(**sizes)
    assert spec.norm_eps == defaults.rms_norm_eps
    assert spec.tied_embeddings == defaults.tie_word_embeddings
    assert spec.max_sequence_length == defaults.max_position_embeddings
    assert spec.num_kv_heads == defaults.num_key_value_heads
    assert spec.head_dim == defaults.head_dim
    assert spec.init_std == defaults.initializer_range
    assert spec.rope_theta == defaults.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; expected 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; expected False"),
        ({"mlp_bias": True}, "mlp_bias is True; expected False"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"sliding_window": 4096}, "sliding_window is not an option isthmus knows"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling is 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary scaling is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotary option factor is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; expected a table"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_theta": 1.0}},
            "both given",
        ),
        ({"num_key_value_heads": 3}, "num_kv_heads can be 1, 2, 4"),
        ({"hidden_size": "wide"}, "hidden_size: "),
    ],
    ids=str,
)
def test_a_config_that_means_something_else_is_refused(
    saved: Path, changes: dict[str, object], reason: str
) -> None:
    edit_config(saved, **changes)
    with pytest.raises(ConfigError) as error:
        load_huggingface(saved)
    assert reason in error.value.message
    assert str(saved / "config.json") in error.value.message
    assert error.value.hint


def test_all_reasons_are_given_at_once(saved: Path) -> None:
    edit_config(saved, attention_bias=True, hidden_act="relu", sliding_window=1)
    (saved / "config.json").write_text(
        json.dumps(
            {
                k: v
                for k, v in json.loads((saved / "config.json").read_text()).items()
                if k != "vocab_size"
            }
        )
    )
    with pytest.raises(ConfigError) as error:
        read_huggingface_spec(saved)
    for part in ("attention_bias", "hidden_act", "sliding_window", "vocab_size is missing"):
        assert part in error.value.message


def test_wrong_weights_are_listed_together_and_nothing_is_loaded(saved: Path) -> None:
    path = saved / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 64)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    save_file(weights, path)
    model = Transformer(SMALL, seed=9)
    with pytest.raises(ConfigError) as error:
        load_huggingface_weights(model, saved)
    for part in (
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
        "model.layers.0.mlp.up_proj.weight has shape [3, 64]; expected [96, 64]",
        "model.layers.1.mlp.up_proj.weight is stored as I8",
    ):
        assert part in error.value.message
    assert_same_weights(model, Transformer(SMALL, seed=9))


def test_a_long_list_of_reasons_is_cut(saved: Path) -> None:
    deep = Transformer(SMALL.replace(num_layers=9))
    with pytest.raises(ConfigError, match=r"\.\.\. and 51 more(\n|$)"):
        load_huggingface_weights(deep, saved)


def test_a_stored_copy_of_a_tied_head_must_be_a_copy(saved: Path) -> None:
    path = saved / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    assert_same_weights(load_huggingface(saved), Transformer(SMALL))
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        load_huggingface(saved)


def test_frequencies_that_old_writers_stored_are_not_needed(saved: Path) -> None:
    path = saved / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(load_file(path) | frequencies, path)
    assert_same_weights(load_huggingface(saved), Transformer(SMALL))


def test_damaged_or_missing_files_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_huggingface(saved)
    path.unlink()
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        load_huggingface(saved)
    (saved / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected an object"):
        load_huggingface(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_huggingface(saved)
    with pytest.raises(ConfigError, match="cannot be read") as error:
        load_huggingface(saved / "nowhere")
    assert error.value.hint


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    save_huggingface(Transformer(SMALL), directory, max_shard_nbytes=60_000)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    moved = next(name for name, file in index["weight_map"].items() if file == first)

    def with_map(weight_map: object) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))

    with_map(index["weight_map"] | {moved: second})
    with pytest.raises(ConfigError, match=f"{moved} is not in {second}"):
        load_huggingface(directory)
    with_map(index["weight_map"] | {moved: "../elsewhere.safetensors"})
    with pytest.raises(ConfigError, match="not a plain file name"):
        load_huggingface(directory)
    with_map({})
    with pytest.raises(ConfigError, match="no weight_map"):
        load_huggingface(directory)
    with_map(index["weight_map"])
    (directory / first).unlink()
    with pytest.raises(ConfigError, match=f"{first} cannot be read"):
        load_huggingface(directory)


def test_saving_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def fail_on_second(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, **options)

    monkeypatch.setattr(module, "save_file", fail_on_second)
    with pytest.raises(OSError, match="No space"):
        save_huggingface(Transformer(SMALL), tmp_path / "m", max_shard_nbytes=60_000)
    assert written
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ConfigError, match="not an empty directory"):
        save_huggingface(Transformer(SMALL, seed=1), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_huggingface(Transformer(SMALL), tmp_path / "empty")
    save_huggingface(Transformer(SMALL), tmp_path / "a/b/c")
    assert_same_weights(load_huggingface(tmp_path / "empty"), load_huggingface(tmp_path / "a/b/c"))
