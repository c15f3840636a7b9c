"""Patches mixed by matrices (after Tolstikhin et al. 2021, arXiv 2105.01601).

Shapes: N = tiles, T = features of a tile, D = width.
"""

import math

import torch.nn.functional as F
from torch import nn

from forge_plugins_dense.initial_values import normal, ones, zeros


class PatchMixer(nn.Module):
    def __init__(self, config, /, **_):
        super().__init__()
        self.config = config
        self.patches = nn.Linear(3 * config.patch**2, config.dim)
        features = (config.size // config.patch) ** 2
        self.layers = nn.ModuleList(MixerLayer(features, config.dim) for _ in range(config.n_layers))

    def forward(self, pixels, sizes=None):
        if sizes is not None:
            raise ValueError("patch_mixer cannot leave out the padding of tiles")
        self.config.grid(*pixels.shape[-2:])
        cut = F.unfold(pixels.float() / 127.5 - 1, self.config.patch, stride=self.config.patch)  # (N, 3 · p², T)
        hidden = self.patches(cut.mT.to(self.patches.weight.dtype))
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def init_weights(self, rng, prefix):
        for name, parameter in self.named_parameters():
            is_norm, is_matrix = "norm" in name, parameter.ndim == 2
            fill = normal(1 / math.sqrt(parameter.shape[-1])) if is_matrix else zeros
            rng.fill(prefix + name, parameter, ones if is_norm and name.endswith("weight") else fill)

    def parameter_roles(self):
        roles = {True: "norm", False: "matrix"}
        named = [name for name, _ in self.named_parameters()]
        return {name: "bias" if name.endswith("bias") else roles["norm" in name] for name in named}

    def units(self):
        return [f"layers.{number}" for number in range(len(self.layers))]


class MixerLayer(nn.Module):
    """A matrix over features, then one over their width."""

    def __init__(self, features, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.places, self.widths = nn.Linear(features, features), nn.Linear(dim, dim)

    def forward(self, hidden):
        hidden = hidden + self.places(self.norm(hidden).mT).mT
        return hidden + F.gelu(self.widths(hidden))
