"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635), with one gate a head.

A head keeps a matrix: ``S_t = a_t · S_{t−1} + k_t v_tᵀ``, and gives ``y_t = q_t S_t``. Shapes: B = batch, S = sequence,
H = heads (this rank's), d = features of a head.
"""

import math

import torch.nn.functional as F
from torch import nn

from forge_plugins_dense.initial_values import normal


class GatedLinear(nn.Module):
    needs = frozenset({"sequence"})  # which document a token is of

    def __init__(self, config, /, *, model, layer):
        super().__init__()
        self.head_dim, self.shift = model.head_size, math.log(math.expm1(1 / config.memory))
        width = model.n_heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(model.dim, width, bias=False) for _ in range(3))
        self.gate = nn.Linear(model.dim, model.n_heads, bias=False)
        self.o = nn.Linear(width, model.dim, bias=False)

    def forward(self, hidden, surroundings, cache=None):
        q, k, v = (f(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        fading = -F.softplus(self.gate(hidden).float() + self.shift).mT  # log a, (B, H, S)
        if surroundings.valid is not None:  # padding writes nothing, and nothing fades meanwhile
            valid = surroundings.valid[:, None]
            k, fading = k * valid.unsqueeze(-1), fading * valid
        total = fading.cumsum(-1)  # log of a_1 ⋯ a_t
        document = surroundings.facts["sequence"]
        seen = (document[:, None, :, None] == document[:, None, None, :]).tril()
        weights = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -math.inf).exp()
        mixed = (q @ k.mT * weights.to(q.dtype)) @ v
        if cache is not None:
            if cache.state is not None:
                mixed = mixed + total.exp().unsqueeze(-1).to(q.dtype) * (q @ cache.state)
            kept = (k * (total[..., -1:] - total).exp().unsqueeze(-1).to(k.dtype)).mT @ v
            before = 0 if cache.state is None else total[..., -1:, None].exp().to(k.dtype) * cache.state
            cache.state = before + kept
        return self.o((mixed / math.sqrt(self.head_dim)).transpose(1, 2).flatten(2))

    def make_cache(self, batch_size, max_len):
        return State()

    def init_weights(self, rng, prefix, residual_std, std):
        for name, matrix in self.named_children():
            rng.fill(f"{prefix}{name}.weight", matrix.weight, normal(residual_std if name == "o" else std))

    def parallel_plan(self):
        return {name: "row" if name == "o" else "column" for name, _ in self.named_children()}

    def parameter_roles(self):
        return {name: "matrix" for name, _ in self.named_parameters()}

    def active_parameters(self):
        return sum(parameter.numel() for parameter in self.parameters())

    def mixing_flops(self, seq_len):
        return 12.0 * self.o.in_features * self.head_dim  # what the recurrence takes, at any length


class State:
    """What a head keeps of all positions so far, ``(B, H, d, d)``."""

    state = None
