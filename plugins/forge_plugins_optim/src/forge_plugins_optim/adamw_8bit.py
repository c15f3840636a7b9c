"""AdamW with its moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.adamw_step import adamw_step
from forge_plugins_optim.blocks import Blocks, DynamicMap
from forge_plugins_optim.config import AdamW8bitConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.state_layout import groups_across, offset_in, reduce_across, zeros_along

_BUCKET = 2**24
"""Elements of whole parameters whose moments are in fp32 at one time, 8 bytes each."""
_MOMENTS = {"momentum": True, "square": False}
"""Slots, and whether their values have a sign."""


class AdamW8bit(ForeachOptimizer):
    """AdamW whose moments are uint8 codes and an fp32 scale for each block of 256 elements of the last dimension
    (Dettmers et al., 2022, https://arxiv.org/abs/2110.02861; ``Blocks`` states the error).

    State takes 2 bytes a parameter and 8 for each block, where AdamW's takes 8 bytes a parameter. A step computes in
    fp32, with the moments before they are rounded. Second moments are never rounded to zero, so that no step is divided
    by ``eps`` alone. Embeddings and small tensors keep moments in fp32, as published. After 50 steps, parameters are
    within 3 % of the way they have gone, by norm, from where AdamW in fp32 is.

    Blocks and state are the same on every mesh. Where ranks hold parts of rows, they agree on scales, by one collective
    for each axis of the mesh and 16 million elements.
    """

    update_size: UpdateSize = "element"

    def __init__(self, config: AdamW8bitConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        super().__init__(parameter_groups(parameters, config), {"betas": config.betas, "eps": config.eps})
        self.round_as(config.rounding, parameters)
        self._maps: dict[tuple[str, torch.device], DynamicMap] = {}
        self._exact = frozenset(
            one.parameter
            for one in parameters
            if one.role == "embedding" or one.parameter.ndim == 0 or one.parameter.numel() < max(1, config.min_elements)
        )

    def empty_state(
        self, parameter: nn.Parameter, slot: str, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Same as ``StateLayout.empty_state``."""
        return _empty_scales(parameter) if slot.endswith("_scale") else None

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        is_taken = torch.ones((), device=held[0].device) if self.left_out is None else 1 - self.left_out
        for bucket in _buckets(held):
            moments = [self._moments(parameter) for parameter in bucket]
            for own, parameter, gradient in zip(moments, bucket, self.parts(bucket)[1], strict=True):
                whole = self.exact(parameter)
                adamw_step(whole, gradient.float(), own, self.state[parameter]["step"], group, is_taken)
                self.keep(parameter, whole)
            self._keep([(p, own) for p, own in zip(bucket, moments, strict=True) if self._is_coded(p)])

    def _moments(self, parameter: torch.Tensor) -> Tensors:
        """This rank's parts of both in fp32: the state itself if it is exact, else a copy."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
            for slot in _MOMENTS:
                if parameter in self._exact:
                    state[slot] = torch.zeros_like(parameter, dtype=torch.float32)
                else:
                    state[slot] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state[f"{slot}_scale"] = _empty_scales(parameter)
        if not self._is_coded(parameter):
            return [local_tensor(state[slot]) for slot in _MOMENTS]
        blocks = _blocks(parameter)
        return [
            blocks.dequantised(
                local_tensor(state[slot]), local_tensor(state[f"{slot}_scale"]), self._map(slot, parameter)
            )
            for slot in _MOMENTS
        ]

    def _is_coded(self, parameter: torch.Tensor) -> bool:
        """As its state is: a resumed run may have another ``min_elements``."""
        return "momentum_scale" in self.state[parameter]

    def _keep(self, moments: Sequence[tuple[torch.Tensor, Tensors]]) -> None:
        """Quantise them into the state."""
        scales = [_blocks(parameter).scales(value) for parameter, own in moments for value in own]
        across = [groups_across(parameter, [parameter.ndim - 1]) for parameter, own in moments for _ in own]
        reduce_across(scales, across, dist.ReduceOp.MAX)
        new = iter(scales)
        for parameter, own in moments:
            state, blocks = self.state[parameter], _blocks(parameter)
            for value, slot in zip(own, _MOMENTS, strict=True):
                scale = next(new)
                self._write(state[slot], blocks.quantised(value, scale, self._map(slot, parameter)))
                self._write(state[f"{slot}_scale"], scale)

    def _map(self, slot: str, parameter: torch.Tensor) -> DynamicMap:
        key = slot, parameter.device
        if key not in self._maps:
            self._maps[key] = DynamicMap(parameter.device, signed=_MOMENTS[slot])
        return self._maps[key]

    def _write(self, state: torch.Tensor, value: torch.Tensor) -> None:
        local = local_tensor(state)
        local.copy_(value if self.left_out is None else torch.where(self.left_out.bool(), local, value))


def _buckets(held: Tensors) -> Iterator[Tensors]:
    """Parameters that are updated together, the same on all ranks."""
    bucket: Tensors = []
    for parameter in held:
        if bucket and sum(one.numel() for one in [*bucket, parameter]) > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def _blocks(parameter: torch.Tensor) -> Blocks:
    last = parameter.ndim - 1
    return Blocks(parameter.shape[last], offset_in(parameter, last), local_tensor(parameter).shape[last])


def _empty_scales(parameter: torch.Tensor) -> torch.Tensor:
    shape = [*parameter.shape[:-1], _blocks(parameter).n_blocks]
    return zeros_along(parameter, shape, [*range(parameter.ndim - 1), None])
