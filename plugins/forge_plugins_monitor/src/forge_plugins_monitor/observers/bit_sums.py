"""Sums of bits, by which two tensors are compared, or one with what it was before."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_core.checkpoint.state_dict import plain_values
from forge_core.ops.local_tensor import local_tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: what the bits of a value are read as."""


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of the bits of each tensor's elements on this rank, so that no difference is lost in rounding. The host
    waits once for each device."""
    on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        values = plain_values(tensor.detach())
        local = local_tensor(values)
        total = local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
        on_device.setdefault(local.device, {})[name] = total
    return {
        name: total
        for sums in on_device.values()
        for name, total in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    }
