"""The sites of a pre-norm layer of an encoder."""

from __future__ import annotations

import attrs

from forge_core.contracts.observation import Site, within


@attrs.frozen(kw_only=True)
class LayerParts:
    """The modules of a layer, by their names in it."""

    attention_norm: str
    attention: str
    """Gives what attention adds to the hidden states. Empty: no module does."""
    mlp_norm: str
    mlp: str
    """The same of the MLP."""
    mlp_output: str
    """The last matrix of the MLP, which reads its hidden features."""

    def sites(self, layer: str) -> dict[str, Site]:
        """By name, relative to the encoder, of the layer that it calls so."""
        stream = ("tile", "patch", "width")
        found = {
            "resid_pre": Site(module="", where="input", dims=stream),
            "attn_in": Site(module=self.attention_norm, dims=stream),
            "attn_out": Site(module=self.attention, dims=stream),
            "resid_mid": Site(module=self.mlp_norm, where="input", dims=stream),
            "mlp_in": Site(module=self.mlp_norm, dims=stream),
            "mlp_post": Site(module=self.mlp_output, where="input", dims=("tile", "patch", "neuron")),
            "mlp_out": Site(module=self.mlp, dims=stream),
            "resid_post": Site(module="", dims=stream),
        }
        there = {name: site for name, site in found.items() if site.module or name.startswith("resid")}
        return {f"{layer}.{name}": within(layer, site) for name, site in there.items()}
