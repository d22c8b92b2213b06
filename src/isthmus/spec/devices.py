"""Peak arithmetic rates of accelerators by the name that their driver reports.

Dense rates without sparsity, as in the vendors' data sheets. A device that is not here has no
peak, and then no share of it is reported.
"""

from __future__ import annotations

import re
from typing import Final, Literal

_PEAK_TFLOPS: Final[dict[str, tuple[float, float]]] = {
    "GB300": (80.0, 2500.0),
    "GB200": (80.0, 2500.0),
    "B300": (80.0, 2250.0),
    "B200": (80.0, 2250.0),
    "H100 PCIe": (51.0, 756.0),
    "H200": (67.0, 989.0),
    "H100": (67.0, 989.0),
    "A100": (19.5, 312.0),
    "L40S": (91.6, 362.0),
    "L4": (30.3, 121.0),
    "V100": (15.7, 125.0),
    "RTX 4090": (82.6, 165.2),
    "MI355X": (157.3, 2500.0),
    "MI325X": (163.4, 1300.0),
    "MI300X": (163.4, 1300.0),
}
"""Word in the device's name: peak in fp32 without tensor cores, and in bf16 (V100: fp16)."""


def peak_flops_per_s(device_name: str, precision: Literal["fp32", "bf16"]) -> float | None:
    """Peak rate of a device in floating-point operations per second; None if it is not known."""
    for word, (fp32, bf16) in _PEAK_TFLOPS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", device_name, re.I):
            return 1e12 * (fp32 if precision == "fp32" else bf16)
    return None
