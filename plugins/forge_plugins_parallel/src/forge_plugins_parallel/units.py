"""The modules of a model that are gathered, recomputed and compiled on their own: blocks, and further ``units``."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_core.errors import PluginError


def units_of(model: Any) -> dict[str, nn.Module]:
    """Blocks and further units (``TowerModel.units``) by their qualified names, in the order in which they run.

    Raises:
        PluginError: the model names a unit that it does not have.
    """
    blocks = {f"blocks.{name}": block for name, block in model.blocks.items()}
    before: dict[str, nn.Module] = {}
    after: dict[str, nn.Module] = {}
    at_end = [f"{part}." for part, stage in stages_of_parts(model).items() if stage == "last"]
    for name in model.units() if hasattr(model, "units") else ():
        try:
            unit = model.get_submodule(name)
        except AttributeError as error:
            raise PluginError(
                f"{type(model).__qualname__}.units names {name!r}, which is no module of the model"
            ) from error
        (after if name.startswith(tuple(at_end)) else before)[name] = unit
    return {**before, **blocks, **after}


def stages_of_parts(model: Any) -> dict[str, str]:
    """``TowerModel.stage_of``, of any model."""
    return dict(model.stage_of()) if hasattr(model, "stage_of") else {}


def replace_unit(model: nn.Module, name: str, unit: nn.Module) -> None:
    """Put a module in the place of the one of this name."""
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner).register_module(key, unit)
