"""Gradients of which each rank along a mesh axis has a part of the sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from forge_core.ops.local_tensor import local_tensor

if TYPE_CHECKING:
    from forge_core.contracts.callback import RanksByAxis

_BUCKET = 2**24
"""Elements of gradients that are sent together: copies of all of them would take as much as they do."""


@attrs.frozen
class PartialGradients:
    """The parameters with such gradients, as ``partial_gradients`` of their modules says (``ParallelPass``).

    The engine sums them after the backward of a step. A callback that calls backward by itself does it in turn.
    """

    by_axis: Mapping[str, Sequence[nn.Parameter]]
    ranks: RanksByAxis
    device: torch.device
    """Where ranks talk; gradients may be kept elsewhere."""

    @classmethod
    def of(cls, parts: Iterable[nn.Module], ranks: RanksByAxis, device: torch.device) -> PartialGradients:
        """Find them in this rank's parts of the model, before a forward: FSDP gives modules other parameters in it."""
        by_axis: dict[str, dict[int, nn.Parameter]] = defaultdict(dict)
        for module in (module for part in parts for module in part.modules()):
            for name, axis in getattr(module, "partial_gradients", {}).items():
                parameter = getattr(module, name)
                by_axis[axis][id(parameter)] = parameter
        return cls({axis: [*found.values()] for axis, found in by_axis.items()}, ranks, device)

    @torch.no_grad()
    def sum(self) -> None:
        """Put the sums over ranks, added in fp32 or more, in their place. All ranks call it together."""
        for axis, parameters in self.by_axis.items():
            for bucket in _buckets([local_tensor(p.grad) for p in parameters if p.grad is not None]):
                wide = [one.flatten().to(self.device, torch.promote_types(one.dtype, torch.float32)) for one in bucket]
                total = self.ranks.sum_over(torch.cat(wide), (axis,))
                for one, own in zip(bucket, torch.split(total, [one.numel() for one in bucket]), strict=True):
                    one.copy_(own.view_as(one))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, some at a time."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
