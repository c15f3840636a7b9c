"""The GPUs that a plan can be about."""

from __future__ import annotations

from forge_core.contracts.gpu import PEAK_BF16_TFLOPS, Gpu
from forge_core.errors import ConfigError, nearest

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
        begun = [gpu for gpu in _GPUS if gpu.startswith(name.lower())]  # two have sizes of memory in their names
        near = " or ".join(begun) or nearest(name, _GPUS)
        meant = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"--gpu {name}: not in the table of {', '.join(_GPUS)}.{meant}")
    key, memory, capability = _GPUS[name.lower()]
    return Gpu(name.lower(), memory, PEAK_BF16_TFLOPS[key] * 1e12, capability)
