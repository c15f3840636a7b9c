"""How often two routers agree: router saturation, where one is that of the end of a run (Muennighoff et al. 2024, arXiv
2409.02060, section 5.1)."""

from __future__ import annotations

import torch

from forge_core.errors import ConfigError


def routing_agreement(x: torch.Tensor, y: torch.Tensor) -> float:
    """``|S ∩ S'| / K``, of the experts S and S' that the two choose for a token; the mean over tokens. A choice without
    room counts as one of a further expert, as the site has it.

    Args:
        x, y: ``(n, K)``, the numbers of the experts of each token, as the site ``routing_expert`` has them.

    Raises:
        ConfigError: they have other tokens or other K, or are no whole numbers.
    """
    if x.shape != y.shape or x.ndim != 2 or 0 in x.shape:
        raise ConfigError(
            f"routing_agreement compares as many experts of the same tokens, and these are {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    if any(bool((one != one.round()).any()) for one in (x, y)):
        raise ConfigError("routing_agreement compares numbers of experts, and these are none; give it routing_expert")
    return float((x[:, :, None] == y[:, None, :]).any(2).double().mean())
