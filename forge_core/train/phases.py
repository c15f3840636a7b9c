"""The phases of a run: which parameters are trained, and with which share of the learning rate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.config.sections import Job, PhaseSection, TrainSection
from forge_core.config.unstructure import plain
from forge_core.contracts.model import longest_first
from forge_core.errors import ConfigError, nearest
from forge_core.train.parameter_groups import split_groups


@attrs.frozen
class Phase:
    """A phase, for the parameters of this rank."""

    first_step: int
    scales: Mapping[str, float]
    """The factor on the learning rate of each parameter, by name."""
    frozen: frozenset[str]
    """Parameters that are not trained."""


class Phases:
    """A pure function of the step.

    Args:
        parameters: this rank's, by name.
        names: of all parameters of the model, on any pipeline stage.

    Raises:
        ConfigError: a pattern means no parameter of the model.
    """

    def __init__(self, job: Job, parameters: Mapping[str, nn.Parameter], names: Collection[str]) -> None:
        self._parameters = parameters
        self._phases = [self._resolved(f"phases[{i}]", one, job, names) for i, one in enumerate(job.phases)]
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._before = Phase(0, dict.fromkeys(parameters, 1.0), frozenset())

    def at(self, step: int) -> Phase:
        """The phase that the update of ``step`` is in."""
        return next((phase for phase in reversed(self._phases) if phase.first_step <= step), self._before)

    def drop_frozen_gradients(self, step: int) -> None:
        """Leave parameters that are frozen in ``step`` without a gradient. An optimizer skips these, with their state
        and their decay; FSDP never learns of it, as it would not thaw what was frozen when it looked."""
        for name in self.at(step).frozen:
            self._parameters[name].grad = None

    def split_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the groups of an optimizer until all parameters of one have the same factors in every phase."""
        name_of = self._name_of
        split_groups(optimizer, lambda one: tuple(phase.scales[name_of[id(one)]] for phase in self._phases))

    def scale_of(self, group: Mapping[str, Any], step: int) -> float:
        """The factor on the learning rate of a group that has been split."""
        parameters = group["params"]
        return self.at(step).scales[self._name_of[id(parameters[0])]] if parameters else 1.0

    def _resolved(self, key: str, phase: PhaseSection, job: Job, names: Collection[str]) -> Phase:
        first_step = phase.first_step(job.train)
        assert first_step is not None, "the tokens of a step have been resolved"
        if first_step > job.train.steps:
            after = f"after the last one, train.steps = {job.train.steps}"
            raise ConfigError(f"{key}.at: {phase.at!r} begins at step {first_step}, {after}")
        scales = phase.lr_scale if isinstance(phase.lr_scale, Mapping) else {"*": phase.lr_scale}
        for where, patterns in ((f"{key}.lr_scale", [*scales]), (f"{key}.train", phase.train)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    near = nearest(pattern, [*names, *_patterns_of(names)])
                    hint = f"; did you mean {near!r}?" if near else ""
                    raise ConfigError(f"{where}: {pattern!r} means no parameter of this model{hint}")
        return Phase(
            first_step,
            {name: _scale(name, scales) for name in self._parameters},
            frozenset(name for name in self._parameters if not any(fnmatchcase(name, one) for one in phase.train)),
        )


def _patterns_of(names: Collection[str]) -> set[str]:
    """The patterns of modules: ``blocks.*``, ``blocks.0.*``, …"""
    parts = (name.split(".") for name in names)
    return {".".join((*one[:length], "*")) for one in parts for length in range(1, len(one))}


def begun(phases: Sequence[PhaseSection], train: TrainSection, step: int) -> list[tuple[int, object]]:
    """The phases that hold for updates up to that of ``step``: the first step of each, and all that it says."""
    found = ((one.first_step(train), (one.lr_scale, one.train, plain(one.data))) for one in phases)
    return [(start, said) for start, said in found if start is not None and start <= step]


def _scale(name: str, scales: Mapping[str, float]) -> float:
    return next((scales[one] for one in longest_first(scales) if fnmatchcase(name, one)), 1.0)
