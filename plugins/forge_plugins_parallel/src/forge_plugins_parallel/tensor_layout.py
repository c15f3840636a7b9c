"""How values lie at the modules of a model that is cut over ``tp``.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.contracts.model import ShardRole
from forge_core.contracts.observation import Ends, Part

_AXIS = "tp"
_FEATURES, _HEADS = (Part(_AXIS, -1),), (Part(_AXIS, 1),)


def tensor_layout(model: Any, plan: Mapping[str, ShardRole], *, by_token: bool) -> dict[str, Ends]:
    """
    Args:
        model: one part of it.
        plan: the role of each module by its canonical name.
        by_token: whether each rank has a part of the tokens of the residual stream.

    Returns:
        The ends of modules by their canonical names. A module that has one with the role ``row``, ``expert`` or
        ``whole`` in it gives what that gives.
    """
    stream = (Part(_AXIS, "position", order="tokens"),) if by_token else ()
    by_role = _by_role(stream, summed=(_AXIS,) if "sequence" in plan.values() else ())
    ends = {name: by_role[role] for name, role in plan.items() if role in by_role}
    of_tower = _by_role((), summed=())  # whose activations are whole on every rank
    ends |= {name: of_tower[role] for name, role in plan.items() if role in of_tower and is_in_tower(name, plan)}
    ends |= {name: Ends(inputs={0: _FEATURES}, output=_FEATURES) for name in plan if is_norm(model.get_submodule(name))}
    for name, role in plan.items():
        if role in ("row", "expert", "whole") and name.startswith("blocks."):
            for owner in _owners(name):
                ends.setdefault(owner, Ends(output=stream))
    for layer in model.blocks:
        ends[f"blocks.{layer}"] = Ends(inputs={0: stream}, output=stream)
    if model.head is None and model.norm is None and len(model.blocks):  # what travels to the next stage is whole
        last = f"blocks.{list(model.blocks)[-1]}"
        ends[last] = Ends(inputs={0: stream})
    if hasattr(model, "context_plan") and "column" in plan.values():
        for name in model.context_plan():  # (B, H, S, head_size), of this rank's heads
            ends[name] = Ends(inputs=dict.fromkeys(range(3), _HEADS), output=_HEADS)
    return ends


def is_norm(module: Any) -> bool:
    """Return whether a module with the role ``column`` norms the features of all ranks."""
    weight = getattr(module, "weight", None)
    return hasattr(module, "out_features") and weight is not None and weight.ndim == 1


def is_in_tower(name: str, plan: Mapping[str, ShardRole]) -> bool:
    """Return whether a module is inside one of the role ``tower``."""
    owners = name.split(".")
    return any(plan.get(".".join(owners[:depth])) == "tower" for depth in range(1, len(owners)))


def _by_role(stream: tuple[Part, ...], summed: tuple[str, ...]) -> dict[ShardRole, Ends]:
    """Without ``replicate``: a module of that role sees features that differ from model to model."""
    return {
        "column": Ends(output=_FEATURES, summed_inputs={0: summed}),
        "row": Ends(inputs={0: _FEATURES}, output=stream),
        "embedding": Ends(output=stream),
        "vocab": Ends(summed_inputs={0: summed}),
        "expert": Ends(output=stream, summed_inputs={0: summed}),
        "router": Ends(),
        "whole": Ends(output=stream),
        "sequence": Ends(inputs={0: stream}, output=(), summed_output=summed),
        "residual": Ends(inputs={0: stream}, output=stream),
        "tower": Ends(),
    }


def _owners(name: str) -> list[str]:
    """The modules between the block and the one of this name, the block excluded."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(3, len(parts))]
