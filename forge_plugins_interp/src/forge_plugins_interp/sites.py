"""The sites of a model in its layout: found by name, and placed over ranks.

A site is one that the model declares; or a module by its canonical name, which stands for its output, and with
``.input`` for its first argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch.distributed as dist
from torch import nn

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.model import canonical_name
from forge_core.contracts.observation import ANY, Ends, ObservableModule, Part, Site
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError, PluginError, nearest
from forge_core.job import catalog_of
from forge_core.registry.discovery import discover
from forge_plugins_interp.aliases import canonical_site, module_names
from forge_plugins_interp.batch_shape import BATCH, BatchShape
from forge_plugins_interp.placement import Cut
from forge_plugins_interp.site_pattern import matches


@attrs.define(eq=False)
class PlacedSite:
    """A site, with the module that has it on this rank."""

    name: str
    site: Site
    """Of a module by name: the names of its dimensions are those of its last value, and before, those of the batch."""
    module: nn.Module
    cuts: Sequence[Cut]
    """How its value lies over ranks, from the outermost cut to the innermost."""
    sums: Sequence[dist.ProcessGroup]
    """Groups over whose ranks its gradient is the sum."""

    is_compiled: bool
    """The model, or a part of it, is."""
    beyond_argument: Sequence[Cut] = ()
    """Of one that is computed and lies as the output: the cuts that the argument does not have."""
    batch: BatchShape | None = None
    """Of a module by name, of whose value the model declares nothing."""
    hidden: str = ""
    """Why it cannot be computed in this layout, if that is so."""


@attrs.frozen(eq=False)
class Sites:
    """All sites of a model's parts on this rank, and the names of the sites of other pipeline stages, each with the
    rank along ``pp`` that has it."""

    here: Mapping[str, PlacedSite]
    """Sites that the model declares."""
    elsewhere: Mapping[str, int]
    modules: Mapping[str, Callable[[], PlacedSite]]
    """Modules by name, which are placed once they are asked for."""
    modules_elsewhere: Mapping[str, int]
    given: Sequence[PlacedSite]
    """What each part of the model on this rank is given first: tokens, or hidden states of an earlier stage."""

    @classmethod
    def of(
        cls, parts: Sequence[nn.Module], passes: Iterable[ComponentRef], mesh: Mesh, build: ComponentBuilder
    ) -> Sites:
        """Find them. All ranks call it together.

        Args:
            parts: this rank's, of the model.
            passes: applied to it, in their order.

        Raises:
            ConfigError: a pass that shares out values does not say how they lie.
        """
        return cls.placed(parts, layouts_of(parts, passes, build), mesh)

    @classmethod
    def placed(
        cls,
        parts: Sequence[nn.Module],
        layouts: Sequence[PassLayout],
        mesh: Mesh,
        *,
        dims: tuple[str, ...] = BATCH,
        needed: int = len(BATCH),
    ) -> Sites:
        """Find them in these layouts. All ranks call it together.

        Args:
            dims, needed: as of ``BatchShape``.
        """
        here: dict[str, PlacedSite] = {}
        modules: dict[str, Callable[[], PlacedSite]] = {}
        given = []
        for number, part in enumerate(parts):
            placing = _Placing(by_canonical_name(part), [one.of_part(number) for one in layouts], mesh)
            sites = declared(part)
            here |= {name: placing.declared(name, site) for name, site in sites.items()}
            given.append(placing.declared("", Site(module="", where="input", dims=dims)))
            modules |= placing.modules(sites, BatchShape(part, given[-1].cuts, dims, needed))
        elsewhere, modules_elsewhere = (
            {
                name: rank
                for rank, names in enumerate(mesh.gather_over("pp", list(own)))
                for name in names
                if name not in own
            }
            for own in (here, modules)
        )
        return cls(here, elsewhere, modules, modules_elsewhere, given)

    def chosen(self, patterns: Iterable[str]) -> list[PlacedSite]:
        """The sites on this rank that a name or a pattern (``blocks.*.resid_post``) means, in the order of the model.
        An alias of TransformerLens or of transformers is a name, too. A pattern that means no site that the model
        declares means modules (``blocks.*.attention.o``, ``blocks.*.attention.o.input``).

        Raises:
            ConfigError: a pattern means no site of any stage; or a pass does not say how the values of a module lie,
                or hides what would be computed of them.
        """
        wanted: dict[str, None] = {}
        for pattern in patterns:
            wanted |= dict.fromkeys(self.names(pattern))
        modules = [place() for name, place in self.modules.items() if name in wanted and name not in self.here]
        found = [self.here[name] for name in self.here if name in wanted] + modules
        for placed in found:
            if placed.hidden:
                raise ConfigError(f"site {placed.name}: {placed.hidden}")
        return found

    def names(self, pattern: str) -> list[str]:
        """The names on all stages that a pattern means.

        Raises:
            ConfigError: there are none.
        """
        known, modules = [*self.here, *self.elsewhere], [*self.modules, *self.modules_elsewhere]
        canonical = canonical_site(pattern)
        if found := [name for name in known if matches(name, canonical)]:
            return found
        for called in (pattern, *module_names(canonical)):
            if found := [name for name in modules if matches(name, called)]:
                return found
        close = nearest(canonical, [*known, *modules])
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(f"site {pattern!r}: the model has none of that name; {hint}forge sites lists all")


def sites_of_run(parts: Sequence[nn.Module], mesh: Any, job: Job) -> Sites:
    """The sites of a model that is being trained or evaluated. All ranks call it together.

    Args:
        parts: this rank's.
        mesh: the run's ``Mesh``.
    """
    uses = [use for use in job.parallel.passes.values() if use is not None]
    return Sites.of(parts, uses, mesh, ComponentBuilder(catalog_of(job, discover)))


def declared(part: Any) -> dict[str, Site]:
    """The sites that a model, or a part of one, declares; without any, the ends of its blocks,
    if it has some."""
    if isinstance(part, ObservableModule):
        return dict(part.sites())
    if not isinstance(getattr(part, "blocks", None), nn.ModuleDict):
        return {}
    stream = ("sample", "position", "width")
    found = {}
    for layer in part.blocks:
        found[f"blocks.{layer}.resid_pre"] = Site(module=f"blocks.{layer}", where="input", dims=stream)
        found[f"blocks.{layer}.resid_post"] = Site(module=f"blocks.{layer}", dims=stream)
    return found


@attrs.frozen(eq=False)
class PassLayout:
    """How one pass has values lie."""

    name: str
    """Of the pass."""
    axes: Sequence[str]
    """Names that it serves."""
    parts: Sequence[Mapping[str, Ends]]
    """The ends of the modules of each part of the model."""
    deals: bool = True
    """It deals values to ranks; else it has no more to say than what it hides."""

    def of_part(self, number: int) -> PassLayout:
        """The same of one part alone."""
        return attrs.evolve(self, parts=[self.parts[number]])

    @property
    def ends(self) -> Mapping[str, Ends]:
        """The ends of the modules of the only part."""
        (ends,) = self.parts
        return ends

    def refuse_unsaid(self, name: str, site: Site) -> None:
        """
        Args:
            site: a module by name, of whose value the model declares nothing.

        Raises:
            ConfigError: the pass does not say how it lies, or says so by the name of a dimension.
        """
        parts, _ = lies(site, [self.ends])
        is_named = site.module in self.ends or "" in self.ends
        if not is_named or any(isinstance(part.dim, str) and part.dim not in site.dims for part in parts):
            one = " and ".join(f"parallel.{axis} = 1" for axis in self.axes) or f"parallel.passes.{self.name} taken out"
            raise ConfigError(
                f"site {name}: the pass {self.name} does not say how the values of this module lie, and the model "
                f"declares none; open it with {one}"
            )


def layouts_of(parts: Sequence[nn.Module], passes: Iterable[ComponentRef], build: ComponentBuilder) -> list[PassLayout]:
    """How each pass that shares out values has them lie, in the order of application; and what a pass hides that has
    put modules of its own in the place of others.

    Raises:
        ConfigError: one that shares out values does not say.
    """
    found = []
    for use in passes:
        description = build.description_of(use)
        if description.phase not in ("shard", "swap"):
            continue
        one, deals = build(use), description.phase == "shard"
        if hasattr(one, "layout"):
            ends: list[Mapping[str, Ends]] = [one.layout(part) for part in parts]
        elif deals:
            raise ConfigError(
                f"parallel.passes.{use.name}: this pass shares out values and has no layout, so that a model "
                "it is applied to cannot be observed; take it out, or ask its author for layout"
            )
        else:
            hidden = Ends(
                hidden=f"the pass {use.name} has put a module of its own there, and has no layout that says what can "
                f"be computed; take parallel.passes.{use.name} out, or ask its author for layout"
            )
            ends = [dict.fromkeys(_modules_from(one, part), hidden) for part in parts]
        found.append(PassLayout(use.name, description.serves, ends, deals))
    return found


def _modules_from(one: object, part: nn.Module) -> list[str]:
    """The modules whose class is of the package that a pass is of."""
    package = _package(one)
    return [name for name, module in by_canonical_name(part).items() if _package(module) == package]


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def by_canonical_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their canonical names; of a wrapper and what it wraps, the latter."""
    return {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


@attrs.frozen(eq=False)
class _Placing:
    """Of the sites of one part of a model."""

    by_name: Mapping[str, nn.Module]
    layouts: Sequence[PassLayout]
    mesh: Mesh

    def declared(self, name: str, site: Site) -> PlacedSite:
        if site.module not in self.by_name:
            raise PluginError(f"the model declares the site {name} at {site.module!r}, which is no module of it")
        return self._place(name, site)

    def modules(self, sites: Mapping[str, Site], batch: BatchShape) -> dict[str, Callable[[], PlacedSite]]:
        """Each module by its name, and its first argument, to be placed."""
        ends = {(site.module, site.where, site.argument): site for site in sites.values() if not site.compute}
        found: dict[str, Callable[[], PlacedSite]] = {}
        for name in self.by_name:
            if name and not isinstance(self.by_name[name], nn.ModuleDict | nn.ModuleList):
                output, first = Site(module=name, dims=BATCH), Site(module=name, where="input", dims=BATCH)
                for site_name, site in ((name, output), (f"{name}.input", first)):
                    known = ends.get((name, site.where, 0))
                    found[site_name] = functools.cache(
                        functools.partial(self._module, site_name, known or site, None if known else batch)
                    )
        return found

    def _module(self, name: str, site: Site, batch: BatchShape | None) -> PlacedSite:
        if batch is not None:
            for layout in self.layouts:
                if layout.deals and (
                    any(self.mesh.degrees.get(axis, 1) > 1 for axis in layout.axes) or not layout.axes
                ):
                    layout.refuse_unsaid(name, site)
        return attrs.evolve(self._place(name, site), batch=batch)

    def _place(self, name: str, site: Site) -> PlacedSite:
        mesh = self.mesh
        parts, sums = lies(site, [one.ends for one in self.layouts])
        order = list(mesh.degrees)
        outermost_first = sorted(parts, key=lambda part: order.index(part.axis))
        cuts = [
            Cut.of(mesh, part.axis, dim, part.order)
            for part in outermost_first
            if mesh.degrees[part.axis] > 1 and (dim := dim_of(site, part)) is not None
        ]
        groups = [mesh.device_mesh.get_group(axis) for axis in sums if mesh.degrees[axis] > 1]
        is_compiled = any(module._compiled_call_impl is not None for module in self.by_name.values())
        beyond: Sequence[Cut] = ()
        if site.compute and site.where == "output":
            given, _ = lies(attrs.evolve(site, where="input"), [one.ends for one in self.layouts])
            beyond = [cut for cut in cuts if cut.axis not in {part.axis for part in given}]
        hidden = hidden_by(site, [one.ends for one in self.layouts])
        return PlacedSite(name, site, self.by_name[site.module], cuts, groups, is_compiled, beyond, hidden=hidden)


def lies(site: Site, layouts: Sequence[Mapping[str, Ends]]) -> tuple[list[Part], list[str]]:
    """The parts of a site that its ranks have by all passes, and the axes over which its gradient is a sum."""
    parts: list[Part] = []
    sums: list[str] = []
    for ends in _ends_at(site, layouts):
        if site.where == "output":
            parts += ends.output
            sums += ends.summed_output
        else:
            parts += ends.inputs.get(site.argument, ends.inputs.get(ANY, ()))
            sums += ends.summed_inputs.get(site.argument, ends.summed_inputs.get(ANY, ()))
    return parts, sums


def hidden_by(site: Site, layouts: Sequence[Mapping[str, Ends]]) -> str:
    """Why a site cannot be computed, by the first pass that says so; empty if it can."""
    found = (ends.hidden for ends in _ends_at(site, layouts) if ends.hidden)
    return next(found, "") if site.compute else ""


def _ends_at(site: Site, layouts: Sequence[Mapping[str, Ends]]) -> list[Ends]:
    """What passes say of all modules, and of that of the site."""
    modules = dict.fromkeys(("", site.module))
    return [layout[module] for layout in layouts for module in modules if module in layout]


def dim_of(site: Site, part: Part) -> int | None:
    """The dimension of the site's tensor that is cut, negative from the end; ``None`` if it has no such dimension.

    Raises:
        PluginError: the tensor is computed from one that is cut along a dimension that it does not have.
    """
    if isinstance(part.dim, str):
        return site.dims.index(part.dim) if part.dim in site.dims else None
    if not site.compute:
        return part.dim
    dim = site.computed_from[part.dim]
    if dim not in site.dims:
        raise PluginError(f"a site of {site.module} is computed from a tensor that is cut along {dim!r}")
    return site.dims.index(dim)
