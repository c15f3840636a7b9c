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

    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        if self.value is not None:
            return super().apply(placed, value)
        over = _samples_and_positions(placed.site.dims)
        return Fn(self.site, at=self.at, function=lambda part: part.mean(over, keepdim=True)).apply(placed, value)

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        assert self.value is not None, "that of a forward depends on what the dimensions of the site are"
        return _on(self.value, value)


@attrs.frozen(kw_only=True, eq=False)
class Resample(Intervention):
    """The values of other samples of the batch: each has those of another one."""

    kind = "resample"
    seed: int = 0

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if len(value) < 2:
            raise ConfigError(f"resample: site {name} has one sample, and no other one to take the place of its value")
        order = torch.randperm(len(value), generator=torch.Generator().manual_seed(self.seed)).to(value.device)
        return value[torch.empty_like(order).scatter_(0, order, order.roll(1))]  # in a ring, so that none stays


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
    """``(r, width)``, which need be neither orthogonal nor independent."""
    keep: bool = False
    """Keep the part in the subspace, and not the rest."""

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if self.directions.ndim != 2 or self.directions.shape[1] != value.shape[-1]:
            given = tuple(self.directions.shape)
            raise ConfigError(f"directions: site {name} has {value.shape[-1]} features, and these are {given}")
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        # of dependent directions, a QR decomposition makes up others
        _, sizes, rows = torch.linalg.svd(self.directions.to(wide), full_matrices=False)
        basis = rows[sizes > sizes.max() * max(self.directions.shape) * torch.finfo(wide.dtype).eps]
        within: torch.Tensor = (wide @ basis.T) @ basis
        return (within if self.keep else wide - within).to(value.dtype)


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
    return KINDS[kind](**{key: _read(key, value) for key, value in keys.items()})


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "site": (lambda one: isinstance(one, str), "a name or a pattern"),
    "at": (
        lambda one: isinstance(one, Mapping) and all(map(_is_index, one.values())),
        "a table of whole numbers and lists of them",
    ),
    "tokens": (lambda one: _is_index(one) and _is_from_0(one), "a list of whole numbers from 0"),
    "steps": (lambda one: _is_index(one) and _is_from_0(one), "a list of whole numbers from 0"),
    "seed": (lambda one: type(one) is int, "a whole number"),
    "scale": (lambda one: type(one) in (int, float), "a number"),
    "factor": (lambda one: type(one) in (int, float), "a number"),
    "keep": (lambda one: isinstance(one, bool), "true or false"),
    "source": (lambda one: isinstance(one, Mapping), "a table of values by site"),
}
"""By the keys of changes: what is right, and its name."""


def _is_index(given: Any) -> bool:
    return all(type(one) is int for one in (given if isinstance(given, list) else [given]))


def _is_from_0(given: Any) -> bool:
    return isinstance(given, list) and min(given, default=0) >= 0


def _read(key: str, value: Any) -> Any:
    """The value of a key of a table.

    Raises:
        ConfigError: it is of another type.
    """
    if key in _FORMS and not _FORMS[key][0](value):
        raise ConfigError(f"{key}: must be {_FORMS[key][1]}, got {value!r}")
    if key == "source":
        return {name: _tensor(f"source.{name}", one) for name, one in value.items()}
    return _tensor(key, value) if key in ("value", "directions") else value


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


def _samples_and_positions(dims: Sequence[str]) -> list[int]:
    """The numbers of these dimensions. Keys of attention have the positions where no other dimension has."""
    names = {"sample", "tile", "patch", "position" if "position" in dims else "key"}
    return [number for number, dim in enumerate(dims) if dim in names] or [0]


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
