"""Needs and conflicts that passes declare: looked for in a job, and put into words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from forge_core.config.describe import literal
from forge_core.config.problems import Problem
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.component import Conditions, Conflict, PassComponent

Declaration = tuple[ComponentRef, PassComponent]
"""A pass of a job, and what it declares."""


def conflicts_in(declared: Collection[Declaration], job: Job, degrees: Mapping[str, int]) -> list[Problem]:
    """Every conflict once; if both of two passes declare theirs, what the first one says.

    Args:
        declared: all passes of the job.
        degrees: of every axis of the mesh, and of ``ep``.
    """
    problems, told = [], set()
    for use, component in declared:
        for conflict in component.conflicts:
            if not _are_keys_of(use, conflict.when):
                problems.append(_bug(use, f"a conflict with '{conflict.other}' on keys that it does not have"))
            elif not _is_in_a_job(conflict, job, degrees):
                problems.append(_bug(use, f"a conflict with '{conflict.other}', which is no key of a job"))
            elif _hold(conflict.when, use.config):
                for other, words in _met(conflict, use, declared, job, degrees):
                    if (other, use.qualified_name) not in told:
                        told.add((use.qualified_name, other))
                        sentence = f"cannot be combined with {words}: {conflict.reason}"
                        problems.append(_problem(use, conflict.when, sentence))
    return problems


def missing_in(declared: Collection[Declaration]) -> list[Problem]:
    """Every pass that another one needs and that is not there."""
    present = {name for _, component in declared for name in names_of(component)}
    problems = []
    for use, component in declared:
        for need in component.needs:
            if not _are_keys_of(use, need.when):
                problems.append(_bug(use, f"that it needs '{need.other}' on keys that it does not have"))
            elif need.other not in present and _hold(need.when, use.config):
                reason = f": {need.reason}" if need.reason else ""
                remedy = f"add {need.other} = true under [parallel.passes]"
                problems.append(_problem(use, need.when, f"needs the pass '{need.other}'{reason}; {remedy}"))
    return problems


def names_of(component: PassComponent) -> set[str]:
    """Everything that others may call a pass by in what they declare."""
    return {component.name, *component.aliases}


def condition_words(conditions: Conditions) -> str:
    """``schedule = "GPipe" or "1F1B", emulate = false``; empty if there are none."""
    return ", ".join(f"{key} = {' or '.join(map(literal, values))}" for key, values in conditions.items())


def other_words(conflict: Conflict) -> str:
    """The other side of a conflict in general: ``mode = "full" of acme``, ``parallel.tp > 1``."""
    if "." not in conflict.other:
        return f"{condition_words(conflict.other_when)} of {conflict.other}".removeprefix(" of ")
    return condition_words({conflict.other: conflict.values}) if conflict.values else f"{conflict.other} > 1"


def _met(
    conflict: Conflict, use: ComponentRef, declared: Collection[Declaration], job: Job, degrees: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """The part of this job that the conflict's ``other`` means: its name, and words for it."""
    section, dot, key = conflict.other.partition(".")
    if not dot:
        for other_use, other in declared:
            is_meant = other_use is not use and conflict.other in names_of(other)
            if is_meant and _hold(conflict.other_when, other_use.config):
                yield other_use.qualified_name, f"{_own_words(conflict.other_when, other_use)}'{other.name}'"
    elif section == "parallel":
        if degrees[key] > 1:
            yield conflict.other, f"{conflict.other} = {degrees[key]}"
    elif getattr(getattr(job, section), key) in conflict.values:
        yield conflict.other, f"{conflict.other} = {literal(getattr(getattr(job, section), key))}"


def _is_in_a_job(conflict: Conflict, job: Job, degrees: Mapping[str, int]) -> bool:
    """Return whether ``other`` can be there at all. Passes that are not installed can."""
    section, dot, key = conflict.other.partition(".")
    if not dot:
        return True
    return key in degrees if section == "parallel" else hasattr(getattr(job, section, None), key)


def _hold(conditions: Conditions, config: Any) -> bool:
    return all(getattr(config, key, _ABSENT) in values for key, values in conditions.items())


_ABSENT = object()


def _are_keys_of(use: ComponentRef, conditions: Conditions) -> bool:
    return all(hasattr(use.config, key) for key in conditions)


def _problem(use: ComponentRef, when: Conditions, sentence: str) -> Problem:
    """About the pass, ``it needs …``; or about the first of its keys, ``"rowwise" with emulate = false needs …``."""
    path = ("parallel", "passes", use.name)
    if not when:
        return Problem(path, f"it {sentence}")
    first, *others = when
    words = [f"{key} = {literal(getattr(use.config, key))}" for key in others]
    value = literal(getattr(use.config, first))
    return Problem((*path, first), f"{' with '.join([value, *words])} {sentence}")


def _own_words(conditions: Conditions, use: ComponentRef) -> str:
    """``mode = "full" of``, with a space behind, or nothing."""
    words = ", ".join(f"{key} = {literal(getattr(use.config, key))}" for key in conditions)
    return f"{words} of " if words else ""


def _bug(use: ComponentRef, what: str) -> Problem:
    return _problem(use, {}, f"declares {what}. This is a bug in {use.provider}.")
