"""Copies of device tensors on the host, which go on beside what the device computes."""

from __future__ import annotations

import torch


def begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host. From a GPU it goes into pinned memory, and has its values after ``wait_for_copies``."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def wait_for_copies() -> None:
    """Wait until the copies that have begun on this GPU's current stream have their values."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
