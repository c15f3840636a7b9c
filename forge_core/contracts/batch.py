"""Batches: what their entries are, who takes them, and the loss of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forge_core.contracts.loss import Loss


@attrs.frozen(kw_only=True)
class Entry:
    """One entry of a batch."""

    dims: tuple[str, ...]
    """The names of its dimensions, ``"sample"`` first. What is cut into positions has ``"position"`` among them."""
    dtype: str = "int64"
    """Its name in numpy."""
    sizes: tuple[int | None, ...] = ()
    """How large each of its dimensions is. ``None`` of ``"sample"`` and ``"position"``, and of one that differs from
    batch to batch; empty stands for ``None`` of all."""
    wanted_by: Literal["model", "engine", "loss"] = "model"
    """``"engine"``: not given to the model's forward, such as ``source``. ``"loss"``: given to a loss that takes it
    (``Loss``) alone; training by another loss is refused."""
    absent: int | None = None
    """Stands in a mixture for samples of sources that do not have the entry. ``None``: such sources cannot be mixed
    with one that has it."""

    def shape(self, sample: int, position: int) -> tuple[int | None, ...]:
        """Its shape in a batch of so many samples of so many positions; ``None`` where that is not known."""
        sizes = {**dict(zip(self.dims, self.sizes, strict=False)), "sample": sample, "position": position}
        return tuple(sizes.get(dim) for dim in self.dims)


KNOWN: Mapping[str, Entry] = {
    **{name: Entry(dims=("sample", "position")) for name in ("tokens", "targets", "positions", "document")},
    "weights": Entry(dims=("sample", "position"), dtype="float32", wanted_by="engine"),
}
"""Entries that need no description. ``positions`` count from 0 in each document, and are −1 at padding: layers leave it
out, such as routers of experts, and it is no token that is counted. ``weights`` are those of targets in the training
loss: finite, and not negative."""


@runtime_checkable
class DescribedSource(Protocol):
    """A data source that describes its entries; those in ``KNOWN`` need none."""

    def entries(self) -> Mapping[str, Entry]:
        """By name; those not in ``KNOWN`` at least."""


@runtime_checkable
class NamesSources(DescribedSource, Protocol):
    """A source that is made of several. Its batches have an entry ``source``, ``("sample",)`` int64, wanted by the
    engine: the number of each sample's source. The loss of each is logged."""

    names: Sequence[str]
    """Names of the sources, by their numbers."""


@runtime_checkable
class MixedSource(NamesSources, Protocol):
    """A ``PositionedSource`` that is made of several. The tokens of each are logged as well."""

    def counts(self, position: int) -> Sequence[int]:
        """How many samples of each source stand before ``position``."""


class BatchLoss(Protocol):
    """The loss as the engine gives it to an executor."""

    def bind(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Loss]:
        """Return what forward is given of ``batch``, and the loss of this batch. Call it once a forward."""


class LossOfPositions(Protocol):
    """A loss of one batch that knows something of each of its positions, such as its weight."""

    def of_part(self, cut: Callable[[torch.Tensor], torch.Tensor], /) -> Loss:
        """Return the loss of a part of the positions. A pass that gives the model a part of each sequence gives it this
        loss, where the loss has the method.

        Args:
            cut: ``(B, S)`` to the positions of the part.
        """


def bind(loss: Loss | BatchLoss, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Loss]:
    """Return what a model's forward is given of a microbatch, and the loss to give it; executors call it for each one.

    Without the entries that are the engine's. A loss that is a plain function of hidden states stays as it is.
    """
    bound: Any = loss
    return bound.bind(batch) if hasattr(loss, "bind") else (dict(batch), bound)
