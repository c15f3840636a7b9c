"""Which passes a job needs, and in which order they are applied: decided by what they declare, without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import permutations
from math import prod
from typing import Any

import attrs

from forge_core.config.problems import ConfigProblems, Problem
from forge_core.config.sections import AXES, Job, ParallelSection, mesh_words, setting_of
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.passes.rules import Declaration, conflicts_in, missing_in, names_of
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.component import PHASES, PassComponent


def add_required(
    job: Job, catalog: Catalog, world_size: int | None, resolve: Callable[[str, str | Mapping[str, Any]], ComponentRef]
) -> tuple[Job, list[Problem]]:
    """The job with a pass for everything that its degrees and its precision ask for and that no named pass serves, and
    with the passes that its passes need.

    And the problems: no installed pass serves what is asked for, several do, or the one that does is switched off. With
    any, the job is as it was.

    Args:
        world_size: ranks of the run; ``None`` if it is not known yet.
        resolve: turns a kind and a name into a choice of component with its default configuration.

    Raises:
        ConfigProblems: the degrees do not multiply to the world size, or a pass cannot be without keys of its own.
    """
    passes: dict[str, ComponentRef | None] = dict(job.parallel.passes)
    required = required_capabilities(job, world_size)
    off = {key: catalog.providers("parallel_pass", key) for key, use in passes.items() if use is None}
    if typos := [key for key, meant in off.items() if not meant]:
        return job, _typo_problems(typos, catalog)
    switched_off = {one.qualified_name: key for key, meant in off.items() for one in meant}

    def unserved() -> dict[str, list[CatalogEntry]]:
        """Each capability that no pass of the job serves yet, with the installed passes that would."""
        served = {one for _, declared in _declarations(passes.values(), catalog) for one in declared.serves}
        installed = catalog.components("parallel_pass")
        return {
            capability: [one for one in installed if capability in _declared(one).serves]
            for capability in required
            if capability not in served
        }

    def add(wanted: CatalogEntry) -> None:
        name = wanted.component.name
        key = name if name not in passes else wanted.qualified_name
        passes[key] = resolve("parallel_pass", wanted.qualified_name)

    # First what leaves no choice: a pass added for one capability may serve another that has several.
    for capability, candidates in unserved().items():
        wanted = [one for one in candidates if one.qualified_name not in switched_off]
        if len(wanted) == 1 and capability in unserved():
            add(wanted[0])
    # Then what these cannot do without; what stays missing is reported where passes are sorted.
    while (needed := _needed(passes, catalog, switched_off)) is not None:
        add(needed)

    problems = []
    for capability, candidates in unserved().items():
        why = _why_unserved(required[capability], capability, candidates, switched_off, catalog)
        problems.append(Problem((), why, at=setting_of(capability)))
    return job if problems else attrs.evolve(job, parallel=attrs.evolve(job.parallel, passes=passes)), problems


def required_capabilities(job: Job, world_size: int | None) -> dict[str, str]:
    """Capabilities that some pass must serve (a mesh axis, ``"ep"``, or ``"precision"``), and the setting that asks
    for it.

    Args:
        world_size: ranks of the run; ``None`` takes ``dp_shard = -1`` for 1.

    Raises:
        ConfigProblems: the degrees do not multiply to the world size.
    """
    parallel = job.parallel
    required = {}
    for axis, degree in _all_degrees(parallel, world_size).items():
        if degree > 1:
            resolved = f" ({degree} of {world_size} ranks)" if getattr(parallel, axis) == -1 else ""
            required[axis] = f"parallel.{axis} = {getattr(parallel, axis)}{resolved}"
    if job.train.precision in ("bf16", "fp16"):  # bf16_pure computes in what its parameters have
        required["precision"] = f'train.precision = "{job.train.precision}"'
    return required


def resolve_degrees(parallel: ParallelSection, world_size: int) -> dict[str, int]:
    """The size of every axis of the mesh, outermost first, with ``dp_shard = -1`` resolved.

    Raises:
        ConfigProblems: they do not multiply to the world size, or ``ep`` does not divide the ranks it borrows from.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    product = prod(fixed.values())
    spelled = mesh_words(fixed) or "all axes 1"
    if len(fixed) == len(degrees) and product != world_size:
        sentence = (
            f"the degrees ask for {product} ranks ({spelled}), and there are {world_size}; start {product} "
            "processes, change a degree, or set dp_shard = -1 to take what is left"
        )
        raise ConfigProblems([Problem(("parallel",), sentence)])
    if world_size % product:
        sentence = (
            f"{world_size} ranks cannot be divided by the degrees, which ask for a multiple of {product} "
            f"({spelled}); start such a number of processes or change a degree"
        )
        raise ConfigProblems([Problem(("parallel",), sentence)])
    degrees = {axis: world_size // product if degree == -1 else degree for axis, degree in degrees.items()}
    lenders = degrees["dp_shard"] * degrees["cp"]
    if lenders % parallel.ep:
        sentence = (
            f"parallel.ep = {parallel.ep} must divide the {lenders} ranks that it borrows "
            f"(dp_shard {degrees['dp_shard']} × cp {degrees['cp']})"
        )
        raise ConfigProblems([Problem((), sentence, at=("parallel", "ep"))])
    return degrees


def sort_passes(job: Job, catalog: Catalog, world_size: int | None = None) -> tuple[ComponentRef, ...]:
    """The passes of the job in the order in which they are applied: by phase, in it as declared, then by name.

    Args:
        world_size: ranks of the run; ``None`` takes ``dp_shard = -1`` for 1.

    Raises:
        ConfigError: with a line for each of ``pass_problems``.
    """
    order, problems = _sorted(job, catalog, world_size)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return tuple(order)


def pass_problems(job: Job, catalog: Catalog, world_size: int | None = None) -> list[Problem]:
    """A pass is named twice, or lacks a pass that it needs, or conflicts with something, or what they declare cannot
    all be true."""
    return _sorted(job, catalog, world_size)[1]


def conflict_problems(job: Job, catalog: Catalog, world_size: int | None = None) -> list[Problem]:
    """The part of ``pass_problems`` that makes sense also for a job that lacks some of its passes."""
    return conflicts_in(_in_phases(job, catalog), job, _all_degrees(job.parallel, world_size))


def adding_passes(job: Job, catalog: Catalog) -> dict[str, ComponentRef]:
    """The passes of the job that add parameters, by their keys in ``[parallel.passes]``."""
    return {
        key: use
        for key, use in job.parallel.passes.items()
        if use is not None and _declared(catalog.lookup("parallel_pass", use.qualified_name)).adds_parameters
    }


def _sorted(job: Job, catalog: Catalog, world_size: int | None) -> tuple[list[ComponentRef], list[Problem]]:
    declared = _in_phases(job, catalog)
    problems = [
        *_repeated(declared),
        *missing_in(declared),
        *conflicts_in(declared, job, _all_degrees(job.parallel, world_size)),
        *_against_phases(declared),
    ]
    order: list[ComponentRef] = []
    for phase in PHASES:
        in_phase = [one for one in declared if one[1].phase == phase]
        try:
            order += _sorted_in_phase(in_phase)
        except CycleError as error:
            cycle = " → ".join(f"'{name}'" for name in error.args[1])
            sentence = f"each of {cycle} says that it comes before the next; leave one out"
            problems.append(Problem(("parallel", "passes"), sentence))
    return order, problems


def _all_degrees(parallel: ParallelSection, world_size: int | None) -> dict[str, int]:
    """Degrees of every axis of the mesh, and of ``ep``."""
    if world_size is None:
        degrees = {axis: max(1, getattr(parallel, axis)) for axis in AXES}
    else:
        degrees = resolve_degrees(parallel, world_size)
    return {**degrees, "ep": parallel.ep}


def _in_phases(job: Job, catalog: Catalog) -> list[Declaration]:
    declared = _declarations(job.parallel.passes.values(), catalog)
    return sorted(declared, key=lambda one: (_index(one[1].phase), one[1].name, one[0].provider))


def _declarations(uses: Iterable[ComponentRef | None], catalog: Catalog) -> list[Declaration]:
    return [(use, _declared(catalog.lookup("parallel_pass", use.qualified_name))) for use in uses if use is not None]


def _declared(provided: CatalogEntry) -> PassComponent:
    component = provided.component
    assert isinstance(component, PassComponent), "discovery refuses anything else of this kind"
    return component


def _index(phase: str) -> int:
    return tuple(PHASES).index(phase)


def _needed(passes: Mapping[str, ComponentRef | None], catalog: Catalog, off: Collection[str]) -> CatalogEntry | None:
    """A pass that a pass of the job needs and the job does not name, if just one is installed and may be added."""
    declared = _declarations(passes.values(), catalog)
    present = {name for _, component in declared for name in names_of(component)}
    needed = {need.other for _, component in declared for need in component.needs if not need.when}
    for name in sorted(needed - present):
        wanted = [one for one in catalog.providers("parallel_pass", name) if one.qualified_name not in off]
        if len(wanted) == 1:
            return wanted[0]
    return None


def _typo_problems(keys: Iterable[str], catalog: Catalog) -> list[Problem]:
    """Each key switches off a pass which there is not."""
    from forge_core.registry.suggestions import why_no_component  # a dear import, for the sad path only

    path, kind = ("parallel", "passes"), "parallel_pass"
    allowed = {"enum": [one.component.name for one in catalog.components(kind)]}
    return [Problem((*path, key), why_no_component(catalog, kind, key), allowed=allowed) for key in keys]


def _why_unserved(
    why: str, capability: str, candidates: Collection[CatalogEntry], switched_off: Mapping[str, str], catalog: Catalog
) -> str:
    purpose = "computes in it" if capability == "precision" else f"serves the axis '{capability}'"
    wanted = [one for one in candidates if one.qualified_name not in switched_off]
    if len(wanted) > 1:
        lines = "\n".join(f'    "{one.qualified_name}" = true    # {one.component.summary}' for one in wanted)
        return f"{why}: {len(wanted)} installed passes could serve it. Say which one, under [parallel.passes]:\n{lines}"
    if candidates:
        names = sorted({switched_off[one.qualified_name] for one in candidates})
        keys = " and ".join(f"parallel.passes.{name} = false" for name in names)
        return f"{why}: {keys} switches off every installed pass that {purpose}; remove one or the other"
    from forge_core.registry.suggestions import notes, where_to_find_pass

    published = where_to_find_pass(catalog, capability)
    return f"{why}: no installed pass {purpose}{f'; {published}' if published else '.'}{notes(catalog)}"


def _repeated(declared: Collection[Declaration]) -> list[Problem]:
    names = [use.qualified_name for use, _ in declared]
    sentence = "'{}' is named {} times, by its name and by another one; keep one"
    return [
        Problem(("parallel", "passes"), sentence.format(name, names.count(name)))
        for name in sorted(set(names))
        if names.count(name) > 1
    ]


def _against_phases(declared: Collection[Declaration]) -> list[Problem]:
    problems = []
    for (_, component), (_, other) in permutations(declared, 2):
        own, others = _index(component.phase), _index(other.phase)
        impossible, comes = ("after", "before") if own < others else ("before", "after")
        if own != others and names_of(other) & set(getattr(component, impossible)):
            sentence = (
                f"it says that it comes {impossible} '{other.name}', but its phase '{component.phase}' comes {comes} "
                f"'{other.phase}'. This is a bug in one of the two plugins."
            )
            problems.append(Problem(("parallel", "passes", component.name), sentence))
    return problems


def _sorted_in_phase(declared: Collection[Declaration]) -> list[ComponentRef]:
    """By ``after`` and ``before``; of several that could come next, the first of ``declared`` does.

    Raises:
        CycleError: with the names of a cycle.
    """
    uses = {use.qualified_name: use for use, _ in declared}
    earlier = {
        use.qualified_name: {
            other_use.qualified_name
            for other_use, other in declared
            if names_of(other) & set(component.after) or names_of(component) & set(other.before)
        }
        for use, component in declared
    }
    TopologicalSorter(earlier).prepare()
    order: dict[str, ComponentRef] = {}
    while len(order) < len(uses):
        name = next(name for name in uses if name not in order and earlier[name] <= order.keys())
        order[name] = uses[name]
    return [*order.values()]
