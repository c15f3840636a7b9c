"""``num_experts`` and ``[model.moe]``, short for a sparse ``feed_forward``, of which only the name is known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAME = "moe"

Table = Mapping[str, Any]
Expansion = tuple[Table, Mapping[str, str]]
"""A model's table, and which of its keys were written otherwise."""


def with_feed_forward(table: Table) -> Expansion:
    """The table with ``feed_forward`` in place of ``num_experts`` and ``moe``.

    What is contradictory stays as it is, for the validators of these keys.
    """
    n_experts, moe, layer = (table.get(key) for key in ("num_experts", "moe", "feed_forward"))
    if not isinstance(moe or {}, Mapping):
        return table, {}
    if type(n_experts) is int and n_experts < 0:  # refused as it stands; what the table stands for cannot be said
        return {key: value for key, value in table.items() if key != "moe"}, {}
    rest = {key: value for key, value in table.items() if key not in ("num_experts", "moe", "feed_forward")}
    layer = {"name": layer} if isinstance(layer, str) else layer
    if type(n_experts) is int and n_experts == 0:
        return _dense(rest, layer)
    if layer is not None and moe and (_is_sparse(layer) or "dense" in moe):
        return {**rest, "feed_forward": layer, "moe": moe}, {}
    return _sparse(rest, n_experts, moe, layer)


def _dense(rest: Table, layer: Any) -> Expansion:
    if not _is_sparse(layer):
        return (rest if layer is None else {**rest, "feed_forward": layer}), {}
    if "dense" not in layer:
        return rest, {}
    return {**rest, "feed_forward": layer["dense"]}, {"feed_forward": "feed_forward.dense"}


def _sparse(rest: Table, n_experts: Any, moe: Table | None, layer: Any) -> Expansion:
    sparse, written = {"name": _NAME, **(moe or {})}, {"feed_forward": "num_experts" if moe is None else "moe"}
    if _is_sparse(layer):
        sparse, written = dict(layer), {}
    elif layer is not None:
        sparse["dense"], written["feed_forward.dense"] = layer, "feed_forward"
    if n_experts is not None:
        sparse["n_experts"], written["feed_forward.n_experts"] = n_experts, "num_experts"
    return {**rest, "feed_forward": sparse}, written


def _is_sparse(layer: Any) -> bool:
    return isinstance(layer, Mapping) and str(layer.get("name")).rpartition(":")[2] == _NAME
