"""Dropout (Srivastava et al. 2014) with the same noise in any layout: what is dropped is a function of the token's
number in the run, of the layer, the place in it and the feature, and no generator has a state.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads, T = keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_BITS = 0xFFFF_FFFF


class Dropout(nn.Module):
    """Drops features of the residual stream, in training alone. It has no parameters; its role in a parallel plan is
    ``residual``.

    Args:
        rate: the fraction that is dropped.
        place: a number of its own among those of a layer.
    """

    def __init__(self, rate: float, place: int) -> None:
        super().__init__()
        self.rate, self.place = rate, place

    def forward(self, hidden: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            hidden: ``(B, S, D)``.
            noise: ``(B, S)`` int64, a number of each token in this layer; ``None``: torch's generator decides.
        """
        if not self.training:
            return hidden
        if noise is None:
            return F.dropout(hidden, self.rate)
        features = torch.arange(hidden.shape[-1], device=hidden.device)
        return _dropped(hidden, self.rate, _token_bits(noise, self.place).unsqueeze(-1), features)


def drop_weights(weights: torch.Tensor, rate: float, noise: torch.Tensor | None, part: int = 0) -> torch.Tensor:
    """Drop weights of attention.

    Args:
        weights: ``(B, H, S, T)``.
        noise: as for ``Dropout``, of the queries.
        part: which H of all heads these are; the first H are part 0.
    """
    if noise is None:
        return F.dropout(weights, rate)
    heads, keys = (torch.arange(size, device=weights.device) for size in (weights.shape[1], weights.shape[-1]))
    pairs = _mixed(heads + part * len(heads)).view(-1, 1, 1) ^ keys
    return _dropped(weights, rate, _token_bits(noise, _OF_WEIGHTS).view(len(weights), 1, -1, 1), pairs)


_OF_WEIGHTS, _OF_ROUTERS = 0, 3


def noise_of_layer(noise: torch.Tensor, layer: int) -> torch.Tensor:
    """``(B, S)`` int64, other numbers in each layer; −1 stands for the embedding.

    Layers get their numbers here, and not in their modules, as layers that are alike share a compiled graph.
    """
    return _mixed((noise & _BITS) ^ _mixed((noise >> 32) & _BITS ^ (layer + 1)))


def uniform(noise: torch.Tensor, number: int) -> torch.Tensor:
    """Numbers of each token, evenly spread over (0, 1), neither end among them.

    Args:
        noise: of any shape, int64, a number of each token in this layer.
        number: how many each has.

    Returns:
        ``(*noise.shape, number)`` fp32, multiples of 2⁻²⁴.
    """
    places = torch.arange(number, device=noise.device)
    bits = _mixed(_token_bits(noise, _OF_ROUTERS).unsqueeze(-1) ^ _mixed(places))
    return ((bits >> 9).float() + 0.5) / (1 << 23)


def _dropped(values: torch.Tensor, rate: float, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """
    Args:
        token: random bits of each token, to be broadcast with ``place`` to the shape of ``values``.
        place: numbers of what each token has.
    """
    kept = _mixed(token ^ _mixed(place)) >= round(rate * (_BITS + 1))
    return torch.where(kept, values * (1 / (1 - rate)), 0)


def _token_bits(noise: torch.Tensor, place: int) -> torch.Tensor:
    return _mixed((noise + place * 0x9E37_79B9) & _BITS)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """32 bits to 32 bits, one to one, each of which depends on all: Wellons' hash ``lowbias32``. The second factor is
    taken less 2³², so that no product leaves 64 bits."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB_352D & _BITS
    bits = (bits ^ (bits >> 15)) * (0x846C_A68B - (1 << 32)) & _BITS
    return bits ^ (bits >> 16)
