"""Other projects' names of sites: those of TransformerLens, and modules of transformers' Llama-like models."""

from __future__ import annotations

import re

_LENS = {
    "hook_embed": "embed",
    "ln_final.hook_out": "final_norm",
    "unembed.hook_out": "logits",
}
"""Of the whole model. ``hook_normalized`` is no name of ours: it has no gain, which norms multiply by afterwards."""
_LENS_BLOCK = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_mlp_in": "mlp_in",
    "ln1.hook_out": "attn_in",
    "ln2.hook_out": "mlp_in",
    "attn.hook_in": "attn_in",
    "mlp.hook_in": "mlp_in",
    "attn.hook_q": "q",
    "attn.hook_k": "k",
    "attn.hook_v": "v",
    "attn.hook_rot_q": "q_rot",
    "attn.hook_rot_k": "k_rot",
    "attn.hook_attn_scores": "attn_scores",
    "attn.hook_pattern": "attn_pattern",
    "attn.hook_z": "z",
    "attn.hook_result": "attn_head_out",
    "mlp.hook_pre": "mlp_pre",
    "mlp.hook_post": "mlp_post",
    "mlp.hook_expert_indices": "routing_expert",
}
_TRANSFORMERS = {
    "model.embed_tokens": "embed",
    "model.norm": "final_norm",
    "lm_head": "logits",
}
_TRANSFORMERS_LAYER = {
    "": "resid_post",
    "input_layernorm": "attn_in",
    "self_attn": "attn_out",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "post_attention_layernorm": "mlp_in",
    "mlp": "mlp_out",
    "mlp.gate_proj": "mlp_pre",
    "mlp.gate": "router_logits",
    "mlp.shared_experts": "shared_out",
    "block_sparse_moe": "mlp_out",
    "block_sparse_moe.gate": "router_logits",
}
"""Outputs of the modules of a layer, ``model.layers.{i}``."""


def canonical_site(name: str) -> str:
    """Our name of a site that is called by another project's; any other name stays as it is.

    Examples: ``blocks.3.hook_resid_post`` and ``model.layers.3`` are ``blocks.3.resid_post``.
    """
    whole = {**_LENS, **_TRANSFORMERS}
    if name in whole:
        return whole[name]
    if match := re.fullmatch(r"blocks\.([^.]+)\.(.+)", name):
        layer, rest = match.groups()
        return f"blocks.{layer}.{_LENS_BLOCK[rest]}" if rest in _LENS_BLOCK else name
    if match := re.fullmatch(r"model\.layers\.([^.]+)\.?(.*)", name):
        layer, rest = match.groups()
        return f"blocks.{layer}.{_TRANSFORMERS_LAYER[rest]}" if rest in _TRANSFORMERS_LAYER else name
    return name


def module_names(name: str) -> list[str]:
    """The modules of transformers whose output is called so by us, such as ``model.layers.3`` for
    ``blocks.3.resid_post``."""
    if match := re.fullmatch(r"blocks\.([^.]+)\.(.+)", name):
        layer, site = match.groups()
        of_layer = [theirs for theirs, ours in _TRANSFORMERS_LAYER.items() if ours == site]
        return [f"model.layers.{layer}.{theirs}".rstrip(".") for theirs in of_layer]
    return [theirs for theirs, ours in _TRANSFORMERS.items() if ours == name]


def other_names() -> dict[str, tuple[list[str], list[str]]]:
    """By our name, with ``{i}`` for the layer: the names of TransformerLens, and those of transformers."""
    of_lens = _LENS | {f"blocks.{{i}}.{theirs}": f"blocks.{{i}}.{ours}" for theirs, ours in _LENS_BLOCK.items()}
    of_layers = {
        f"model.layers.{{i}}.{theirs}".rstrip("."): f"blocks.{{i}}.{ours}"
        for theirs, ours in _TRANSFORMERS_LAYER.items()
    }
    found: dict[str, tuple[list[str], list[str]]] = {}
    for project, names in enumerate((of_lens, _TRANSFORMERS | of_layers)):
        for theirs, ours in names.items():
            found.setdefault(ours, ([], []))[project].append(theirs)
    return found
