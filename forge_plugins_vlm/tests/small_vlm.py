"""Small models of all fusions, and the entries of a row with images."""

from __future__ import annotations

from typing import Any

import torch

EXPERTS = {
    "name": "moe",
    "n_experts": 2,
    "hidden_dim": 32,
    "router": {"name": "expert_choice", "experts_per_token": 1, "score_function": "sigmoid", "predictor": True},
}
FUSIONS: dict[str, dict[str, Any]] = {
    "joint_decoder": {},
    "cross_attention": {"fusion": {"name": "cross_attention", "layers": [1]}},
    "mixture_of_transformers": {"fusion": {"name": "mixture_of_transformers"}},
    "moma": {"fusion": {"name": "moma", "image": EXPERTS}, "feed_forward": EXPERTS},
}
"""The keys of a model of each fusion."""
SMALL = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "max_seq_len": 64,
    "encoder": {"name": "conv_vit", "size": [16, 16], "patch": 8, "dim": 16, "n_layers": 1, "n_heads": 2},
    "connector": {"name": "linear"},
}
"""Its tiles of 16 × 16 pixels have 4 tokens."""


def images(rows: int, tiles: int = 1, seed: int = 0) -> torch.Tensor:
    """``(rows, tiles, 3, 16, 16)`` uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, tiles, 3, 16, 16), dtype=torch.uint8, generator=generator)


def entries(fusion: str, layout: str, *, tiles: int | None = None) -> dict[str, torch.Tensor]:
    """The entries of one row, but pixels: ``t`` is a token of text, ``I`` an image, ``|`` begins a document."""
    each = 1 if fusion == "cross_attention" else 4
    slots, bounds, document = [], [], []
    first = begun = seen = 0
    was_image, number = False, 0
    for sign in layout:
        if sign == "|":
            first = begun = seen
            was_image, number = False, number + 1
            continue
        if sign == "I":
            begun = begun if was_image else seen
            slots += [-1] if each == 1 else range(4 * seen, 4 * seen + 4)
            seen += 1
        else:
            slots.append(-1)
        was_image = sign == "I"
        length = each if was_image else 1
        bounds += [(first, begun, seen)] * length
        document += [number] * length
    found = {"image_slots": torch.tensor([slots]), "image_range": torch.tensor([bounds])}
    if number:
        found["document"] = torch.tensor([document])
        starts = [document.index(one) for one in document]
        found["positions"] = torch.tensor([[place - start for place, start in enumerate(starts)]])
    return found
