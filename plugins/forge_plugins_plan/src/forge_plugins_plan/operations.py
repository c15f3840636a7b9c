"""Operations on tensors without memory. What one gives hangs on the forms of what it is given, so that torch is asked
once a form. To make the like again takes a fraction of the time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

from forge_plugins_plan.work import Work

_NAMESPACES = ("aten", "fsdp", "_c10d_functional")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_OTHERS = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@attrs.frozen
class _Made:
    """A tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    """All that Python knows of a fake tensor, but its mode."""
    seen: int | None
    """The place of the argument that has its storage; ``None`` if it has one of its own."""
    offset: int

    def again(self, args: Sequence[Any], mode: Any) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            meta = self._meta(None if self.seen is None else args[self.seen].untyped_storage())
        fake: Any = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self.attributes)
        fake.fake_mode = mode
        return fake  # type: ignore[no-any-return]

    def _meta(self, storage: torch.UntypedStorage | None) -> torch.Tensor:
        if storage is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return torch.empty(0, dtype=self.dtype, device="meta").set_(storage, self.offset, self.shape, self.stride)


@attrs.frozen
class _Given:
    """The argument of a place."""

    place: int

    def again(self, args: Sequence[Any], _: Any) -> Any:
        return args[self.place]


@attrs.frozen
class _Value:
    """No tensor."""

    value: int | None

    def again(self, *_: Any) -> int | None:
        return self.value


@attrs.frozen
class _Several:
    kind: type
    """A tuple or a list."""
    results: Sequence[Any]

    def again(self, args: Sequence[Any], mode: Any) -> Any:
        return self.kind(one.again(args, mode) for one in self.results)


_Result = _Made | _Given | _Value | _Several


@attrs.define
class _Known:
    """What is known of an operation on what has these forms."""

    result: _Result | None = None
    """``None``: torch has to be asked."""
    was_asked: bool = False
    works: dict[str, Work | None] = attrs.field(factory=dict)


_KNOWN: dict[tuple[Any, ...], _Known] = {}


def asked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Work | None] | None, Any]:
    """What an operation gives, and before it what it has been charged with on arguments of these forms: a mapping by
    phase, which the caller fills, or nothing if more than forms decide."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    form, tensors = _form(func, args, kwargs)
    if form is None or mode is None:
        return None, func(*args, **kwargs)
    known = _KNOWN.get(form)
    if known is None:
        known = _KNOWN[form] = _Known()
    if known.result is not None:
        return known.works, known.result.again(args, mode)
    result = func(*args, **kwargs)
    if not known.was_asked:
        known.was_asked = True
        storages = dict.fromkeys(map(_storage, tensors), -1)
        storages.update((_storage(one), place) for place, one in enumerate(args) if isinstance(one, FakeTensor))
        known.result = _result(args, result, storages)
    return known.works, result


def _form(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...] | None, list[FakeTensor]]:
    """All that decides what an operation gives, nothing if there is more; and the tensors that it is given."""
    form: list[Any] = [func, *kwargs]
    tensors: list[FakeTensor] = []
    if not _hangs_on_forms(func) or not _describe(args, form, tensors) or not _describe(kwargs.values(), form, tensors):
        return None, tensors
    first = {id(one): place for place, one in reversed([*enumerate(tensors)])}
    if len(first) < len(tensors):  # what is given twice is read once
        form.append(tuple(first[id(one)] for one in tensors))
    return tuple(form), tensors


@functools.cache
def _hangs_on_forms(func: Any) -> bool:
    """Return whether an operation does no more than to give something, and to write into what it is given."""
    return func.namespace in _NAMESPACES and "lift" not in func.__name__ and not _OTHERS & {*func.tags}


def _describe(values: Iterable[Any], form: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append what counts, and return whether that is all."""
    for one in values:
        kind = type(one)
        if kind is FakeTensor:
            if one.constant is not None or one.is_complex():  # which may stand for its conjugate
                return False
            tensors.append(one)
            form += (one.shape, one.stride(), one.dtype, one.storage_offset(), one.requires_grad, one.fake_device)
        elif kind in _PLAIN:
            form += (kind, one)  # 1 equals 1.0
        elif kind is list or kind is tuple:
            form += (kind, len(one))
            if not _describe(one, form, tensors):
                return False
        else:
            return False
    return True


def _result(args: Sequence[Any], result: Any, storages: dict[int, int]) -> _Result | None:
    """
    Args:
        storages: the places of the arguments that have them, -1 for what can be had by no place. What the operation has
            made joins them.
    """
    if type(result) in (tuple, list):
        several = [_result(args, one, storages) for one in result]
        return None if None in several else _Several(type(result), several)
    if result is None or isinstance(result, int):
        return _Value(result)
    if type(result) is not FakeTensor or result.constant is not None or result.requires_grad or result.is_complex():
        return None
    place = next((place for place, one in enumerate(args) if one is result), None)
    if place is not None:
        return _Given(place)
    seen = storages.get(_storage(result))
    if seen == -1:
        return None
    made = _Made(
        tuple(result.shape),
        result.stride(),
        result.dtype,
        result.fake_device,
        {name: value for name, value in vars(result).items() if name != "fake_mode"},
        seen,
        int(result.storage_offset()),
    )
    if seen is None:
        storages[_storage(result)] = -1
        if made.again(args, None).untyped_storage().nbytes() != result.untyped_storage().nbytes():
            return None
    return made


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata
