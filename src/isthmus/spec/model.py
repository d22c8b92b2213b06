"""The shape of a decoder-only transformer, and everything that follows from it by arithmetic.

:class:`ModelSpec` is read by the module that trains (``isthmus.model``), by the planner and by
reports. It imports no torch: parameter counts, FLOPs and activation bytes are formulas here, and
tests hold each of them to the real module.

The architecture is that of Llama: RMSNorm before each block, rotary position embedding,
grouped-query attention, SwiGLU, no biases. One well-understood architecture is enough for a
library about communication, and it opens the Llama checkpoints of Hugging Face as they are.
Other architectures (mixture of experts, encoders) are not described here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from isthmus.errors import ConfigError
from isthmus.spec.base import Spec

Count = Annotated[int, Field(gt=0)]
AttentionConvention = Literal["causal", "full"]
"""How attention FLOPs are counted: ``causal`` counts the query-key pairs that a causal model
needs, T(T+1)/2 a sequence; ``full`` counts all T² as if nothing were masked, which is what PaLM,
Megatron-LM and torch's ``FlopCounterMode`` report."""

_LLAMA3_8B: Final[Mapping[str, Any]] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 14_336,
    "max_sequence_length": 8192,
    "rope_theta": 500_000.0,
    "tied_embeddings": False,
    "init_std": 0.02,
}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gpt-1m": {},
    "gpt-3m": {"hidden_size": 256, "num_heads": 8, "intermediate_size": 768},
    "gpt-10m": {
        "hidden_size": 384,
        "num_layers": 6,
        "num_heads": 6,
        "intermediate_size": 1088,
    },
    "gpt2-124m": {
        "vocab_size": 50_257,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 12,
        "intermediate_size": 2048,
        "max_sequence_length": 1024,
        "init_std": 0.02,
    },
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": {
        **_LLAMA3_8B,
        "hidden_size": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "intermediate_size": 28_672,
    },
    "llama3-405b": {
        **_LLAMA3_8B,
        "hidden_size": 16_384,
        "num_layers": 126,
        "num_heads": 128,
        "intermediate_size": 53_248,
        "max_sequence_length": 131_072,
        "rope_scaling": {"factor": 8.0},
    },
}
"""Named models, each as what differs from the defaults of :class:`ModelSpec`.

- ``gpt-1m``, ``gpt-3m``, ``gpt-10m`` read bytes (256 of them) and are shaped for CPUs: hidden
  sizes are multiples of 64, and layers are few and wide, since a small step is bound by the number
  of kernels it starts. In single runs of equal CPU time on Python source, gpt-1m with four layers
  of width 128 reached a lower loss than with six of the same width or two of width 192, and with
  four heads than with two.
- ``gpt2-124m`` has the width, depth, heads, vocabulary and context of GPT-2 small in this
  architecture. It differs from GPT-2 in four ways: rotary instead of learned positions (786,432
  parameters fewer), SwiGLU with 2048 columns instead of GELU with 3072 (the same number of
  weights), RMSNorm instead of LayerNorm, and no biases. That leaves 123,551,232 parameters;
  GPT-2 small has 124,439,808.
- ``llama3-8b`` and ``llama3-70b`` are Llama 3 (context 8192), ``llama3-405b`` is Llama 3.1
  (context 131072 through scaled rotary frequencies); their parameter counts are exact.
"""


