"""A tensor on its way to host memory, which the host does not wait for until it asks."""

from __future__ import annotations

import torch


class HostCopy:
    """Begin to copy a tensor; from a GPU into pinned memory, beside what the GPU does afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.device.type == "cuda":
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._copied.record()

    def values(self) -> list[float]:
        """The elements of a vector. Waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values
