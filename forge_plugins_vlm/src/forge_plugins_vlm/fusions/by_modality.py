"""Products of each position with the weights of its modality alone.

Shapes: B = batch, S = sequence, R = B · S rows, K and N = features in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forge_core.contracts.gpu import planned_gpu
from forge_core.contracts.model import Recompute
from forge_plugins_dense.activation import activated
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_moe.dispatch import permute
from forge_plugins_moe.grouped import grouped_outer_product, grouped_product, takes_grouped

Pair = tuple[nn.Linear, nn.Linear]
"""Of text and of images."""

PRODUCTS: dict[str, Recompute] = {"aten._grouped_mm": "keep", "forge_moe.grouped_product": "keep"}
"""For a block's ``recompute_plan``."""


class ByModality:
    """The positions of a batch as rows, those of text before those of images, for products by groups. The host does not
    wait for how many there are of each, and no shape depends on it."""

    def __init__(self, images: torch.Tensor) -> None:
        """
        Args:
            images: which positions are of images, ``(B, S)`` bool.
        """
        is_image = images.flatten()
        n_text = (~is_image).cumsum(0)
        before = n_text[-1] + is_image.cumsum(0)
        self._images = images
        self._place = torch.where(is_image, before, n_text) - 1
        self._counts = torch.stack((n_text[-1], before[-1] - n_text[-1]))

    @classmethod
    def of_linear(cls, images: torch.Tensor, *pairs: Pair) -> ByModality | None:
        """For layers of text and of images; ``None`` where they are to be called: with hooks, which see all positions;
        cut by a pass, adapted or in float8; of a dtype or a device without products by groups, or where the host waits
        for them; and for one token of each row, which takes as long as reading the weights."""
        return cls(images) if images.shape[1] > 1 and all(map(_are_linear, pairs)) else None

    @classmethod
    def of_dense(cls, images: torch.Tensor, text: Any, image: Any) -> ByModality | None:
        """The same for feed-forward layers, both ``MLP`` and of one shape."""
        if type(text) is not MLP or type(image) is not MLP or _shapes(text) != _shapes(image):
            return None
        activations = [one.activate for one in (text, image) if isinstance(one.activate, nn.Module)]
        if any(map(_is_watched, (text, image, *activations))):
            return None
        names = [name for name in ("gate", "up", "down") if getattr(text, name) is not None]
        return cls.of_linear(images, *((getattr(text, name), getattr(image, name)) for name in names))

    def rows(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """``(B, S, K)`` as each modality has it to ``(R, K)``."""
        own = text if text is image else torch.where(self._images[..., None], image, text)
        return permute(own.flatten(0, 1), self._place, back=True)

    def positions(self, rows: torch.Tensor) -> torch.Tensor:
        """``(R, N)`` to ``(B, S, N)``."""
        return permute(rows, self._place).view(*self._images.shape, -1)

    def multiplied(self, rows: torch.Tensor, text: nn.Linear, image: nn.Linear) -> torch.Tensor:
        """``(R, K)`` to ``(R, N)``."""
        product: torch.Tensor = _Product.apply(rows, text.weight, image.weight, self._counts)  # type: ignore[no-untyped-call]  # torch's
        return product if text.bias is None else product + self._own(text.bias, image.bias)

    def fed_forward(self, rows: torch.Tensor, text: MLP, image: MLP) -> torch.Tensor:
        """``(R, K)`` to the same."""
        raised = self.multiplied(rows, text.up, image.up)
        gated = None if text.gate is None or image.gate is None else self.multiplied(rows, text.gate, image.gate)
        hidden = activated(text.activate, raised, gated)
        if image.activate is not text.activate:
            hidden = self._own(hidden, activated(image.activate, raised, gated))
        return self.multiplied(hidden, text.down, image.down)

    def _own(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Of values for rows, or for each of them, those of their modality."""
        row = torch.arange(len(self._place), device=self._place.device)[:, None]
        return torch.where(row < self._counts[0], text, image)


def _are_linear(pair: Pair) -> bool:
    text, image = pair
    return _is_linear(text) and _is_linear(image) and _shapes(text) == _shapes(image) and _is_grouped(text.weight)


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not _is_watched(layer)


def _is_watched(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(map(len, hooks)) or "forward" in vars(layer)


def _shapes(layer: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters()]


def _is_grouped(weight: torch.Tensor) -> bool:
    """A GPU without a kernel for all groups takes them one by one, and its host waits for the counts (torch 2.13)."""
    planned = planned_gpu(weight)
    if planned is None and weight.device.type != "cuda":
        return takes_grouped(weight)
    capability = planned.capability if planned else torch.cuda.get_device_capability(weight.device)
    return weight.dtype == torch.bfloat16 and capability[0] in (9, 10) and takes_grouped(weight)


class _Product(torch.autograd.Function):
    """Each row with the weight of its modality. Backward is left both weights, and no stack of them, which would keep
    what FSDP frees meanwhile."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, text: torch.Tensor, image: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, text, image, counts)
        weights = torch.stack((text, image))
        return grouped_product(counts, weights)(rows, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, text, image, counts = ctx.saved_tensors
        (gradient,) = gradients
        weights = torch.stack((text, image))
        of_rows = grouped_product(counts, weights)(gradient, weights.mT)
        if not any(ctx.needs_input_grad[1:3]):
            return of_rows, None, None, None
        of_text, of_image = grouped_outer_product(gradient, rows, counts.cumsum(0, dtype=torch.int32))
        return of_rows, of_text, of_image, None
