"""The encoder ``siglip2_naflex``.

Shapes: N = tiles, R × C = the grid of patches of a tile, G = rows and columns of learned positions, D = width.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from forge_plugins_vlm.encoders.pixels import picture_cells
from forge_plugins_vlm.encoders.transformers_config import NaFlexConfig
from forge_plugins_vlm.encoders.transformers_encoder import TransformersEncoder


class NaFlexEncoder(TransformersEncoder):
    """Patches of pictures of any size. It keeps the grid of the tile, where ``transformers`` packs the patches of a
    picture one after another; the order changes nothing, as each has its position."""

    family = "siglip2"
    classes = ("Siglip2VisionConfig", "Siglip2VisionEmbeddings", "Siglip2EncoderLayer")
    in_files = MappingProxyType({"layers": "encoder.layers", "norm": "post_layernorm"})
    config: NaFlexConfig

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Same as ``VisionEncoder.forward``; features of padding are 0."""
        height, width = pixels.shape[-2:]
        grid, patch = self.config.grid(height, width), self.config.found.patch_size
        if sizes is None:
            sides = [pixels.new_full(pixels.shape[:1], side, dtype=torch.int64) for side in (height, width)]
            sizes = torch.stack(sides, dim=1)
        is_inside = picture_cells(sizes, 1, height, width).unsqueeze(1)
        values = self._normalised(pixels).masked_fill(~is_inside, 0)
        is_picture = picture_cells(sizes, patch, *grid).flatten(1)
        patched: torch.Tensor = self.embeddings.patch_embedding(as_patches(values, patch))
        hidden = patched + self._positions(-(-sizes // patch), *grid)
        # a tile without a picture sees itself, since attention to nothing is not a number
        visible = (is_picture | ~is_picture.any(dim=1, keepdim=True))[:, None, None]
        for layer in self.layers:
            hidden = layer(hidden, visible)
        return self._features(hidden).masked_fill(~is_picture.unsqueeze(-1), 0)

    def _positions(self, shapes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Learned positions, resized to the grid of each picture.

        Args:
            shapes: ``(N, 2)`` int64, rows and columns of patches of each picture.

        Returns:
            ``(N, R · C, D)``, of no meaning at padding.
        """
        table: torch.Tensor = self.embeddings.position_embedding.weight
        side = round(table.shape[0] ** 0.5)
        down, across = resizing(shapes[:, 0], rows, side), resizing(shapes[:, 1], columns, side)
        resized = torch.einsum("ncb,abd->nacd", across, table.view(side, side, -1).float())
        resized = torch.einsum("nra,nacd->nrcd", down, resized)
        return resized.flatten(1, 2).to(table.dtype)


def as_patches(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """``(N, 3, H, W)`` to ``(N, R · C, patch · patch · 3)``: the pixels of each patch row by row, the channels last."""
    n, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cut = pixels.reshape(n, channels, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1)
    return cut.reshape(n, rows * columns, patch * patch * channels)


def resizing(lengths: torch.Tensor, most: int, length: int) -> torch.Tensor:
    """Weights of linear resizing with antialiasing, as ``torch.nn.functional.interpolate`` computes it, along one side,
    for each picture its own; on the device, as lengths would have to be copied to the host to call it.

    Args:
        lengths: ``(N,)`` int64, how many to resize to.
        most: rows of the result; those from a picture's length on have no meaning.
        length: how many to resize from.

    Returns:
        ``(N, most, length)`` fp32.
    """
    scale = length / lengths.clamp(min=1).float()[:, None, None]
    centre = (torch.arange(most, device=lengths.device)[:, None] + 0.5) * scale
    distance = (torch.arange(length, device=lengths.device) + 0.5 - centre).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
