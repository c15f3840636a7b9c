"""Small models of all fusions, and the entries of a row with images."""

from __future__ import annotations

from typing import Any

import torch

from forge_plugins_vlm.testing.small_images import SMALL, row_entries
from forge_plugins_vlm.testing.small_images import tiles as images

__all__ = ["EXPERTS", "FUSIONS", "SMALL", "WORDS", "entries", "images"]

_SPELLED = "<eos> <image> <unk> a red green blue circle square top left right what is it ? yes no <user> <bot> system"
WORDS = _SPELLED.split()
"""The words of ``tokenizer_path``, by their ids."""

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


def entries(fusion: str, layout: str) -> dict[str, torch.Tensor]:
    """The entries of one row, but pixels, as ``row_entries`` has them."""
    return row_entries(layout, one_token_an_image=fusion == "cross_attention")
