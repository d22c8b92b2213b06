"""The transformer, and the arithmetic of its spec held to what torch counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_strategies import small_specs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from isthmus.errors import ConfigError
from isthmus.model import Transformer, token_loss
from isthmus.model.transformer import Layer, rotary_tables, rotate
from isthmus.spec.model import PRESETS, ModelSpec

SHAPES = [
    ModelSpec(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96),
    ModelSpec(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2, tied_embeddings=False),
    ModelSpec(num_layers=3, hidden_size=96, num_heads=6, num_kv_heads=1, head_dim=24),
]
SHAPE_NAMES = ["grouped", "untied", "multi-query"]
SMALL = SHAPES[0]
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def layer_of(model: Transformer, number: int) -> Layer:
    layer = model.layers[number]
    assert isinstance(layer, Layer)
    return layer


def random_tokens(spec: ModelSpec, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (batch, length), generator=generator)


@pytest.mark.parametrize("spec", list(map(ModelSpec.preset, PRESETS)), ids=list(PRESETS))
def test_parameter_counts_are_those_of_the_module(spec: ModelSpec) -> None:
    assert_counts_match(spec)


@settings(max_examples=50)
@given(spec=small_specs())
def test_parameter_counts_hold_for_any_shape(spec: ModelSpec) -> None:
    assert_counts_match(spec)


def assert_counts_match(spec: ModelSpec) -> None:
    with torch.device("meta"):
        model = Transformer(spec)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters
    assert all(p.is_meta for p in model.parameters())
    layer = layer_of(model, 0)
    assert sum(p.numel() for p in layer.parameters()) == spec.num_layer_parameters
    assert sum(p.numel() for p in layer.attention.parameters()) == spec.num_attention_parameters
    assert sum(p.numel() for p in layer.mlp.parameters()) == spec.num_mlp_parameters
    assert (
        spec.num_parameters - spec.num_embedding_parameters
        == spec.num_parameters_without_embeddings
    )


@pytest.mark.parametrize("spec", [ModelSpec(), *SHAPES], ids=["default", *SHAPE_NAMES])
@pytest.mark.parametrize("training", [False, True])
def test_flops_are_those_that_torch_counts(spec: ModelSpec, training: bool) -> None:
    """torch counts masked pairs too (our convention "full"); the math kernel repeats nothing."""
    batch, length = 2, 24
    model, tokens = Transformer(spec), random_tokens(spec, batch, length)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(tokens)
        if training:
            token_loss(logits, tokens).backward()
    predicted = spec.flops_per_token(length, training=training, convention="full")
    assert counter.get_total_flops() == batch * length * predicted


@pytest.mark.parametrize("spec", SHAPES, ids=SHAPE_NAMES)
def test_flash_attention_does_one_product_more_than_the_model_needs(spec: ModelSpec) -> None:
    """Backward computes the scores again: half of the forward attention term, as documented."""
    batch, length = 2, 24
    model, tokens = Transformer(spec), random_tokens(spec, batch, length)
    formulas = {
        CPU_FLASH: lambda q, k, v, *_, **__: sdpa_flop(q, k, v),
        CPU_FLASH_BACKWARD: lambda g, q, k, v, *_, **__: sdpa_backward_flop(g, q, k, v),
    }
    with (
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        token_loss(model(tokens), tokens).backward()
    attention = 12 * length * spec.query_size * spec.num_layers
    predicted = spec.flops_per_token(length, convention="full") + attention // 6
    assert counter.get_total_flops() == batch * length * predicted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [ModelSpec(), *SHAPES], ids=["default", *SHAPE_NAMES])
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 40)])
def test_activation_bytes_are_those_that_autograd_keeps(
    spec: ModelSpec, dtype: torch.dtype, batch: int, length: int
) -> None:
    assert_activation_bytes_match(spec, dtype, batch, length)


@settings(max_examples=20)
@given(spec=small_specs(), batch=st.integers(1, 3), length=st.integers(1, 8))
def test_activation_bytes_hold_for_any_shape(spec: ModelSpec, batch: int, length: int) -> None:
    assert_activation_bytes_match(spec, torch.float32, batch, length)


def assert_activation_bytes_match(
    spec: ModelSpec, dtype: torch.dtype, batch: int, length: int
) -> None:
    model = Transformer(spec).to(dtype)
    not_counted = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = torch.randn(batch, length, spec.hidden_size, dtype=dtype, requires_grad=True)
    tables = model.cos_TR[:length], model.sin_TR[:length]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.layers[0](x, *tables)
    nbytes = sum(
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in not_counted
    )
    assert y.shape == x.shape
    assert nbytes == spec.activation_nbytes_per_layer(
        micro_batch_size=batch, sequence_length=length, element_nbytes=dtype.itemsize
    )


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = Transformer(SMALL, seed=7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    with torch.device("meta"):
        late = Transformer(SMALL)
    late = late.to_empty(device="cpu")
    late.init_weights(7)
    other = Transformer(SMALL, seed=8)
    assert torch.equal(torch.get_rng_state(), state)
    tokens = random_tokens(SMALL, 2, 16)
    assert torch.equal(first(tokens), late(tokens))
    for (name, a), b, c in zip(
        first.named_parameters(), late.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)


def test_a_layer_has_the_same_weights_whatever_the_depth() -> None:
    """A rank that holds only some layers draws the same weights; depth scales two of them."""
    shallow, deep = (Transformer(SMALL.replace(num_layers=n), seed=3) for n in (2, 8))
    a, b = layer_of(shallow, 1), layer_of(deep, 1)
    assert torch.equal(a.attention.query.weight, b.attention.query.weight)
    torch.testing.assert_close(a.mlp.down.weight, 2 * b.mlp.down.weight)


def test_initial_weights_have_the_declared_spread_and_loss_starts_at_uniform() -> None:
    spec = ModelSpec()
    model = Transformer(spec)
    assert layer_of(model, 0).mlp.up.weight.std().item() == pytest.approx(spec.init_std, rel=0.02)
    into_residual = spec.init_std / math.sqrt(2 * spec.num_layers)
    for projection in (layer_of(model, 2).attention.output, layer_of(model, 3).mlp.down):
        assert projection.weight.std().item() == pytest.approx(into_residual, rel=0.02)
    tokens, targets = random_tokens(spec, 4, 64, seed=1), random_tokens(spec, 4, 64, seed=2)
    loss = token_loss(model(tokens), targets).item() / targets.numel()
    assert loss == pytest.approx(math.log(spec.vocab_size), abs=0.3)


@settings(max_examples=10)
@given(position=st.integers(0, 22), spec=st.sampled_from(SHAPES))
def test_no_logit_depends_on_a_later_token(position: int, spec: ModelSpec) -> None:
    model, tokens = Transformer(spec), random_tokens(spec, 1, 24)
    changed = tokens.clone()
    changed[:, position + 1 :] = (changed[:, position + 1 :] + 1) % spec.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, : position + 1], after[:, : position + 1])
    assert not torch.allclose(before[:, position + 1 :], after[:, position + 1 :])


@settings(max_examples=20)
@given(shift=st.integers(0, 900))
def test_rotary_scores_depend_on_distance_alone(shift: int) -> None:
    spec = ModelSpec(max_sequence_length=1024)
    cos, sin = rotary_tables(spec)
    q, k = torch.randn(2, 1, 5, 1, spec.head_dim, generator=torch.Generator().manual_seed(0))

    def scores(start: int) -> Tensor:
        rows = slice(start, start + 5)
        turned_q, turned_k = (rotate(x, cos[rows], sin[rows])[0, :, 0] for x in (q, k))
        return turned_q @ turned_k.T

    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rotate(q, cos[:5], sin[:5]).norm(), q.norm())


def test_grouped_heads_equal_key_heads_that_are_written_out() -> None:
    grouped = Transformer(SMALL)
    full = Transformer(SMALL.replace(num_kv_heads=SMALL.num_heads))
    state = grouped.state_dict()
    group, width = SMALL.num_heads // SMALL.num_kv_heads, SMALL.head_dim
    for name, weight in state.items():
        if "attention.key" in name or "attention.value" in name:
            heads = weight.unflatten(0, (-1, width))
            state[name] = heads.repeat_interleave(group, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = random_tokens(SMALL, 2, 16)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_position_tables_are_not_checkpointed() -> None:
    assert (
        set(Transformer(SMALL).state_dict()) == dict(Transformer(SMALL).named_parameters()).keys()
    )


def test_a_tied_head_is_one_parameter_with_both_gradients() -> None:
    model, tokens = Transformer(SMALL), torch.zeros(1, 4, dtype=torch.long)
    token_loss(model(tokens), tokens).backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert (gradient != 0).any(dim=1).all(), "tokens that were not read are reached by the head"


def test_a_sequence_beyond_the_tables_is_refused() -> None:
    model = Transformer(SMALL.replace(max_sequence_length=8))
    model(random_tokens(SMALL, 1, 8))
    with pytest.raises(ConfigError, match="9 tokens") as error:
        model(random_tokens(SMALL, 1, 9))
    assert "max_sequence_length" in error.value.hint


def test_loss_is_the_sum_of_negative_log_likelihoods_of_the_targets_that_count() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(10).view(2, 5)
    by_hand = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(token_loss(logits, targets).double(), by_hand.sum())
    ignored = targets.clone()
    ignored[0] = -100
    torch.testing.assert_close(token_loss(logits, ignored).double(), by_hand[1].sum())
    assert token_loss(logits, torch.full_like(targets, -100)).item() == 0.0
    seven = token_loss(logits, targets, ignore_index=7).double()
    torch.testing.assert_close(seven, by_hand.sum() - by_hand[1, 2])


def test_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = torch.randn(4, 256, 50).bfloat16()
    targets = torch.zeros(4, 256, dtype=torch.long)
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, token_loss(logits.float(), targets))


@pytest.mark.parametrize("spec", SHAPES, ids=SHAPE_NAMES)
def test_bf16_autocast_stays_near_fp32(spec: ModelSpec) -> None:
    model, tokens = Transformer(spec), random_tokens(spec, 2, 32)
    exact = token_loss(model(tokens), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = token_loss(logits, tokens)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_graph_has_no_breaks() -> None:
    """torch.compile can take the whole model as one graph (traced only: no C++ compiler here)."""
    model, tokens = Transformer(SMALL), random_tokens(SMALL, 2, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_a_short_memory_task_is_learned() -> None:
    """The token two places back: needs attention by position, which rotation gives."""
    spec = ModelSpec(
        vocab_size=8,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        init_std=0.1,
    )
    model = Transformer(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(math.inf)
    for step in range(100):
        tokens = random_tokens(spec, 8, 24, seed=step)
        targets = tokens.roll(2, dims=1)
        targets[:, :2] = -100
        optimizer.zero_grad()
        loss = token_loss(model(tokens), targets) / (targets != -100).sum()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2, "a guess costs ln 8 = 2.08 nats"
