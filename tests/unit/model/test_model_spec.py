"""ModelSpec: presets, validation, and arithmetic that needs no module to check."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.errors import ConfigError
from isthmus.spec.model import PRESETS, ModelSpec

PUBLISHED_COUNTS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED_COUNTS.items())
def test_llama_presets_have_the_published_parameter_counts(name: str, count: int) -> None:
    assert ModelSpec.preset(name).num_parameters == count


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt-1m", 1), ("gpt-3m", 3), ("gpt-10m", 10), ("gpt2-124m", 124)]
)
def test_presets_have_about_the_parameters_in_their_name(name: str, millions: int) -> None:
    assert ModelSpec.preset(name).num_parameters / 1e6 == pytest.approx(millions, rel=0.13)


def test_gpt2_preset_differs_from_gpt2_by_positions_biases_and_norm_offsets() -> None:
    width, layers, context, gpt2 = 768, 12, 1024, 124_439_808
    positions = context * width
    biases = layers * (3 * width + width + 4 * width + width)
    norm_offsets = (2 * layers + 1) * width
    count = ModelSpec.preset("gpt2-124m").num_parameters
    assert count == gpt2 - positions - biases - norm_offsets
    documented = Path(inspect.getsourcefile(ModelSpec) or "").read_text(encoding="utf-8")
    assert f"{count:,} parameters" in documented


def test_the_default_model_is_the_first_preset() -> None:
    assert ModelSpec() == ModelSpec.preset("gpt-1m")
    assert ModelSpec().preset_name == "gpt-1m"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_being_written_out_and_read_back(name: str) -> None:
    spec = ModelSpec.preset(name)
    assert spec.preset_name == name
    assert ModelSpec.model_validate(spec.model_dump()) == spec
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_toml_takes_a_bare_name_or_a_preset_with_changes() -> None:
    bare = tomllib.loads('model = "gpt-3m"')["model"]
    assert ModelSpec.model_validate(bare) == ModelSpec.preset("gpt-3m")
    table = tomllib.loads('[model]\npreset = "gpt-3m"\nnum_layers = 2')["model"]
    changed = ModelSpec.model_validate(table)
    assert changed == ModelSpec.preset("gpt-3m").replace(num_layers=2)
    assert changed.preset_name is None


def test_head_dim_follows_a_changed_width_unless_it_was_given() -> None:
    assert ModelSpec.preset("gpt-3m").replace(hidden_size=512).head_dim == 64
    assert ModelSpec(head_dim=16).replace(hidden_size=256).head_dim == 16


def test_an_unknown_preset_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpt-10m'") as error:
        ModelSpec.preset("gpt10m")
    assert all(name in error.value.hint for name in PRESETS)
    with pytest.raises(ValidationError, match=r"did you mean 'llama3-8b'.*llama3-405b"):
        ModelSpec.model_validate({"preset": "llama-8b"})
    with pytest.raises(ValidationError, match="7 is not a preset"):
        ModelSpec.model_validate({"preset": 7})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 100, "num_heads": 3}, r"100\) is not a multiple of num_heads \(3\)"),
        ({"hidden_size": 126, "num_heads": 18}, "head_dim is 7.*even"),
        ({"head_dim": 33}, "head_dim is 33.*even"),
        ({"head_dim": -2}, "head_dim is -2"),
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads can be 1, 2, 4$"),
        ({"num_kv_heads": 3, "num_heads": 2}, r"num_kv_heads can be 1, 2$"),
        ({"num_heads": 1}, r"num_kv_heads can be 1$"),
        ({"vocab_size": 0}, "greater than 0"),
        ({"rope_scaling": {"high_frequency_factor": 0.5}}, "must be greater than"),
        ({"hidden_sise": 128}, "Extra inputs"),
    ],
)
def test_impossible_shapes_are_refused_with_what_to_change(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError) as error:
        ModelSpec.model_validate(fields)
    # pydantic adds that the default of head_dim could not be derived from invalid sizes.
    (only,) = (e for e in error.value.errors() if e["type"] != "default_factory_not_called")
    assert re.search(message, only["msg"])


def test_every_field_has_a_help_text() -> None:
    assert [name for name, field in ModelSpec.model_fields.items() if not field.description] == []


@given(length=st.integers(1, 10_000), name=st.sampled_from(sorted(PRESETS)))
def test_causal_flops_count_each_visible_pair_once(length: int, name: str) -> None:
    spec = ModelSpec.preset(name)
    causal = spec.flops_per_token(length, training=False)
    full = spec.flops_per_token(length, training=False, convention="full")
    per_pair = 4 * spec.query_size * spec.num_layers
    visible = length * (length + 1) // 2
    assert length * (full - causal) == per_pair * (length * length - visible)
    assert length * causal == length * 2 * spec.num_matmul_parameters + per_pair * visible


def test_training_flops_of_a_large_model_are_six_per_parameter() -> None:
    spec = ModelSpec.preset("llama3-405b")
    flops = spec.flops_per_token(1)
    assert flops == pytest.approx(6 * spec.num_parameters, rel=0.01)


def test_reading_a_spec_does_not_import_torch() -> None:
    code = (
        "import sys; from isthmus.spec.model import ModelSpec;"
        "ModelSpec.preset('llama3-8b').flops_per_token(8192); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
