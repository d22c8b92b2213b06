"""What is particular to each codec."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.codec import mix_seed
from isthmus.codec.bf16 import BFloat16
from isthmus.codec.int8 import Int8
from isthmus.codec.none import Uncompressed


def test_reading_specs_does_not_import_torch() -> None:
    code = (
        "import sys, isthmus.codec, isthmus.sync;"
        "from isthmus.spec.base import kinds_of;"
        "from isthmus.spec.codec import CodecSpec, TensorInfo;"
        "from isthmus.spec.sync import SyncSpec;"
        "tensors = [TensorInfo('w', (1000, 1000))];"
        "[spec().traffic(tensors, 4) for spec in kinds_of(CodecSpec).values()];"
        "[spec().traffic(tensors, 4) for spec in kinds_of(SyncSpec).values()];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_none_keeps_every_bit() -> None:
    codec = Uncompressed().build()
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    decoded = codec.decode(codec.encode(bits.view(torch.float32)))
    assert torch.equal(decoded.view(torch.int32), bits)


def test_bf16_is_torchs_cast_also_where_it_overflows() -> None:
    codec = BFloat16().build()
    largest = torch.finfo(torch.float32).max
    tensor = torch.cat([torch.randn(1000), torch.tensor([largest, -largest, 1e-40, -0.0])])
    decoded = codec.decode(codec.encode(tensor))
    assert torch.equal(decoded, tensor.bfloat16().float())
    assert decoded[1000].isinf()


@given(
    scale=st.floats(1e-44, 1e36),
    block=st.integers(64, 300),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    seed=st.integers(0, 2**32),
)
def test_int8_errs_by_its_scale_at_most(scale: float, block: int, rounding: str, seed: int) -> None:
    """Also where the scale is subnormal, and in the short last block."""
    spec = Int8.model_validate({"block": block, "rounding": rounding})
    codec = spec.build()
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(1000, generator=generator, dtype=torch.float64) * scale).float()
    error = (codec.decode(codec.encode(tensor, seed=seed)).double() - tensor.double()).abs()
    for values, errors in zip(tensor.split(block), error.split(block), strict=True):
        step = max(values.abs().max().item() / 127 * (1 + 1e-6), 2.0**-149)
        step = max(step, 2.0**-149 * round(step * 2.0**149 + 0.5))  # the next number of fp32
        allowed = step / 2 if rounding == "nearest" else step
        assert errors.max().item() <= allowed * (1 + 1e-5)


def test_int8_keeps_zeros_and_the_largest() -> None:
    codec = Int8(block=64).build()
    tensor = torch.zeros(200)
    tensor[70] = -3.7
    decoded = codec.decode(codec.encode(tensor))
    assert torch.equal(decoded == 0, tensor == 0)
    torch.testing.assert_close(decoded, tensor, rtol=3e-7, atol=0)


def test_int8_spoils_only_the_block_that_was_not_finite() -> None:
    codec = Int8(block=64).build()
    tensor = torch.randn(256)
    tensor[70] = torch.inf
    decoded = codec.decode(codec.encode(tensor))
    assert decoded[64:128].isnan().all()
    assert decoded[:64].isfinite().all()
    assert decoded[128:].isfinite().all()


def test_int8_does_the_same_over_tiles_as_block_by_block() -> None:
    codec = Int8(block=500).build()
    tensor = torch.randn(300_001)
    whole = codec.decode(codec.encode(tensor))
    pieces = [codec.decode(codec.encode(piece)) for piece in tensor.split(500)]
    assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("fields", [{"block": 32}, {"block": 4096}, {"rounding": "up"}, {"b": 1}])
def test_int8_refuses_other_settings(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Int8.model_validate(fields)


def test_seeds_differ_in_every_part() -> None:
    seeds = {mix_seed(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
