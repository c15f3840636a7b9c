"""Whether two blocks of a model are the same but for the values of their tensors."""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle


def alike(one: Any, other: Any, names: tuple[str, str]) -> bool:
    """Compare objects by all that they hold, however deep. What both hold, such as a mesh, is taken for equal; of
    tensors everything counts but the values. In doubt they are unlike.

    Args:
        names: their own, which may stand in what they hold.
    """
    return _Comparison(names).equal(one, other)


class _Comparison:
    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._assumed: dict[tuple[int, int], tuple[Any, Any]] = {}
        """Pairs that are being compared, or have been; held on to, as ids are used again."""

    def equal(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if type(one) in _VALUES:
            return bool(one == other)
        if (id(one), id(other)) in self._assumed:
            return True
        self._assumed[id(one), id(other)] = one, other
        return self._equal_of_one_type(one, other)

    def _equal_of_one_type(self, one: Any, other: Any) -> bool:  # noqa: C901  # a list of types
        match one:
            case str():
                return bool(one == other) or self._nameless(one, 0) == self._nameless(other, 1)
            case set() | frozenset() | DeviceMesh():
                return bool(one == other)
            case RemovableHandle():
                return True
            case torch.Tensor():
                return self._equal_tensors(one, other)
            case nn.Module():
                return self._equal_modules(one, other)
            case list() | tuple():
                return len(one) == len(other) and all(map(self.equal, one, other))
            case Mapping():
                return [*one] == [*other] and all(map(self.equal, one.values(), other.values()))
            case types.FunctionType():
                held = [(each.__defaults__, each.__kwdefaults__, _cells(each)) for each in (one, other)]
                return one.__code__ is other.__code__ and self.equal(*held)
            case types.MethodType():
                return one.__func__ is other.__func__ and self.equal(one.__self__, other.__self__)
            case partial():
                return self.equal(*((each.func, each.args, each.keywords) for each in (one, other)))
            case weakref.ref():
                return self.equal(one(), other())
        if not hasattr(one, "__dict__") and not hasattr(one, "__slots__"):
            return bool(one == other)
        return self.equal(_held(one), _held(other))

    def _nameless(self, text: str, which: int) -> str:
        return re.sub(rf"\b{re.escape(self._names[which])}\b", "*", text)

    def _equal_tensors(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        form = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in (one, other)]
        if form[0] != form[1]:
            return False
        return not isinstance(one, DTensor) or one._spec == other._spec  # type: ignore[attr-defined]  # same type

    def _equal_modules(self, one: nn.Module, other: nn.Module) -> bool:
        of_one, of_other = dict(vars(one)), dict(vars(other))
        for name in [name for name in of_one if "hooks" in name]:  # by numbers that count all hooks of the process
            hooks, others = of_one.pop(name) or {}, of_other.pop(name, None) or {}
            if (hooks or others) and not self.equal([*hooks.values()], [*others.values()]):
                return False
        return self.equal(of_one, of_other)


_VALUES = {int, float, bool, bytes, torch.dtype, torch.device, torch.Size}
"""Types of which most of what is compared is, and which hold nothing."""

_NUMBERS = ("_orig_param_uid",)
"""Attributes that number the objects of the process. FSDP has one."""


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _held(one: Any) -> dict[str, Any]:
    slots = [name for kind in type(one).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(one, name)]
    held = {**{name: getattr(one, name) for name in slots if name != "__weakref__"}, **getattr(one, "__dict__", {})}
    return {name: value for name, value in held.items() if name not in _NUMBERS}
