"""The phases of a run: which parameters are trained, and with which share of the learning rate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.config.sections import Job, PhaseSection
from forge_core.contracts.callback import RunContext
from forge_core.contracts.model import longest_first
from forge_core.contracts.phase_plan import KnownParameters, PhasePlan, tell_frozen
from forge_core.errors import ConfigError, nearest_hint
from forge_core.train.parameter_groups import split_groups


@attrs.frozen
class Phase:
    """A phase, for the whole model."""

    first_step: int
    scales: Mapping[str, float]
    """The factor on the learning rate of each parameter, by name."""
    frozen: frozenset[str]
    """Parameters that are not trained."""


@attrs.frozen
class TrainedGroup:
    """A part of the model in a phase, in elements of parameters."""

    name: str
    trained: int
    parameters: int
    lr_scales: tuple[float, float] | None
    """The lowest and the highest factor on the learning rate of what is trained."""


class Phases(PhasePlan):
    """
    Args:
        parameters: this rank's, by name.
        known: all of the model.

    Raises:
        ConfigError: a pattern means no parameter of the model that can be trained, or a phase trains none.
    """

    def __init__(self, *, job: Job, parameters: Mapping[str, nn.Parameter], known: KnownParameters) -> None:
        super().__init__(known)
        self._parameters = parameters
        self._phases = [self._resolved(f"phases[{i}]", one, job) for i, one in enumerate(job.phases)]
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._before = Phase(0, dict.fromkeys(known.sizes, 1.0), known.fixed)
        self._entered: Phase | None = None

    def at(self, step: int) -> Phase:
        """The phase that the update of ``step`` is in."""
        return next((phase for phase in reversed(self._phases) if phase.first_step <= step), self._before)

    @property
    def always_frozen(self) -> frozenset[str]:
        starts_with_one = self._phases and self._phases[0].first_step == 1
        phases = self._phases if starts_with_one else [self._before, *self._phases]
        return frozenset.intersection(*(phase.frozen for phase in phases))

    def enter(self, run: RunContext, step: int) -> None:
        """Same as ``PhasePlan.enter``. It also prints a table of what is trained, the whole model last."""
        phase = self.at(step)
        if phase is self._entered:
            return
        self._entered = phase
        tell_frozen(run.parts, phase.frozen)
        groups = [*self._table(phase)]
        for line in table_lines(step, groups):
            run.log(line)
        run.write_event("phase", step=step, groups=[attrs.asdict(one) for one in groups])

    def drop_frozen_gradients(self, step: int) -> None:
        for name in self.at(step).frozen & self._parameters.keys():
            self._parameters[name].grad = None

    def split_groups(self, optimizer: torch.optim.Optimizer) -> None:
        name_of = self._name_of
        split_groups(optimizer, lambda one: tuple(phase.scales[name_of[id(one)]] for phase in self._phases))

    def scale_of(self, group: Mapping[str, Any], step: int) -> float:
        parameters = group["params"]
        return self.at(step).scales[self._name_of[id(parameters[0])]] if parameters else 1.0

    def _table(self, phase: Phase) -> Iterator[TrainedGroup]:
        sizes = self.known.sizes
        for group, names in {**_groups(self.known), "all": sizes}.items():
            trained = [name for name in names if name not in phase.frozen]
            scales = [phase.scales[name] for name in trained]
            yield TrainedGroup(
                group,
                sum(sizes[name] for name in trained),
                sum(sizes[name] for name in names),
                (min(scales), max(scales)) if scales else None,
            )

    def _resolved(self, key: str, phase: PhaseSection, job: Job) -> Phase:
        first_step = phase.first_step(job.train)
        assert first_step is not None, "the tokens of a step have been resolved"
        if first_step > job.train.steps:
            after = f"after the last one, train.steps = {job.train.steps}"
            raise ConfigError(f"{key}.at: {phase.at!r} begins at step {first_step}, {after}")
        scales = phase.lr_scale if isinstance(phase.lr_scale, Mapping) else {"*": phase.lr_scale}
        _refuse_idle(self.known, f"{key}.lr_scale", scales)
        _refuse_idle(self.known, f"{key}.train", phase.train)
        chosen = frozenset[str]().union(*map(self.known.meant_by, phase.train))
        frozen = frozenset(self.known.sizes.keys() - chosen) | self.known.fixed
        resolved = Phase(first_step, self._scales(scales), frozen)
        self._refuse_nothing_trained(key, resolved)
        return resolved

    def _scales(self, scales: Mapping[str, float]) -> dict[str, float]:
        found = dict.fromkeys(self.known.sizes, 1.0)
        for pattern in reversed(_closest_first(self.known, scales)):
            found.update(dict.fromkeys(self.known.meant_by(pattern), scales[pattern]))
        return found

    def _refuse_nothing_trained(self, key: str, resolved: Phase) -> None:
        if not any(resolved.scales[name] for name in self.known.sizes.keys() - resolved.frozen):
            raise ConfigError(f"{key}.lr_scale: it trains nothing: the factor of all that it trains is 0; raise one")


def table_lines(step: int, groups: Sequence[TrainedGroup]) -> list[str]:
    """The table of what is trained from ``step`` on."""
    rows = [("group", "trained", "of", "lr factor")]
    for one in groups:
        low, high = one.lr_scales or (0.0, 0.0)
        factor = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        rows.append((one.name, f"{one.trained:,}", f"{one.parameters:,}", factor if one.lr_scales else "frozen"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"  {name:<{widths[0]}}  {trained:>{widths[1]}}  {of:>{widths[2]}}  {factor}"
        for name, trained, of, factor in rows
    )
    return [f"trained from step {step} on:", *lines]


def _patterns_of(names: Collection[str]) -> set[str]:
    """The patterns of modules: ``blocks.*``, ``blocks.0.*``, …"""
    parts = (name.split(".") for name in names)
    return {".".join((*one[:length], "*")) for one in parts for length in range(1, len(one))}


def _refuse_idle(known: KnownParameters, where: str, patterns: Collection[str]) -> None:
    """
    Raises:
        ConfigError: a pattern means no parameter of the model, or no other than parameters that stay frozen.
    """
    aliases = [f"@{one}" for one in known.aliases]
    for pattern in patterns:
        if meant := known.meant_by(pattern):
            if meant <= known.fixed:
                who = "a key such as model.freeze_encoder, or a pass such as lora, keeps frozen in every phase"
                raise ConfigError(f"{where}: {pattern!r} means parameters alone that {who}; thaw them, or name others")
            continue
        names = aliases if pattern.startswith("@") else [*known.sizes, *_patterns_of(known.sizes)]
        hint = nearest_hint(pattern, names)
        if pattern.startswith("@"):
            hint = f", which names {', '.join(aliases) or 'none'}{hint}"
            raise ConfigError(f"{where}: {pattern!r} is no group of parameters of this model{hint}")
        raise ConfigError(f"{where}: {pattern!r} means no parameter of this model{hint}")


def _closest_first(known: KnownParameters, patterns: Collection[str]) -> list[str]:
    """Sort patterns so that the first that means a name is the closest: the longest, or where there are groups
    among them, the one that means the fewest parameters."""
    if any(pattern.startswith("@") for pattern in patterns):
        return sorted(longest_first(patterns), key=lambda one: len(known.meant_by(one)))
    return longest_first(patterns)


def _groups(known: KnownParameters) -> Mapping[str, Collection[str]]:
    """The names of the parameters of each part that is told of in a table: the model's own groups, if it has any,
    else its modules."""
    if known.aliases:
        return {f"@{alias}": names for alias, names in known.aliases.items()}
    found: dict[str, list[str]] = {}
    for name in known.sizes:
        found.setdefault(name.partition(".")[0], []).append(name)
    return found
