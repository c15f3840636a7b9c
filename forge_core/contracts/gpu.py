"""A GPU as a plan sees it, and what GPUs do at best."""

from __future__ import annotations

import attrs

PEAK_BF16_TFLOPS = {
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


@attrs.frozen
class Gpu:
    """A GPU that need not be here."""

    name: str
    memory_gib: float
    """GiB that torch reports as its total memory; the driver keeps the rest of the nominal size."""
    peak_flops: float
    """FLOP/s in dense bf16."""
    capability: tuple[int, int]
    """CUDA's compute capability."""

    @property
    def free_gib(self) -> float:
        """GiB left for tensors beside CUDA and NCCL."""
        return self.memory_gib - _CONTEXT_GIB


def planned_gpu(tensor: object) -> Gpu | None:
    """The GPU in whose place a plan has this tensor, which is on the CPU and has no memory; ``None`` in a run."""
    return getattr(getattr(tensor, "fake_mode", None), "gpu", None)


_CONTEXT_GIB = 1.0
