"""What a device can do at best, for the model FLOPs utilisation."""

from __future__ import annotations

import torch

_PEAK_BF16_TFLOPS = {
    "A100": 312.0,
    "A10G": 70.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 with fp32 accumulation, from the vendors' data sheets. The longest name that fits wins."""


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of ``device`` in bf16, or ``None`` where no data sheet says so."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in _PEAK_BF16_TFLOPS if key in name]
    return _PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None
