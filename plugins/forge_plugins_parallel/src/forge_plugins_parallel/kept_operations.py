"""Operations whose results selective recomputation keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from forge_core.errors import ConfigError, nearest_hint

_TABLE = "parallel.passes.activation_checkpointing"
_COMMUNICATION = frozenset(
    {
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_to_all_single",
    }
)
"""Kept as well: to repeat it costs every rank, and its result is no larger than what was sent. What is gathered is, and
with ``tp`` 8 to keep it would take more than to recompute nothing, where results of products are not kept."""

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten._scaled_mm"})
"""Without a bias, with one, and in float8. A model that names one of the first two means all: tensor parallelism takes
the bias off a layer, and a float8 pass its own product in."""


@attrs.frozen
class KeptOperations:
    """By their names (``operation_name``)."""

    names: frozenset[str] = frozenset()
    products_every: int = 1
    """Of matrix products, the results of each n-th are kept, beginning with the first of a block."""

    @classmethod
    def of(cls, model: Any, patterns: Collection[str], products_every: int) -> KeptOperations:
        """Operations that fit ``patterns``; without patterns, the ones that ``model`` calls dear, and communication.

        Raises:
            ConfigError: a pattern fits no operation, or there are no products of which to keep each n-th.
        """
        if patterns:
            names = frozenset(itertools.chain.from_iterable(map(_fitting, patterns)))
        else:
            names = frozenset(name for name, decision in model.recompute_plan().items() if decision == "keep")
            names |= _COMMUNICATION if names else frozenset()
        if not names.isdisjoint(_PRODUCTS):
            names |= _PRODUCTS
        elif products_every > 1:
            raise ConfigError(
                f"{_TABLE}.products_every: no product of matrices is among the operations that are kept; leave it out, "
                'or add "aten.mm" to keep'
            )
        return cls(names, products_every)

    def in_one_forward(self) -> Callable[[Any], bool]:
        """Return what says, of each operation of one forward of a block in their order, whether its result is kept."""
        products = itertools.count()

        def keeps(operation: Any) -> bool:
            name = operation_name(operation)
            return name in self.names and (name not in _PRODUCTS or next(products) % self.products_every == 0)

        return keeps


def operation_name(operation: Any) -> str:
    """As a model's ``recompute_plan`` writes it: ``"aten.mm"``, ``"higher_order.flex_attention"``."""
    if isinstance(operation, torch._ops.OpOverload):
        return str(operation.overloadpacket)
    return f"higher_order.{operation.name()}"


def _fitting(pattern: str) -> list[str]:
    known = set(_known_names())
    if fitting := [name for name in known if fnmatchcase(name, pattern)]:
        return fitting
    raise ConfigError(
        f'{_TABLE}.keep: "{pattern}" fits no operation of torch or of a plugin that '
        f"gives a new tensor{nearest_hint(pattern, known)}"
    )


def _known_names() -> Iterator[str]:
    """Leave out operations that write into what they are given: there would be nothing to keep."""
    for name in torch._C._dispatch_get_all_op_names():
        packet = name.partition(".")[0].replace("::", ".")
        if not packet.endswith("_"):
            yield packet
    for name in torch._ops._higher_order_ops:
        yield f"higher_order.{name}"
