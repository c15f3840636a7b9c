"""Images as further keys of the decoder's own attention (after Zhang et al. 2023, arXiv 2303.16199).

A head reads text as ever, and adds ``tanh(g)`` times what it reads of images with the same queries. Shapes: B = batch,
S = sequence, D = width of the residual stream, H = heads (this rank's), F = image tokens of a row.
"""

import torch
from torch import nn

from forge_plugins_dense.attention import attend
from forge_plugins_dense.block import Block
from forge_plugins_dense.initial_values import normal
from forge_plugins_vlm.visibility import sees_images, visible_tokens


class GatedPrefix:
    def __init__(self, config, /, *, model, build):
        self.config, self.model, self.build = config, model, build

    def block(self, layer):
        if layer < self.config.from_layer:
            return Block(self.model, layer, self.build)
        return PrefixedBlock(self.model, layer, self.build, self.config.gate)


class PrefixedBlock(Block):
    """The decoder's block, with keys and values of images."""

    def __init__(self, config, layer, build, gate):
        super().__init__(config, layer, build)
        self.head_dim, self.begin_with = config.head_size, gate
        self.image_k, self.image_v = (
            nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.gate = HeadGates(config.n_heads)

    def mixed(self, hidden, surroundings, cache):
        q, k, v = self.attention.project(self.attention_norm(hidden), surroundings)
        heads = self.attention.mix(q, k, v, surroundings, cache)
        mixed = self.attention.o(heads + self.gate(self.of_images(q, surroundings.facts)).flatten(2))
        return mixed if self.attention_output_norm is None else self.attention_output_norm(mixed)

    def of_images(self, q, facts):
        """What heads read of images, ``(B, S, H, head_dim)``, from queries of that shape."""
        tokens, bounds = facts["image_tokens"], facts["image_range"]
        k, v = (
            part(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.image_k, self.image_v)
        )
        visible = visible_tokens(bounds, facts["image_tile"], latest=False)
        read = attend(q.transpose(1, 2), k, v, visible[:, None], False, "auto").transpose(1, 2)
        return torch.where(sees_images(bounds)[..., None, None], read, 0.0)

    @property
    def needs(self):
        return super().needs | {"image_tokens", "image_tile", "image_range"}

    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, prefix, residual_std, std)
        for name in ("image_k", "image_v"):
            rng.fill(f"{prefix}{name}.weight", getattr(self, name).weight, normal(std))
        rng.fill(f"{prefix}gate.bias", self.gate.bias, lambda full, _: full.fill_(self.begin_with))

    def parallel_plan(self):
        return {**super().parallel_plan(), "image_k": "column", "image_v": "column", "gate": "column"}

    def parameter_roles(self):
        own = {"image_k.weight": "matrix", "image_v.weight": "matrix", "gate.bias": "bias"}
        return {**super().parameter_roles(), **own}

    def sites(self):
        # attention is not called as a whole, which this site would look at
        return {name: site for name, site in super().sites().items() if name != "attn_out"}


class HeadGates(nn.Module):
    """``tanh(g)`` times what a head gives; as a ``column`` module it has the numbers of this rank's heads."""

    def __init__(self, n_heads):
        super().__init__()
        self.out_features = n_heads
        self.bias = nn.Parameter(torch.empty(n_heads))

    def forward(self, heads):
        return heads * torch.tanh(self.bias).to(heads.dtype)[:, None]
