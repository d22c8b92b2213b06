"""A decoder-only transformer with Llama's architecture, written to be read and to be fast on a CPU.

Below it stands :class:`isthmus.spec.model.ModelSpec`, which says its shape and counts its cost;
beside it ``huggingface.py``, which maps its parameters to Llama checkpoints. It holds no state
but parameters and position tables, and knows nothing of ranks: parallelism is applied to it from
outside, by the names of its submodules.

Shapes are written behind an underscore::

    B  sequences in a micro-batch       D  hidden_size
    T  tokens in a sequence             F  intermediate_size
    V  vocab_size                       H  num_heads
    E  head_dim                         K  num_kv_heads
    R  head_dim / 2, rotary pairs

Choices, with what was measured on one CPU thread for a model of a million parameters:

- Query, key and value (and gate and up) are separate matrices. One fused matrix was not faster,
  and separate ones are what checkpoints hold and what tensor parallelism shards.
- Attention is torch's ``scaled_dot_product_attention``: a fused kernel on every device.
- The rotary embedding turns pairs that lie half a head apart, as Hugging Face does; the original
  Llama code turns neighbours, which permutes the rows of the query and key matrices.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.spec.model import ModelSpec, RopeScaling


class Transformer(nn.Module):
    """The model of a :class:`ModelSpec`.

    Built on the current default device, so that ``with torch.device("meta"):`` makes it without
    memory; after ``to_empty`` call :meth:`init_weights`, or load weights and call
    :meth:`reset_position_tables`.

    Args:
        spec: The shape.
        seed: Seed of the initial weights; see :meth:`init_weights`.
    """

    def __init__(self, spec: ModelSpec, *, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        embedding = nn.Embedding(spec.vocab_size, spec.hidden_size, device="meta")
        self.embedding = embedding.to_empty(device=torch.get_default_device())
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.head = None if spec.tied_embeddings else _linear(spec.hidden_size, spec.vocab_size)
        table_size = (spec.max_sequence_length, spec.head_dim // 2)
        self.register_buffer("cos_TR", torch.empty(table_size), persistent=False)
        self.register_buffer("sin_TR", torch.empty(table_size), persistent=False)
        self.init_weights(seed)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token after each token.

        Args:
            tokens_BT: Integers in ``[0, vocab_size)``.

        Returns:
            ``logits_BTV`` in the type of the head's product.

        Raises:
            ConfigError: T is greater than the spec's ``max_sequence_length``.
        """
        length = tokens_BT.shape[1]
        if length > self.spec.max_sequence_length:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than the model's position tables",
                hint=f"set model.max_sequence_length to {length} or more "
                f"(it is {self.spec.max_sequence_length})",
            )
        x_BTD = self.embedding(tokens_BT)
        cos_TR, sin_TR = self.cos_TR[:length], self.sin_TR[:length]
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TR, sin_TR)
        x_BTD = self.norm(x_BTD)
        return F.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw the weights of a seed and fill the position tables.

        Each parameter is drawn from a generator of its own, seeded by ``seed`` and its name, on
        the CPU. So the same seed gives the same weights on every device and on a rank that holds
        only some of the layers, and neither reads nor moves torch's global generator. Norms are
        1; matrices are normal with ``init_std``, divided by sqrt(2 num_layers) for the two that
        write into the residual stream (GPT-2, Radford et al. 2019, section 2.3).
        """
        self.reset_position_tables()
        into_residual = self.spec.init_std / math.sqrt(2 * self.spec.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif not parameter.is_meta:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                std = into_residual if residual else self.spec.init_std
                parameter.copy_(_normal(parameter.shape, std, _stream_seed(seed, name)))

    @torch.no_grad()
    def reset_position_tables(self) -> None:
        """Fill the rotary tables, which checkpoints don't hold and ``to_empty`` spoils."""
        if self.cos_TR.is_meta:
            return
        for table, value in zip((self.cos_TR, self.sin_TR), rotary_tables(self.spec), strict=True):
            table.copy_(value)


class Layer(nn.Module):
    """One transformer layer: attention and SwiGLU, each on a normed copy of the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.mlp = SwiGLU(spec)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """The residual stream after this layer, ``[B, T, D]``."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TR, sin_TR)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and a value head.

    Grouped-query attention is Ainslie et al. 2023 (arXiv:2305.13245); with one key head per query
    head it is multi-head attention, with a single one multi-query attention.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.grouped = spec.num_kv_heads != spec.num_heads
        self.query = _linear(spec.hidden_size, spec.query_size)
        self.key = _linear(spec.hidden_size, spec.kv_size)
        self.value = _linear(spec.hidden_size, spec.kv_size)
        self.output = _linear(spec.query_size, spec.hidden_size)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """What attention adds to the residual stream, ``[B, T, D]``."""
        q_BTHE = rotate(self._split(self.query(x_BTD)), cos_TR, sin_TR)
        k_BTKE = rotate(self._split(self.key(x_BTD)), cos_TR, sin_TR)
        v_BTKE = self._split(self.value(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        # The kernel lays its result out as it finds the query, so this transpose costs no copy.
        return self.output(y_BHTE.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor) -> Tensor:
        """Split into heads, as many as there are, so that a rank may hold some of them."""
        return x_BTD.unflatten(-1, (-1, self.head_dim))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = _linear(spec.hidden_size, spec.intermediate_size)
        self.up = _linear(spec.hidden_size, spec.intermediate_size)
        self.down = _linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the block adds to the residual stream, ``[B, T, D]``."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def token_loss(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over tokens of the negative log likelihood, in nats, in fp32.

    A sum, not a mean: ranks whose batches hold different numbers of tokens are averaged rightly
    only if sums and counts are added up first.

    Args:
        logits: ``[..., V]`` in any floating type.
        targets: ``[...]`` integers; those equal to ``ignore_index`` count for nothing.
        ignore_index: The target that is left out.

    Returns:
        A scalar; 0 if every target is ignored.
    """
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )


def rotate(x_BTHE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn each pair (x[r], x[r + head_dim/2]) by its position's angle.

    Su et al. 2021 (arXiv:2104.09864, equation 34) in the half-split layout of Hugging Face. The
    angles are rounded to the type of x only after cosine and sine were taken in fp32.
    """
    a_BTHR, b_BTHR = x_BTHE.chunk(2, dim=-1)
    cos_T1R, sin_T1R = (table.to(x_BTHE.dtype).unsqueeze(1) for table in (cos_TR, sin_TR))
    return torch.cat(
        (a_BTHR * cos_T1R - b_BTHR * sin_T1R, b_BTHR * cos_T1R + a_BTHR * sin_T1R), dim=-1
    )


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency in fp32, each ``[max_sequence_length, R]``.

    Computed on the CPU whatever the model's device, so that all devices turn by the same angles.
    """
    with torch.device("cpu"):
        exponent_R = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        position_T = torch.arange(spec.max_sequence_length, dtype=torch.float32)
    frequency_R = 1.0 / spec.rope_theta**exponent_R
    if spec.rope_scaling is not None:
        frequency_R = _stretch(frequency_R, spec.rope_scaling)
    angle_TR = torch.outer(position_T, frequency_R)
    return angle_TR.cos(), angle_TR.sin()


def _stretch(frequency_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, blend those in between."""
    turns_R = scaling.original_max_sequence_length * frequency_R / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return frequency_R * (kept_R + (1 - kept_R) / scaling.factor)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    """A projection whose weights are left to :meth:`Transformer.init_weights`."""
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    return linear.to_empty(device=torch.get_default_device())


def _stream_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _normal(shape: torch.Size, std: float, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)
