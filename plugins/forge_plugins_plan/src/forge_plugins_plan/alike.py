"""Whether two blocks of a model, or two stages of it, are the same but for the values of their tensors."""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

Names = Sequence[str]


def alike(one: Any, other: Any, names: tuple[Names, Names], *, worlds: int = 1) -> bool:
    """Compare objects by all that they hold, however deep. What both hold, such as a mesh, is taken for equal; of
    tensors everything counts but the values. In doubt they are unlike.

    Args:
        names: of each its own and those of its parts, as many, which may stand in what they hold.
        worlds: 2 if each has been made on another rank, with process groups of its own.
    """
    return _Comparison(names, worlds).equal(one, other)


def stages_alike(one: nn.Module, other: nn.Module) -> bool:
    """Compare parts of a model on two ranks, whose blocks have other names."""
    if block_names(one) is None or len(block_names(one) or ()) != len(block_names(other) or ()):
        return False
    comparison = _Comparison((block_names(one) or (), block_names(other) or ()), worlds=2)
    comparison.assume(one, other)  # hooks hold them
    comparison.assume(one.blocks, other.blocks)
    return comparison.equal(_held_but_names(one), _held_but_names(other))


def block_names(part: Any) -> Names | None:
    """The names of a model's blocks, nothing if they are not in a ``ModuleDict``."""
    blocks = getattr(part, "blocks", None)
    return [f"blocks.{name}" for name in blocks] if isinstance(blocks, nn.ModuleDict) else None


def by_block(part: Any) -> list[Mapping[str, Any]]:
    """All that a model holds by the names of its blocks."""
    return [value for value in vars(part).values() if isinstance(value, Mapping) and {*part.blocks} <= {*value}]


def _held_but_names(part: Any) -> list[Any]:
    """The blocks, each with what the part holds by its name, and all else."""
    maps = by_block(part)
    rest = {name: value for name, value in vars(part).items() if all(value is not one for one in maps)}
    modules = {name: module for name, module in rest.pop("_modules").items() if name != "blocks"}
    blocks = [[block, *(one[name] for one in maps)] for name, block in part.blocks.items()]
    return [type(part), blocks, modules, _Attributes(rest)]


@attrs.frozen
class _Attributes:
    """The attributes of a module."""

    held: dict[str, Any]


class _Comparison:
    def __init__(self, names: tuple[Names, Names], worlds: int) -> None:
        self._worlds = worlds
        self._places = [{name: place for place, name in enumerate(each)} for each in names]
        self._pattern = [re.compile(rf"\b({'|'.join(map(re.escape, each))})\b") for each in names]
        self._assumed: dict[tuple[int, int], tuple[Any, Any]] = {}
        """Pairs that are being compared, or have been; held on to, as ids are used again."""

    def assume(self, one: Any, other: Any) -> None:
        """Take them for equal where they are held."""
        self._assumed[id(one), id(other)] = one, other

    def equal(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if type(one) in _VALUES:
            return bool(one == other)
        if (id(one), id(other)) in self._assumed:
            return True
        self.assume(one, other)
        return self._equal_of_one_type(one, other)

    def _equal_of_one_type(self, one: Any, other: Any) -> bool:  # noqa: C901  # a list of types, frequent ones first
        match one:
            case str():
                return bool(one == other) or self._nameless(one, 0) == self._nameless(other, 1)
            case list() | tuple():
                return len(one) == len(other) and all(map(self.equal, one, other))
            case dict():
                return self._equal_mappings(one, other)
            case types.FunctionType():
                held = [(each.__defaults__, each.__kwdefaults__, _cells(each)) for each in (one, other)]
                return one.__code__ is other.__code__ and self.equal(*held)
            case types.MethodType():
                return one.__func__ is other.__func__ and self.equal(one.__self__, other.__self__)
            case torch.Tensor():
                return self._equal_tensors(one, other)
            case nn.Module() | torch.optim.Optimizer():
                return self._equal_attributes(vars(one), vars(other))
            case _Attributes():
                return self._equal_attributes(one.held, other.held)
            case partial():
                return self.equal(*((each.func, each.args, each.keywords) for each in (one, other)))
            case weakref.ref():
                return self.equal(one(), other())
            case RemovableHandle():
                return True
            case set() | frozenset() | DeviceMesh():
                return bool(one == other)
            case dist.ProcessGroup():
                return self._worlds > 1 and _in_words(one) == _in_words(other)
            case Mapping():
                return self._equal_mappings(one, other)
        if not hasattr(one, "__dict__") and not hasattr(one, "__slots__"):
            return bool(one == other)
        return self.equal(_held(one), _held(other))

    def _nameless(self, text: str, which: int) -> str:
        return self._pattern[which].sub(lambda found: f"*{self._places[which][found[0]]}", text)

    def _equal_mappings(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
        if len(one) != len(other):
            return False
        return all(map(self.equal, one, other)) and all(map(self.equal, one.values(), other.values()))

    def _equal_tensors(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        form = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in (one, other)]
        if form[0] != form[1]:
            return False
        return not isinstance(one, DTensor) or one._spec == other._spec  # type: ignore[attr-defined]  # same type

    def _equal_attributes(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        of_one, of_other = dict(one), dict(other)
        for name in [name for name in of_one if "hooks" in name]:  # by numbers that count all hooks of the process
            hooks, others = of_one.pop(name) or {}, of_other.pop(name, None) or {}
            if (hooks or others) and not self.equal([*hooks.values()], [*others.values()]):
                return False
        return self.equal(of_one, of_other)


_VALUES = {int, float, bool, bytes, torch.dtype, torch.device, torch.Size}
"""Types of which most of what is compared is, and which hold nothing."""

_NUMBERS = ("_orig_param_uid",)
"""Attributes that number the objects of the process. FSDP has one."""


def _in_words(group: dist.ProcessGroup) -> tuple[str, int, int]:
    """Ranks that are as far apart in two worlds have the same groups, each along an axis of the mesh."""
    return group.group_desc, group.size(), group.rank()


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


@functools.cache
def _slots(kind: Any) -> list[str]:
    return [name for each in kind.__mro__ for name in vars(each).get("__slots__", ()) if name != "__weakref__"]


def _held(one: Any) -> dict[str, Any]:
    kind: Any = type(one)
    slots = [name for name in _slots(kind) if hasattr(one, name)]
    held = {**{name: getattr(one, name) for name in slots}, **getattr(one, "__dict__", {})}
    return {name: value for name, value in held.items() if name not in _NUMBERS}
