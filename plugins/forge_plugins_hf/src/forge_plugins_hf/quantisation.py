"""The table ``quantization_config`` of ``config.json``: how weights are stored in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_hf.weight_layout import WeightLayout

KEY = "quantization_config"
_SUPPORTED = {"fmt": ("e4m3",), "activation_scheme": ("dynamic",), "scale_fmt": ("float", "ue8m0")}
_SAY_NOTHING = ("quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers")
"""Which tensors are in float8 is said by the files."""


@attrs.frozen
class Float8Blocks:
    """Weights in float8 (e4m3), with a factor in fp32 for each block: DeepSeek-V3 (arXiv 2412.19437, section 3.3)."""

    rows: int
    columns: int


def read_quantisation(config: Mapping[str, Any], layout: WeightLayout, folder: Path) -> Float8Blocks | None:
    """How weights are stored that a layout does not unpack itself; ``None`` if they are as they are.

    Raises:
        ConfigError: they are stored in a way that we do not read.
    """
    found, where = config.get(KEY), f"{folder / 'config.json'}: {KEY}"
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method in layout.unpacks:
        return None
    if method != "fp8":
        others = "".join(f", and {one!r}" for one in layout.unpacks)
        named = f"quant_method = {method!r}" if method else "no quant_method"
        raise ConfigError(
            f"{where} with {named} is not supported; 'fp8' with blocks is{others}. Take the model in bf16, fp16 or fp32"
        )
    for key in found:
        allowed = _SUPPORTED.get(key)
        if allowed is None and key not in _SAY_NOTHING:
            raise ConfigError(f"{where}.{key} = {found[key]!r} is not supported for weights in fp8")
        if allowed is not None and found[key] not in allowed:
            raise ConfigError(f"{where}.{key} = {found[key]!r} is not supported; {' or '.join(map(repr, allowed))} is")
    return _blocks(found.get("weight_block_size"), where)


def _blocks(size: Any, where: str) -> Float8Blocks:
    if not (isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)):
        raise ConfigError(f"{where}.weight_block_size must be two numbers above 0, such as [128, 128], got {size!r}")
    return Float8Blocks(*size)
