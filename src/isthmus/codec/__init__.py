"""Tensors to bytes and back, and their mean over ranks.

One file a codec, its spec and its runtime together; :func:`isthmus.spec.base.kinds_of` finds them.
Imports no torch until a tensor is touched.
"""

from __future__ import annotations

from isthmus.codec.base import Codec, PayloadError, mix_seed
from isthmus.codec.comm import Comm
from isthmus.codec.reducer import Bucket, Reducer, Slot

__all__ = ["Bucket", "Codec", "Comm", "PayloadError", "Reducer", "Slot", "mix_seed"]
