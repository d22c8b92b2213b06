"""What holds for every codec there is, whatever it does: the contract of ``isthmus.spec.codec``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec import PayloadError
from isthmus.codec.int8 import Int8
from isthmus.errors import ConfigError
from isthmus.spec.base import kinds_of
from isthmus.spec.codec import ITEMSIZE, CodecSpec, header_nbytes

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "int8": [{}, {"block": 64}, {"block": 2048, "rounding": "stochastic"}, {"block": 100}],
}
"""Settings beside the defaults; a codec that is not named here is tested with its defaults."""


def every_spec() -> Iterator[CodecSpec]:
    for kind, member in kinds_of(CodecSpec).items():
        if issubclass(member, CodecSpec):
            yield from (member.model_validate(fields) for fields in VARIANTS.get(kind, [{}]))


every_codec = pytest.mark.parametrize("spec", list(every_spec()), ids=str)
few = settings(max_examples=25)
dtypes = st.sampled_from(sorted(ITEMSIZE))
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.integers(0, 5000).map(lambda n: (n,)),
)
magnitudes = st.sampled_from([1e-6, 1.0, 3e3])
seeds = st.integers(0, 2**63 - 1)


def draw_tensor(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values with a heavy tail and some exact zeros, strided as they come."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values * torch.rand(shape, generator=generator, dtype=torch.float64).pow(4) * scale
    values[torch.rand(shape, generator=generator) < 0.1] = 0
    return values.to(getattr(torch, dtype))


def relative_square(error: Tensor, of: Tensor) -> float:
    norm = of.double().square().sum().item()
    return (
        error.double().square().sum().item() / norm if norm else error.double().abs().max().item()
    )


@every_codec
@few
@given(shape=shapes, dtype=dtypes, seed=seeds)
def test_the_payload_has_the_size_that_was_declared(
    spec: CodecSpec, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    payload = spec.build().encode(draw_tensor(shape, dtype, seed))
    declared = spec.encoded_nbytes(shape, dtype)
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    assert payload.numel() % 8 == 0
    if spec.properties.fixed_size:
        assert payload.numel() == declared
    else:
        assert payload.numel() <= declared


@every_codec
@few
@given(shape=shapes, dtype=dtypes, seed=seeds, scale=magnitudes)
def test_decoding_gives_the_shape_and_dtype_and_is_close(
    spec: CodecSpec, shape: tuple[int, ...], dtype: str, seed: int, scale: float
) -> None:
    tensor = draw_tensor(shape, dtype, seed, scale)
    codec = spec.build()
    decoded = codec.decode(codec.encode(tensor, seed=seed))
    assert decoded.dtype == tensor.dtype
    assert decoded.shape == tensor.shape
    assert decoded.isfinite().all()
    bound = spec.properties.contraction
    if bound is not None and spec.properties.deterministic and tensor.numel():
        # Decoding rounds to the tensor's own dtype; fp64 shows the codec's own error.
        wide = codec.decode(codec.encode(tensor, seed=seed), out=torch.empty(shape).double())
        assert relative_square(wide - tensor.double(), tensor) <= (1 - bound) * (1 + 1e-5) + 1e-30


@every_codec
def test_contraction_holds_on_average_over_seeds(spec: CodecSpec) -> None:
    bound = spec.properties.contraction
    if bound is None or spec.properties.deterministic:
        pytest.skip("claims none, or the same for each seed")
    codec = spec.build()
    for seed in range(5):
        # One large element in a block of small ones is the worst case of a shared scale.
        tensor = draw_tensor((4096,), "float32", seed)
        errors = [
            relative_square(codec.decode(codec.encode(tensor, seed=s)) - tensor, tensor)
            for s in range(64)
        ]
        assert sum(errors) / len(errors) <= (1 - bound) * 1.1


@every_codec
def test_unbiased_codecs_average_to_the_tensor(spec: CodecSpec) -> None:
    if not spec.properties.unbiased:
        pytest.skip("not claimed")
    codec = spec.build()
    tensor = draw_tensor((777,), "float32", 3)
    draws = torch.stack(
        [codec.decode(codec.encode(tensor, seed=seed)).double() for seed in range(1000)]
    )
    # Of each mean, 5 standard errors; and 20 times the largest error where it is rare that an
    # element is rounded up at all. The seeds are fixed, so the outcome is.
    error = (draws.mean(0) - tensor.double()).abs()
    largest = (draws - tensor.double()).abs().max()
    allowed = 5 * draws.std(0) / math.sqrt(len(draws)) + 20 * largest / len(draws)
    assert (error <= allowed).all()


@every_codec
@few
@given(shape=shapes, dtype=dtypes, seed=seeds)
def test_the_same_seed_gives_the_same_bytes(
    spec: CodecSpec, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    tensor = draw_tensor(shape, dtype, seed)
    first = spec.build().encode(tensor, seed=seed)
    dirty = torch.full_like(first, 255)
    assert torch.equal(first, spec.build().encode(tensor.clone(), seed=seed, out=dirty))
    if spec.properties.deterministic:
        assert torch.equal(first, spec.build().encode(tensor, seed=seed ^ 1))


@every_codec
def test_random_codecs_heed_the_seed(spec: CodecSpec) -> None:
    if spec.properties.deterministic:
        pytest.skip("not random")
    tensor = draw_tensor((1000,), "float32", 1)
    assert not torch.equal(spec.build().encode(tensor, seed=1), spec.build().encode(tensor, seed=2))


@every_codec
@few
@given(dtype=dtypes, seed=seeds)
def test_strides_do_not_matter(spec: CodecSpec, dtype: str, seed: int) -> None:
    codec = spec.build()
    base = draw_tensor((37, 23), dtype, seed)
    for view in (base.t(), base[::2, 1::3], base[5].expand(4, 23)):
        assert torch.equal(
            codec.encode(view, seed=seed), codec.encode(view.contiguous(), seed=seed)
        )


@every_codec
@few
@given(shape=shapes, dtype=dtypes, out_dtype=dtypes, seed=seeds)
def test_adding_is_decoding_and_adding(
    spec: CodecSpec, shape: tuple[int, ...], dtype: str, out_dtype: str, seed: int
) -> None:
    codec = spec.build()
    payload = codec.encode(draw_tensor(shape, dtype, seed), seed=seed)
    out = draw_tensor(shape, out_dtype, seed + 1)
    decoded = codec.decode(payload, out=torch.empty_like(out))
    expected = out + decoded
    codec.add_decoded(payload, out)
    size = (expected.abs().max() + decoded.abs().max()).item() if out.numel() else 0.0
    tolerance = 2 * torch.finfo(out.dtype).eps * size
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


@every_codec
@few
@given(seed=seeds)
def test_summable_payloads_add_up(spec: CodecSpec, seed: int) -> None:
    codec = spec.build()
    # Small whole numbers, so that no sum rounds.
    first, second = (draw_tensor((100,), "float32", seed + i, 100.0).round() for i in range(2))
    payload, other = codec.encode(first), codec.encode(second)
    if not spec.properties.summable:
        with pytest.raises(ConfigError, match="cannot be added"):
            codec.summands(payload)
        return
    codec.summands(payload).add_(codec.summands(other))
    both = codec.encode(first + second)
    torch.testing.assert_close(codec.decode(payload), codec.decode(both))


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_what_is_not_finite_is_treated_as_declared(
    spec: CodecSpec, value: float, dtype: str
) -> None:
    codec = spec.build()
    tensor = draw_tensor((5000,), dtype, 5)
    tensor[3] = tensor[4999] = value
    if spec.properties.nonfinite == "refused":
        with pytest.raises(ValueError, match="finite"):
            codec.encode(tensor)
        return
    decoded = codec.decode(codec.encode(tensor))
    added = torch.zeros(5000)
    codec.add_decoded(codec.encode(tensor), added)
    for result in (decoded, added):
        if spec.properties.nonfinite == "kept":
            assert torch.equal(result[[3, 4999]].isnan(), tensor[[3, 4999]].isnan())
            assert torch.equal(result.isinf(), tensor.isinf())
            assert torch.equal(result.sign().nan_to_num(), tensor.sign().nan_to_num().to(result))
        else:
            assert result[[3, 4999]].isnan().all()
            assert result.isfinite().any()


@every_codec
def test_other_bytes_are_refused(spec: CodecSpec) -> None:
    codec = spec.build()
    payload = codec.encode(draw_tensor((10, 7), "float32", 1))
    for nbytes in range(0, payload.numel(), 8):
        with pytest.raises(PayloadError):
            codec.decode(payload[:nbytes])
    for damaged_byte in range(header_nbytes(2)):
        damaged = payload.clone()
        damaged[damaged_byte] ^= 0x81
        with pytest.raises(PayloadError):
            codec.decode(damaged)
    with pytest.raises(PayloadError, match=f"has {2 * payload.numel()} bytes"):
        codec.decode(torch.cat([payload, payload]))
    with pytest.raises(PayloadError, match="not a payload"):
        codec.decode(torch.zeros_like(payload))
    with pytest.raises(PayloadError, match="uint8"):
        codec.decode(payload.view(torch.int64))
    with pytest.raises(PayloadError, match=r"shape \(10, 7\)"):
        codec.decode(payload, out=torch.empty(70))


@every_codec
def test_another_codec_is_refused(spec: CodecSpec) -> None:
    others = [other for other in every_spec() if other != spec]
    payload = spec.build().encode(torch.ones(100))
    for other in [*others, Int8(block=65)]:
        with pytest.raises(PayloadError, match="not written by"):
            other.build().decode(payload)


@every_codec
def test_wrong_arguments_are_refused(spec: CodecSpec) -> None:
    codec = spec.build()
    with pytest.raises(ConfigError, match="int64"):
        codec.encode(torch.arange(3))
    with pytest.raises(ConfigError, match="needs a contiguous uint8 buffer"):
        codec.encode(torch.ones(100), out=torch.empty(15, dtype=torch.uint8))
