"""The weight layouts of OLMo 2, OLMo 3 and EXAONE 4, whose norms are at outputs, for forge-plugins-hf."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import DecoderLayout, Table
from forge_plugins_dense.huggingface import rope_kind
from forge_plugins_dense.huggingface_layers import (
    named_windows_to_hf,
    tables_of_layers,
    windows_from_hf,
    windows_to_hf,
    with_some_rotated,
)
from forge_plugins_dense.weight_layouts import RelativeLayout


class OutputNormLayout(RelativeLayout):
    """Norms at the output of attention and of the feed-forward layer, and of queries and keys."""

    inside: ClassVar[Mapping[str, str]] = {
        **DecoderLayout.inside,
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        return super().read(hf) | {"norm_placement": "output", "qk_norm": True}


class Olmo2Layout(OutputNormLayout):
    """OLMo 2: queries and keys are normed over all heads together."""

    architectures = ("Olmo2ForCausalLM",)
    model_type = "olmo2"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def read(self, hf: Mapping[str, Any]) -> Table:
        return super().read(hf) | {"qk_norm_over": "all"}


class Olmo3Layout(Olmo2Layout):
    """OLMo 3: three layers with a sliding window to one without, whose rotary frequencies alone are stretched."""

    architectures = ("Olmo3ForCausalLM",)
    model_type = "olmo3"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Olmo2Layout.defaults,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        windows = windows_from_hf(hf, lambda number: (number + 1) % 4 != 0)
        full, local = self._rope_of_kinds(hf)
        table = super().read(ChainMap({"rope_parameters": full}, cast("dict[str, Any]", hf)))
        each = [
            {
                "window": window,
                "rope_theta": float((local if window else full)["rope_theta"]),
                "rope_factor": 1.0 if window else table.get("rope_factor", 1.0),
                "rope_stretched": window == 0,
            }
            for window in windows
        ]
        usual, layers = tables_of_layers(each)
        if not usual.pop("rope_stretched"):
            layers.insert(0, {"at": ":", "rope_stretched": False})
        if not any(key in table for key in ("rope_scaling", "yarn", "long_rope")):
            layers = [one for one in layers if one.pop("rope_stretched", None) is None or len(one) > 1]
        return table | {**usual, "layers": layers}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        layers = [config.layer(number) for number in range(config.n_layers)]
        full, local = (
            next((layer for layer in layers if bool(layer.window) == slides), config.layer(config.n_layers))
            for slides in (False, True)
        )
        factor = 1.0 if config.rope_stretched else full.rope_factor
        of_full = attrs.evolve(config, rope_theta=full.rope_theta, rope_factor=factor)
        table = super().write(of_full, vocab_size)
        kinds = {
            "full_attention": table["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local.rope_theta},
        }
        return table | {**named_windows_to_hf(config), "rope_parameters": kinds}

    def _rope_of_kinds(self, hf: Mapping[str, Any]) -> tuple[Table, Table]:
        """``rope_parameters`` of layers without a window and of those with one."""
        scaling = hf.get("rope_scaling")  # as transformers 4 writes what layers without a window have
        kinds = hf.get("rope_parameters") or {"full_attention": scaling}
        known = ("full_attention", "sliding_attention")
        for kind in kinds:
            if kind not in known:
                raise ConfigError(
                    f"Olmo3ForCausalLM with rope_parameters of {kind!r} is not supported; {' and '.join(known)} are"
                )
        full, local = ({"rope_theta": hf["rope_theta"], **(kinds.get(kind) or {})} for kind in known)
        if not full.get("truncate", True):
            raise ConfigError(
                "Olmo3ForCausalLM with truncate = false in full_attention is not supported, as transformers truncates "
                "there in any case; only true is"
            )
        if rope_kind(local) != "default":
            raise ConfigError(
                f'Olmo3ForCausalLM with rope_type = "{rope_kind(local)}" of sliding_attention is not supported; '
                'only "default" is'
            )
        return full, local


class Exaone4Layout(OutputNormLayout):
    """EXAONE 4: where some layers have a sliding window, the others have no rotary positions."""

    architectures = ("Exaone4ForCausalLM",)
    model_type = "exaone4"
    may_be_biased = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        pattern, slides = hf["sliding_window_pattern"], hf["sliding_window"] is not None
        if slides and not hf.get("layer_types") and not isinstance(pattern, int):
            raise ConfigError(
                f"Exaone4ForCausalLM with sliding_window_pattern = {pattern!r} and without layer_types is not "
                "supported; a number is"
            )
        windows = windows_from_hf(hf, lambda number: slides and (number + 1) % pattern != 0)
        each = [{"window": window, "rotary_fraction": 1.0 if window or not slides else 0.0} for window in windows]
        return with_some_rotated(super().read(hf), each)

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        table = windows_to_hf(config)
        if not any(config.layer(number).rotary_fraction for number in range(config.n_layers)):
            table = named_windows_to_hf(config)  # transformers rotates all layers where there is none
        return super().write(config, vocab_size) | table | {"sliding_window_pattern": None}
