"""Small rows of images among text, for checks of what reads them.

Shapes: S = sequence, N = tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SMALL: Mapping[str, Any] = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "max_seq_len": 64,
    "encoder": {"name": "forge-plugins-vlm:conv_vit", "size": [16, 16], "patch": 8, "dim": 16, "n_layers": 1}
    | {"n_heads": 2},
    "connector": {"name": "forge-plugins-vlm:linear"},
}
"""The keys of a small ``vision_language``, whose tiles of 16 × 16 pixels have ``TOKENS_OF_TILE`` tokens."""
TOKENS_OF_TILE = 4


def tiles(rows: int, number: int = 1, seed: int = 0) -> torch.Tensor:
    """``(rows, number, 3, 16, 16)`` uint8, noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, number, 3, 16, 16), dtype=torch.uint8, generator=generator)


def row_entries(layout: str, *, one_token_an_image: bool) -> dict[str, torch.Tensor]:
    """The entries of one row but pixels, of images with a tile each: ``image_slots`` ``(1, S)`` and ``image_range``
    ``(1, S, 3)``, and of several documents ``document`` and ``positions`` ``(1, S)``.

    Args:
        layout: ``t`` is a token of text, ``I`` an image, ``|`` begins a document.
    """
    slots: list[int] = []
    bounds: list[tuple[int, int, int]] = []
    document: list[int] = []
    first = begun = seen = number = 0
    was_image = False
    for sign in layout:
        if sign == "|":
            first = begun = seen
            was_image, number = False, number + 1
            continue
        if sign == "I":
            begun = begun if was_image else seen
            own = range(TOKENS_OF_TILE * seen, TOKENS_OF_TILE * (seen + 1))
            slots += [-1] if one_token_an_image else own
            seen += 1
        else:
            slots.append(-1)
        was_image = sign == "I"
        length = len(slots) - len(bounds)
        bounds += [(first, begun, seen)] * length
        document += [number] * length
    found = {"image_slots": torch.tensor([slots]), "image_range": torch.tensor([bounds])}
    if number:
        starts = [document.index(one) for one in document]
        found["document"] = torch.tensor([document])
        found["positions"] = torch.tensor([[place - start for place, start in enumerate(starts)]])
    return found
