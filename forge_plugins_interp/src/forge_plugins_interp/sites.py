"""The sites of a model in its layout: found by name, and placed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from forge_core.registry.discovery import discover
from forge_plugins_interp.aliases import canonical_site
from forge_plugins_interp.placement import Cut
from forge_plugins_interp.site_pattern import matches


@attrs.frozen(eq=False)
class PlacedSite:
    """A site, with the module that has it on this rank."""

    name: str
    site: Site
    module: nn.Module
    cuts: Sequence[Cut]
    """How its value lies over ranks, from the outermost cut to the innermost."""
    sums: Sequence[dist.ProcessGroup]
    """Groups over whose ranks its gradient is the sum."""

    is_compiled: bool
    """The model, or a part of it, is."""


@attrs.frozen(eq=False)
class Sites:
    """All sites of a model's parts on this rank, and the names of those that other pipeline stages hold."""

    here: Mapping[str, PlacedSite]
    elsewhere: Sequence[str]

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
        layouts = layouts_of(parts, passes, build)
        here: dict[str, PlacedSite] = {}
        for number, part in enumerate(parts):
            modules = by_canonical_name(part)
            for name, site in declared(part).items():
                here[name] = _place(name, site, modules, [one[number] for one in layouts], mesh)
        of_stages = mesh.gather_over("pp", list(here))
        return cls(here, [name for names in of_stages for name in names if name not in here])

    def chosen(self, patterns: Iterable[str]) -> list[PlacedSite]:
        """The sites on this rank that a name or a pattern (``blocks.*.resid_post``) means, in the order of the model.
        An alias of TransformerLens or of transformers is a name, too.

        Raises:
            ConfigError: a pattern means no site of any stage.
        """
        wanted: dict[str, None] = {}
        for pattern in patterns:
            wanted |= dict.fromkeys(self.names(pattern))
        return [self.here[name] for name in self.here if name in wanted]

    def names(self, pattern: str) -> list[str]:
        """The names on all stages that a pattern means.

        Raises:
            ConfigError: there are none.
        """
        known = [*self.here, *self.elsewhere]
        canonical = canonical_site(pattern)
        found = [name for name in known if matches(name, canonical)]
        if not found:
            close = nearest(canonical, known)
            hint = f"did you mean {close!r}? " if close else ""
            raise ConfigError(f"site {pattern!r}: the model has none of that name; {hint}forge sites lists all")
        return found


def sites_of_run(parts: Sequence[nn.Module], mesh: Any, job: Job) -> Sites:
    """The sites of a model that is being trained or evaluated. All ranks call it together.

    Args:
        parts: this rank's.
        mesh: the run's ``Mesh``.
    """
    uses = [use for use in job.parallel.passes.values() if use is not None]
    return Sites.of(parts, uses, mesh, ComponentBuilder(discover(job.plugins.disable)))


def declared(part: Any) -> dict[str, Site]:
    """The sites that a model, or a part of one, declares; without any, the ends of its blocks."""
    if isinstance(part, ObservableModule):
        return dict(part.sites())
    stream = ("sample", "position", "width")
    found = {}
    for layer in part.blocks:
        found[f"blocks.{layer}.resid_pre"] = Site(module=f"blocks.{layer}", where="input", dims=stream)
        found[f"blocks.{layer}.resid_post"] = Site(module=f"blocks.{layer}", dims=stream)
    return found


def layouts_of(
    parts: Sequence[nn.Module], passes: Iterable[ComponentRef], build: ComponentBuilder
) -> list[list[Mapping[str, Ends]]]:
    """For each pass that shares out values, in the order of application, the ends of each part of the model."""
    found = []
    for use in passes:
        if build.description_of(use).phase != "shard":
            continue
        one = build(use)
        if not hasattr(one, "layout"):
            raise ConfigError(
                f"parallel.passes.{use.name}: this pass shares out values and has no layout, so that a model "
                "it is applied to cannot be observed; take it out, or ask its author for layout"
            )
        found.append([one.layout(part) for part in parts])
    return found


def by_canonical_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their canonical names; of a wrapper and what it wraps, the latter."""
    return {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def _place(
    name: str, site: Site, modules: Mapping[str, nn.Module], layouts: Sequence[Mapping[str, Ends]], mesh: Mesh
) -> PlacedSite:
    if site.module not in modules:
        raise PluginError(f"the model declares the site {name} at {site.module!r}, which is no module of it")
    parts, sums = lies(name, site, layouts)
    order = list(mesh.degrees)
    outermost_first = sorted(parts, key=lambda part: order.index(part.axis))
    cuts = [
        Cut.of(mesh, part.axis, dim, part.order)
        for part in outermost_first
        if mesh.degrees[part.axis] > 1 and (dim := dim_of(site, part)) is not None
    ]
    groups = [mesh.device_mesh.get_group(axis) for axis in sums if mesh.degrees[axis] > 1]
    is_compiled = any(module._compiled_call_impl is not None for module in modules.values())
    return PlacedSite(name, site, modules[site.module], cuts, groups, is_compiled)


def lies(name: str, site: Site, layouts: Sequence[Mapping[str, Ends]]) -> tuple[list[Part], list[str]]:
    """The parts of a site that its ranks have by all passes, and the axes over which its gradient is a sum.

    Raises:
        ConfigError: it is computed, and a pass says that this cannot be done.
    """
    parts: list[Part] = []
    sums: list[str] = []
    for layout in layouts:
        for ends in filter(None, (layout.get(""), layout.get(site.module))):
            if ends.hidden and site.compute:
                raise ConfigError(f"site {name}: {ends.hidden}")
            if site.where == "output":
                parts += ends.output
                sums += ends.summed_output
            else:
                parts += ends.inputs.get(site.argument, ends.inputs.get(ANY, ()))
                sums += ends.summed_inputs.get(site.argument, ())
    return parts, sums


def dim_of(site: Site, part: Part) -> int | None:
    """The dimension of the site's tensor that is cut; ``None`` if it has no such dimension.

    Raises:
        PluginError: the tensor is computed from one that is cut along a dimension that it does not have.
    """
    if isinstance(part.dim, str):
        return site.dims.index(part.dim) if part.dim in site.dims else None
    if not site.compute:
        return part.dim % len(site.dims)
    dim = site.computed_from[part.dim]
    if dim not in site.dims:
        raise PluginError(f"a site of {site.module} is computed from a tensor that is cut along {dim!r}")
    return site.dims.index(dim)
