"""Small models of every shape that the spec allows, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from isthmus.spec.model import ModelSpec, RopeScaling


@st.composite
def small_specs(draw: st.DrawFn) -> ModelSpec:
    """Any combination of widths, heads, grouping, tying and rotary scaling, at most 3 layers."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    scaling = RopeScaling(
        factor=draw(st.floats(1, 32)), original_max_sequence_length=draw(st.integers(1, 64))
    )
    return ModelSpec(
        vocab_size=draw(st.integers(1, 40)),
        hidden_size=num_heads * draw(st.integers(1, 6)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 50)),
        max_sequence_length=draw(st.integers(8, 64)),
        rope_theta=draw(st.floats(10, 1e6)),
        rope_scaling=draw(st.sampled_from([None, scaling])),
        norm_eps=draw(st.floats(1e-7, 1e-3)),
        tied_embeddings=draw(st.booleans()),
        init_std=draw(st.floats(0.01, 0.1)),
    )
