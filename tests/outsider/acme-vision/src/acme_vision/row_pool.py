"""The mean of each row of features."""

import math

from torch import nn

from forge_plugins_dense.initial_values import normal, zeros


class RowPool(nn.Module):
    def __init__(self, config, /, *, in_dim, out_dim):
        super().__init__()
        self.projection = nn.Linear(in_dim, out_dim)

    def forward(self, features, grid):
        return self.projection(features.unflatten(1, grid).mean(2))

    def init_weights(self, rng, prefix):
        weight, bias = self.projection.weight, self.projection.bias
        rng.fill(f"{prefix}projection.weight", weight, normal(1 / math.sqrt(weight.shape[1])))
        rng.fill(f"{prefix}projection.bias", bias, zeros)

    def parameter_roles(self):
        return {"projection.weight": "matrix", "projection.bias": "bias"}
