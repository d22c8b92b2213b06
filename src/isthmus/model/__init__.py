"""Reference models: a Llama-style transformer, its loss, and its Hugging Face checkpoints."""

from __future__ import annotations

from isthmus.model.huggingface import (
    load_huggingface,
    load_huggingface_weights,
    save_huggingface,
)
from isthmus.model.huggingface_config import read_huggingface_spec
from isthmus.model.transformer import Transformer, token_loss

__all__ = [
    "Transformer",
    "load_huggingface",
    "load_huggingface_weights",
    "read_huggingface_spec",
    "save_huggingface",
    "token_loss",
]
