"""Changes of a value, each a small class that says what is put in its place.

A change is for the sites of a name or a pattern, and for what ``at`` says of its dimensions, by the names of
``Site.dims``: an index, a list of indices, or nothing for all. ``tokens`` and ``steps`` say at which tokens, and in
which forwards. All but ``Fn`` can be written to TOML or JSON and read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs
import torch

from forge_core.errors import ConfigError, nearest, nearest_hint
from forge_plugins_interp.observation import Change
from forge_plugins_interp.sites import PlacedSite, Sites

Index = int | Sequence[int]


@attrs.frozen(kw_only=True, eq=False)
class WholeIntervention(ABC):
    """A change that is given the whole value of a site. Most changes are an ``Intervention``, which is given a part."""

    kind: ClassVar[str]
    site: str = attrs.field(kw_only=False)
    """A name or a pattern, such as ``blocks.*.mlp_out``."""
    at: Mapping[str, Index] = attrs.field(factory=dict)
    """What is changed of each dimension: ``{"position": -1, "head": [0, 3]}``."""
    tokens: Sequence[int] = ()
    """Ids of tokens: only positions with one of these are changed; nothing for all."""
    steps: Sequence[int] = ()
    """Numbers of forwards, from 0 for the first one, such as those of a text that is generated; nothing for all."""

    def placed_on(self, sites: Sites) -> list[tuple[PlacedSite, Change]]:
        """The sites on this rank that are changed, each with the change of its whole value.

        Raises:
            ConfigError: there is no such site.
        """
        return [(one, partial(self.apply, one)) for one in sites.chosen([self.site])]

    @abstractmethod
    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        """The whole value with the change in it.

        Raises:
            ConfigError: the site has no such dimension, or an index lies beyond it.
        """

    def _indices(self, placed: PlacedSite, value: torch.Tensor) -> list[torch.Tensor]:
        dims = placed.site.dims
        for dim in self.at:
            if dim not in dims:
                hint = nearest_hint(dim, dims)
                raise ConfigError(f"at.{dim}: site {placed.name} has the dimensions {', '.join(dims)}{hint}")
        found = []
        for dim, length in zip(dims, value.shape, strict=True):
            given = self.at.get(dim, range(length))
            indices = [given] if isinstance(given, int) else list(given)
            for index in indices:
                if not -length <= index < length:
                    raise ConfigError(f"at.{dim}: {index} lies beyond the {length} of site {placed.name}")
            found.append(torch.tensor([index % length for index in indices], device=value.device))
        return found


@attrs.frozen(kw_only=True, eq=False)
class Intervention(WholeIntervention):
    """A change that is given what ``at`` says, and no more."""

    @abstractmethod
    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """The new value of what ``at`` says.

        Args:
            value: that part of it; a dimension with one index has length 1.
            name: of the site.
        """

    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        if not self.at:
            return _like(self.changed(value, placed.name), value, placed.name)
        grid = torch.meshgrid(*self._indices(placed, value), indexing="ij")
        part = value[grid]
        return value.index_put(grid, _like(self.changed(part, placed.name), part, placed.name))


@attrs.frozen(kw_only=True, eq=False)
class Zero(Intervention):
    """Zeros."""

    kind = "zero"

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return torch.zeros_like(value)


@attrs.frozen(kw_only=True, eq=False)
class Mean(Intervention):
    """A mean over many samples, or that over the samples and positions that are there."""

    kind = "mean"
    value: torch.Tensor | None = None
    """It is broadcast over what is changed; ``None``: the mean over samples and positions of this forward."""

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if self.value is not None:
            return _on(self.value, value)
        return value.mean(tuple(range(min(2, value.ndim - 1))), keepdim=True)


@attrs.frozen(kw_only=True, eq=False)
class Resample(Intervention):
    """The values of other samples of the batch."""

    kind = "resample"
    seed: int = 0

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        order = torch.randperm(len(value), generator=torch.Generator().manual_seed(self.seed))
        return value[order.to(value.device)]


@attrs.frozen(kw_only=True, eq=False)
class Replace(Intervention):
    """A value that is given."""

    kind = "replace"
    value: torch.Tensor
    """It is broadcast over what is changed."""

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return _on(self.value, value)


@attrs.frozen(kw_only=True, eq=False)
class Add(Intervention):
    """A vector on top, as for steering (Turner et al. 2023, arXiv 2308.10248)."""

    kind = "add"
    value: torch.Tensor
    """It is broadcast over what is changed."""
    scale: float = 1.0

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return value + self.scale * _on(self.value, value)


@attrs.frozen(kw_only=True, eq=False)
class Scale(Intervention):
    """A factor."""

    kind = "scale"
    factor: float

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return value * self.factor


@attrs.frozen(kw_only=True, eq=False)
class Project(Intervention):
    """Without the part in a subspace, or with that part alone."""

    kind = "project"
    directions: torch.Tensor
    """``(r, width)``, which need not be orthogonal."""
    keep: bool = False
    """Keep the part in the subspace, and not the rest."""

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        basis, _ = torch.linalg.qr(_on(self.directions, value).T.float())
        within: torch.Tensor = ((value.float() @ basis) @ basis.T).to(value.dtype)
        return within if self.keep else value - within


@attrs.frozen(kw_only=True, eq=False)
class Patch(WholeIntervention):
    """The value of the same site in another forward, such as one on a clean prompt."""

    kind = "patch"
    source: Mapping[str, torch.Tensor]
    """By the names of sites, as an observation gives them."""

    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        if placed.name not in self.source:
            raise ConfigError(f"patch: site {placed.name} was not observed in the forward that is patched from")
        whole = self.source[placed.name].to(value.device, value.dtype)
        if whole.shape != value.shape:
            raise ConfigError(
                f"patch: site {placed.name} was observed with the shape {tuple(whole.shape)}, and has "
                f"{tuple(value.shape)} here"
            )
        if not self.at:
            return whole.expand_as(value)
        grid = torch.meshgrid(*self._indices(placed, value), indexing="ij")
        return value.index_put(grid, whole[grid])


@attrs.frozen(kw_only=True, eq=False)
class Fn(Intervention):
    """Any function of the value."""

    kind = "fn"
    function: Callable[[torch.Tensor], torch.Tensor]
    """It must be a function of the value alone: with recomputation it is called twice."""

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return self.function(value)


KINDS: Mapping[str, type[WholeIntervention]] = {
    one.kind: one for one in (Zero, Mean, Resample, Replace, Add, Scale, Project, Patch)
}
"""Interventions that can be written to a file, by their names there."""


def to_table(change: WholeIntervention) -> dict[str, Any]:
    """The change as a table of plain values, for TOML and JSON.

    Raises:
        ConfigError: it holds a function or a model.
    """
    if change.kind not in KINDS:
        raise ConfigError(
            f"a change {type(change).__name__} cannot be written: it holds a function or a model of Python"
        )
    table = {"change": change.kind}
    for field in attrs.fields(type(change)):
        value = getattr(change, field.name)
        if value is not None and not (field.name in ("at", "tokens", "steps") and not value):
            table[field.name] = _plain(value)
    return table


def from_table(table: Mapping[str, Any]) -> WholeIntervention:
    """The change that ``to_table`` has written.

    Raises:
        ConfigError: an unknown change or key, a key that is missing, or a value of another type.
    """
    keys = dict(table)
    kind = keys.pop("change", None)
    if kind not in KINDS:
        hint = nearest_hint(str(kind), KINDS)
        raise ConfigError(f"change: must be one of {', '.join(KINDS)}, got {kind!r}{hint}")
    fields = {field.name: field for field in attrs.fields(KINDS[kind])}
    for key in keys:
        if key not in fields:
            close = nearest(key, fields)
            hint = f"did you mean {close!r}? " if close else ""
            raise ConfigError(f"{key}: no key of the change {kind!r}; {hint}it has {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in keys:
            raise ConfigError(f"{name}: the change {kind!r} needs it")
    tensors = ("value", "directions")
    read: dict[str, Any] = {key: _tensor(key, value) if key in tensors else value for key, value in keys.items()}
    for key in read.keys() & {"tokens", "steps"}:
        if not isinstance(read[key], list) or any(type(one) is not int or one < 0 for one in read[key]):
            raise ConfigError(f"{key}: must be a list of whole numbers from 0, got {read[key]!r}")
    if "source" in read:
        read["source"] = {name: _tensor(f"source.{name}", value) for name, value in read["source"].items()}
    return KINDS[kind](**read)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float().tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _tensor(key: str, value: Any) -> torch.Tensor:
    try:
        return torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: must be a number or lists of numbers of equal lengths") from error


def _on(given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return given.to(value.device, value.dtype)


def _like(changed: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return changed.to(value.dtype).expand_as(value)
    except RuntimeError:
        raise ConfigError(
            f"site {name}: a value of the shape {tuple(changed.shape)} cannot be put in the place of "
            f"{tuple(value.shape)}"
        ) from None
