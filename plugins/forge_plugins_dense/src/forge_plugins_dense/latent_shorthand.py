"""``[model.latent_attention]``, the former spelling of the mixer ``latent``, which files and checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_plugins_dense.sparse_shorthand import Expansion, Table

_KEY = "latent_attention"


def with_latent_mixer(table: Table) -> Expansion:
    """The table with the mixer ``latent``, and these keys, wherever the model and its ``layers`` have ``attention``; a
    mixer that is ``latent`` gets these keys too.

    Where there is none of them, and where a table is no table, it stays as it is, for the validators.
    """
    keys = table.get(_KEY)
    if not isinstance(keys, Mapping):
        return table, {}
    changed = {key: value for key, value in table.items() if key != _KEY}
    written: dict[str, str] = {}
    if _takes(table.get("mixer")):
        changed["mixer"] = _latent(table.get("mixer"), keys, "mixer", written)
    layers = table.get("layers")
    if isinstance(layers, list | tuple):
        changed["layers"] = [*layers]
        for number, layer in enumerate(layers):
            if isinstance(layer, Mapping) and layer.get("mixer") is not None and _takes(layer["mixer"]):
                made = _latent(layer["mixer"], keys, f"layers[{number}].mixer", written)
                changed["layers"][number] = {**layer, "mixer": made}
    return (changed, written) if written else (table, {})


def _takes(mixer: Any) -> bool:
    return mixer is None or _name(mixer) in ("attention", "latent")


def _latent(mixer: Any, keys: Table, at: str, written: dict[str, str]) -> Table:
    if isinstance(mixer, Mapping) and _name(mixer) == "latent":
        written |= {f"{at}.{key}": f"{_KEY}.{key}" for key in keys}
        return {**mixer, **keys}
    written[at] = _KEY
    return {"name": "latent", **keys}


def _name(mixer: Any) -> str:
    """Without its distribution."""
    return str(mixer.get("name") if isinstance(mixer, Mapping) else mixer).rpartition(":")[2]
