"""What a device can do at best, for the model FLOPs utilisation."""

from __future__ import annotations

import attrs
import torch

from forge_core.config.problems import nearest
from forge_core.errors import ConfigError

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


@attrs.frozen
class Gpu:
    """A GPU that need not be here."""

    name: str
    memory_gib: float
    """What torch reports as its total memory; the driver keeps the rest of the nominal size."""
    peak_flops: float
    """FLOP/s in dense bf16."""
    capability: tuple[int, int]
    """CUDA's compute capability."""

    @property
    def free_gib(self) -> float:
        """What is left for tensors beside CUDA and NCCL."""
        return self.memory_gib - _CONTEXT_GIB


_CONTEXT_GIB = 1.0

_GPUS = {
    "a100-40": ("A100", 39.4, (8, 0)),
    "a100-80": ("A100", 79.1, (8, 0)),
    "b200": ("B200", 178.4, (10, 0)),
    "h100": ("H100", 79.1, (9, 0)),
    "h200": ("H200", 139.8, (9, 0)),
}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, such as ``h200``.

    Raises:
        ConfigError: there is none in the table.
    """
    if name.lower() not in _GPUS:
        near = nearest(name, _GPUS)
        meant = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"--gpu {name}: not in the table of {', '.join(_GPUS)}.{meant}")
    key, memory, capability = _GPUS[name.lower()]
    return Gpu(name.lower(), memory, _PEAK_BF16_TFLOPS[key] * 1e12, capability)
