"""Layers that differ, and windows of attention, as configurations of Hugging Face have them: both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig

Table = dict[str, Any]


def tables_of_windows(windows: Sequence[int]) -> Table:
    """Keys of the table ``[model]`` for the window of each layer, 0 for none."""
    usual, layers = tables_of_layers([{"window": window} for window in windows])
    return {key: value for key, value in {**usual, "layers": layers}.items() if value}


def tables_of_layers(each: Sequence[Mapping[str, Any]]) -> tuple[Table, list[Table]]:
    """What most layers have, and the tables ``layers`` of the others.

    Args:
        each: the keys of every layer, the same ones, with values that are as hashable as numbers.
    """
    kinds = list(dict.fromkeys(tuple(one.items()) for one in each))
    where = {kind: [number for number, one in enumerate(each) if tuple(one.items()) == kind] for kind in kinds}
    usual = max(kinds, key=lambda kind: len(where[kind]))
    tables = [
        {"at": at, **{key: value for key, value in kind if value != dict(usual)[key]}}
        for kind in kinds
        if kind != usual
        for at in _selections(where[kind], len(each))
    ]
    return dict(usual), tables


def with_some_rotated(table: Table, each: Sequence[Mapping[str, Any]]) -> Table:
    """A table ``[model]`` with the keys of every layer, ``rotary_fraction`` among them. There, layers that are not
    rotated are not multiplied by the attention factor of ``yarn``."""
    if "yarn" in table:
        each = [{**one, "rope_stretched": one["rotary_fraction"] > 0} for one in each]
    usual, layers = tables_of_layers(each)
    if not usual.pop("rope_stretched", True):
        layers.insert(0, {"at": ":", "rope_stretched": False})
    return table | {**usual, "layers": layers}


def _selections(numbers: list[int], n_layers: int) -> list[int | str]:
    """``LayerConfig.at`` for layers, in as few tables as slices can say."""
    if len(numbers) == 1:
        return [numbers[0]]
    step = numbers[1] - numbers[0]
    stop = next((stop for stop in (n_layers, numbers[-1] + 1) if list(range(numbers[0], stop, step)) == numbers), None)
    if stop is None:
        return list(numbers)
    return [f"{numbers[0]}:{'' if stop == n_layers else stop}{f':{step}' if step > 1 else ''}"]


def windows_from_hf(hf: Mapping[str, Any], slides: Callable[[int], bool]) -> list[int]:
    """The window of each layer, 0 for none.

    Args:
        slides: whether a layer has one where ``layer_types`` does not say.

    Raises:
        ConfigError: a layer is of a kind that is neither full nor sliding attention.
    """
    window, n_layers = hf.get("sliding_window"), hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or ["sliding_attention" if slides(n) else "full_attention" for n in range(n_layers)]
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ConfigError(f"layer_types of {kind!r} is not supported; full_attention and sliding_attention are")
    return [window or 0 if kind == "sliding_attention" else 0 for kind in kinds]


def used_windows_from_hf(hf: Mapping[str, Any], slides: Callable[[int], bool]) -> list[int]:
    """Same as ``windows_from_hf``, of a family that has windows only with ``use_sliding_window``, as Qwen.

    Raises:
        ConfigError: as ``windows_from_hf``; or a layer has a window, of 0 as well, and windows are not used.
    """
    uses = hf.get("use_sliding_window", False)
    windows = windows_from_hf(hf, lambda number: uses and slides(number))
    if "sliding_attention" in (hf.get("layer_types") or ()) and not uses:
        raise ConfigError("layer_types has sliding_attention, and use_sliding_window is false; one of the two is wrong")
    return windows


def windows_to_hf(config: TransformerConfig) -> Table:
    """``layer_types`` and ``sliding_window`` of a model whose layers have one window or none.

    Raises:
        ConfigError: layers have windows of several sizes.
    """
    windows = [config.layer(number).window for number in range(config.n_layers)]
    sizes = sorted({*windows} - {0})
    if len(sizes) > 1:
        raise ConfigError(
            f"layers have windows of {' and '.join(map(str, sizes[:2]))} positions, and the Hugging Face form has one "
            "sliding_window for all that have any"
        )
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": kinds, "sliding_window": sizes[0] if sizes else None}


def named_windows_to_hf(config: TransformerConfig) -> Table:
    """Same as ``windows_to_hf``, of a family whose code in transformers wants a ``sliding_window`` where no layer has
    one, too.

    Raises:
        ConfigError: as ``windows_to_hf``.
    """
    table = windows_to_hf(config)
    return table | {"sliding_window": table["sliding_window"] or config.max_seq_len}


def used_windows_to_hf(config: TransformerConfig) -> Table:
    """The reverse of ``used_windows_from_hf``.

    Raises:
        ConfigError: as ``windows_to_hf``.
    """
    table = windows_to_hf(config)
    first = next((n for n, kind in enumerate(table["layer_types"]) if kind == "sliding_attention"), config.n_layers)
    return table | {"use_sliding_window": table["sliding_window"] is not None, "max_window_layers": first}


def without_windows(config: TransformerConfig) -> TransformerConfig:
    """The same model with attention to all positions. Layers that differ in something else, too, stay as they are."""
    usual = config.layer(config.n_layers)
    layers = [config.layer(number) for number in range(config.n_layers)]
    differ = any(attrs.evolve(layer, window=usual.window) != usual for layer in layers)
    return attrs.evolve(config, window=0, layers=config.layers if differ else ())
