"""Other ways to spend memory or time on a job: what the installed passes offer for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from forge_core.api import PassComponent
from forge_core.config.builder import ComponentBuilder
from forge_core.config.describe import literal
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.job import sort_passes
from forge_core.registry.catalog import Catalog

PHASE = "checkpointing"
"""Its passes decide what is kept from forward to backward."""


@attrs.frozen
class Alternative:
    """A job with other passes of the phase."""

    what: str
    """The passes and their keys, or ``nothing``."""
    job: Job
    is_the_jobs: bool
    """Whether it is the job as it was given."""


def alternatives(job: Job, catalog: Catalog, world_size: int, build: ComponentBuilder) -> Iterator[Alternative]:
    """The job without passes of the phase, with each that is offered (``PassComponent.compared``), and as it is.

    What cannot be: with the rest of the job, or as a module is missing that the pass needs, is left out.
    """
    own = [use for use in job.parallel.passes.values() if use is not None and _is_of_phase(use, catalog)]
    told = False
    for what, tables in _offered(catalog):
        try:
            uses = [build.resolve("parallel_pass", table) for table in tables]
            other = _with(job, catalog, uses)
            sort_passes(other, catalog, world_size)
        except ConfigError:
            continue
        told |= uses == own
        yield Alternative(what, job if uses == own else other, uses == own)
    if not told:
        yield Alternative(", ".join(map(_in_words, own)), job, is_the_jobs=True)


def _in_words(use: ComponentRef) -> str:
    """As an offer is told: the name, and the keys that are not at their defaults."""
    fields = attrs.fields(type(use.config))
    others = [one.name for one in fields if getattr(use.config, one.name) != one.default]
    keys = ", ".join(f"{name} = {literal(getattr(use.config, name))}" for name in others)
    return f"{use.name}: {keys}" if keys else use.name


def recomputations(job: Job, catalog: Catalog) -> Iterator[tuple[str, list[str]]]:
    """What is offered, in the words of ``alternatives``, with the overrides of a command line that make it."""
    own = {key: use for key, use in job.parallel.passes.items() if use is not None and _is_of_phase(use, catalog)}
    for what, tables in _offered(catalog):
        names = {str(table["name"]).rpartition(":")[2] for table in tables}
        off = [f"parallel.passes.{key}=false" for key, use in own.items() if use.name not in names]
        settings = [
            f"parallel.passes.{str(table['name']).rpartition(':')[2]}.{key}={_bare(value)}"
            for table in tables
            for key, value in table.items()
            if key != "name"
        ]
        yield what, [*off, *settings]


def _bare(value: Any) -> str:
    """As a command line has it: a shell takes quotes away."""
    return value if isinstance(value, str) else literal(value)


def _offered(catalog: Catalog) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    yield "nothing", []
    for provided in catalog.components("parallel_pass"):
        component = provided.component
        if isinstance(component, PassComponent) and component.phase == PHASE:
            for settings in component.compared:
                words = ", ".join(f"{key} = {literal(value)}" for key, value in settings.items())
                yield f"{component.name}: {words}", [{"name": provided.qualified_name, **settings}]


def _with(job: Job, catalog: Catalog, uses: list[ComponentRef]) -> Job:
    """The job with ``uses`` as its passes of the phase."""
    kept = {key: use for key, use in job.parallel.passes.items() if use is not None and not _is_of_phase(use, catalog)}
    passes = kept | {use.qualified_name: use for use in uses}
    return attrs.evolve(job, parallel=attrs.evolve(job.parallel, passes=passes))


def _is_of_phase(use: ComponentRef, catalog: Catalog) -> bool:
    component = catalog.find("parallel_pass", use.qualified_name).component
    return isinstance(component, PassComponent) and component.phase == PHASE