class RopeScaling(Spec):
    """Llama 3.1's scaling of rotary frequencies, which stretches a trained context.

    A frequency with wavelength w is kept where w is short against the original context, divided
    by ``factor`` where it is long, and blended in between
    (``rope_type = "llama3"`` in Hugging Face's config.json).
    """

    factor: Annotated[float, Field(ge=1)] = 8.0
    """By how much long wavelengths are stretched; 1 changes nothing."""
    low_frequency_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths longer than the original context over this are stretched in full."""
    high_frequency_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths shorter than the original context over this are left alone."""
    original_max_sequence_length: Count = 8192
    """Context, in tokens, that the model was trained with before stretching."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise _error(
                f"high_frequency_factor ({self.high_frequency_factor:g}) must be greater than "
                f"low_frequency_factor ({self.low_frequency_factor:g})",
            )
        return self


def _find_preset(name: object) -> dict[str, Any]:
    if isinstance(name, str) and name in PRESETS:
        return dict(PRESETS[name])
    close = difflib.get_close_matches(str(name), PRESETS, n=1)
    suggestion = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{name!r} is not a preset of a model{suggestion}",
        hint=f"the presets are {', '.join(PRESETS)}",
    )


def _error(text: str) -> PydanticCustomError:
    return PydanticCustomError("model", "{text}", {"text": text})


def _default_head_dim(fields: dict[str, Any]) -> int:
    return fields.get("hidden_size", 0) // fields.get("num_heads", 1)


class ModelSpec(Spec):
    """A decoder-only transformer: sizes, position embedding, initialisation.

    In a run file: ``model = "gpt-1m"``, or a table with an optional ``preset`` and the keys that
    differ from it::

        [model]
        preset = "gpt-10m"
        num_layers = 12
    """

    input_keys: ClassVar[Mapping[str, str]] = {
        "preset": f"Take the sizes of a known model: {', '.join(PRESETS)}.",
    }

    vocab_size: Count = 256
    """Number of distinct tokens; 256 for bytes."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    num_layers: Count = 4
    """Number of transformer layers."""
    num_heads: Count = 4
    """Number of query heads."""
    num_kv_heads: Count = 2
    """Number of key and value heads, which groups of query heads share; divides num_heads."""
    head_dim: int = Field(default_factory=_default_head_dim)
    """Width of one head, an even number; hidden_size / num_heads if it is not given."""
    intermediate_size: Count = 512
    """Width of the SwiGLU block, which has three matrices of hidden_size by intermediate_size."""
    max_sequence_length: Count = 2048
    """Longest sequence, in tokens, for which position tables are made; costs no parameters."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary wavelengths; larger suits longer contexts."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling; none by default."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = True
    """Whether the output head is the embedding matrix."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of initial weights; the two projections of each layer that write into the
    residual stream get init_std / sqrt(2 num_layers), so that depth does not raise its variance."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, Mapping) or "preset" not in data:
            return data
        try:
            base = _find_preset(data["preset"])
        except ConfigError as problem:
            raise _error(f"{problem.message}; {problem.hint}") from None
        return base | {key: value for key, value in data.items() if key != "preset"}

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise _error(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_heads "
                f"({self.num_heads}); change one of them",
            )
        if self.head_dim <= 0 or self.head_dim % 2:
            raise _error(
                f"head_dim is {self.head_dim}, and rotary embedding turns pairs; give an even "
                "head_dim, or sizes whose quotient hidden_size / num_heads is even",
            )
        if self.num_heads % self.num_kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise _error(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                f"({self.num_kv_heads}); num_kv_heads can be {', '.join(map(str, fitting))}",
            )
        return self

    @classmethod
    def preset(cls, name: str) -> Self:
        """The model of that name in :data:`PRESETS`.

        Raises:
            ConfigError: There is no such preset; the hint lists those that are.
        """
        return cls.model_validate(_find_preset(name))

    @property
    def preset_name(self) -> str | None:
        """Name of the preset that this model is equal to, if any."""
        return next((name for name in PRESETS if type(self).preset(name) == self), None)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention_parameters(self) -> int:
        """Weights of one layer's query, key, value and output projections."""
        return 2 * self.hidden_size * (self.query_size + self.kv_size)

    @property
    def num_mlp_parameters(self) -> int:
        """Weights of one layer's gate, up and down projections."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def num_layer_parameters(self) -> int:
        """Weights of one layer, its two norms included."""
        return self.num_attention_parameters + self.num_mlp_parameters + 2 * self.hidden_size

    @property
    def num_embedding_parameters(self) -> int:
        """Weights of the embedding and, where it is not tied, of the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        return self.num_parameters_without_embeddings + self.num_embedding_parameters

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the layers and the last norm: the N of most scaling laws."""
        return self.num_layers * self.num_layer_parameters + self.hidden_size

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: projections and head, not the embedding."""
        per_layer = self.num_attention_parameters + self.num_mlp_parameters
        return self.num_layers * per_layer + self.vocab_size * self.hidden_size

    def flops_per_token(
        self,
        sequence_length: int,
        *,
        training: bool = True,
        convention: AttentionConvention = "causal",
    ) -> int:
        """Model FLOPs of one token, averaged over a sequence; a multiply-add counts as two.

        Forward is 2N plus attention and training three times that: the "6N plus attention" of
        Kaplan et al. (2020, section 2.1) and PaLM (Chowdhery et al. 2022, appendix B), where N is
        :attr:`num_matmul_parameters`. Work that a kernel repeats is not counted: flash attention
        computes the scores a second time in backward, so that hardware does 7/6 of the attention
        term in training, with 5 products in backward instead of 4.

        Args:
            sequence_length: Tokens in a sequence.
            training: Forward and backward, rather than forward alone.
            convention: Whether masked query-key pairs count; see :data:`AttentionConvention`.
        """
        # Twice the mean number of keys a query attends to, kept whole: (T + 1) or 2T.
        twice_keys = sequence_length + 1 if convention == "causal" else 2 * sequence_length
        attention = 2 * twice_keys * self.query_size * self.num_layers
        forward = 2 * self.num_matmul_parameters + attention
        return 3 * forward if training else forward

    def activation_nbytes_per_layer(
        self, *, micro_batch_size: int, sequence_length: int, element_nbytes: int = 4
    ) -> int:
        """Bytes that autograd keeps for the backward pass of one layer, parameters not counted.

        For each token, with attention by a fused kernel:

        - each of the two norms: its input and its normalised input in fp32, their inverse root
          mean square in fp32, and its output, which the projections after it keep;
        - attention: queries, keys, values, output, and a log-sum-exp in fp32 for each head;
        - SwiGLU: gate, silu(gate), up, and their product.

        Holds for one element type throughout, which is how FSDP2's mixed precision runs a layer,
        and for torch's decomposed RMSNorm, as on CPU: with inputs of two bytes it keeps fp32
        copies. Under autocast more is kept: cast weights, and one cast input for each projection.

        Args:
            micro_batch_size: Sequences that are processed at once.
            sequence_length: Tokens in each of them.
            element_nbytes: Bytes of an activation: 4 for fp32, 2 for bf16.
        """
        norms = 2 * (4 * (2 * self.hidden_size + 1) + element_nbytes * self.hidden_size)
        attention = element_nbytes * 2 * (self.query_size + self.kv_size) + 4 * self.num_heads
        swiglu = element_nbytes * 4 * self.intermediate_size
        return micro_batch_size * sequence_length * (norms + attention + swiglu)
