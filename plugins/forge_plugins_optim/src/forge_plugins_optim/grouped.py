"""One optimizer on some parameters and another on the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from forge_core.contracts.builder import Builder
from forge_core.contracts.optimizer import HasEvaluationWeights, NamedParameter, StateLayout
from forge_core.errors import ConfigError, and_more
from forge_plugins_optim.config import GroupedConfig, OptimizerGroup

_OWNER = "optimizer"
"""The slot of each parameter's state that says which optimizer it is of: after a resume it must be the same."""
_NAMED = 5


class Grouped(torch.optim.Optimizer):
    """Optimizers that step one after another. Their parameter groups and their states are those of the whole."""

    def __init__(self, config: GroupedConfig, /, *, parameters: Sequence[NamedParameter], build: Builder) -> None:
        """
        Raises:
            ConfigError: a parameter is in no group or in two, or a group takes none.
        """
        self._members: list[tuple[str, torch.optim.Optimizer]] = []
        self._owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for group, taken in zip(config.groups, _shared_out(config.groups, parameters), strict=True):
            if not taken:  # on this pipeline stage
                continue
            optimizer = build(group.optimizer, parameters=taken)
            self._members.append((group.optimizer.qualified_name, optimizer))
            self._owners.update((one.parameter, optimizer) for one in taken)
        self._names: dict[torch.Tensor, str] = {one.parameter: one.name for one in parameters}
        super().__init__([group for _, member in self._members for group in member.param_groups], {})
        self.state = _JoinedState(self._owners)  # type: ignore[assignment]  # a mapping as torch's
        self._is_compared = False
        self.left_out: torch.Tensor | None = None
        self.leaves_out = all(_leaves_out(member) for _, member in self._members)
        self.gradient_scale: torch.Tensor | None = None
        self.scales_gradients = all(getattr(member, "scales_gradients", False) for _, member in self._members)

    @property
    def members(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that it is made of."""
        return [member for _, member in self._members]

    def evaluation_weights(self) -> Mapping[str, torch.Tensor]:
        """Those of the optimizers that have any."""
        averaging = [member for member in self.members if isinstance(member, HasEvaluationWeights)]
        return {name: weight for member in averaging for name, weight in member.evaluation_weights().items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Let each optimizer step.

        Raises:
            ConfigError: the state of a parameter is of another optimizer, as the groups were others when it was saved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_compared:
            self._compare()
            self._is_compared = True
        for name, member in self._members:
            member.left_out = member.found_inf = self.left_out  # type: ignore[attr-defined]  # read by some, by torch's
            member.gradient_scale = self.gradient_scale  # type: ignore[attr-defined]  # the contract of scales_gradients
            member.step()
            for state in member.state.values():
                state.setdefault(_OWNER, name)
        return loss

    def empty_state(
        self, parameter: torch.nn.Parameter, slot: str, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Same as ``StateLayout.empty_state``, by the parameter's optimizer."""
        owner = self._owners[parameter]
        return owner.empty_state(parameter, slot, shape, dtype) if isinstance(owner, StateLayout) else None

    def _compare(self) -> None:
        for name, member in self._members:
            own = {} if isinstance(member, Grouped) else member.state  # it compares by itself
            for parameter, state in own.items():
                if state and state.get(_OWNER) != name:
                    raise ConfigError(
                        f"optimizer.groups: {self._names[parameter]} was updated by {state.get(_OWNER, 'another')} "
                        f"when the checkpoint was written, and now is in the group of {name}; restore the groups, or "
                        "choose another run.name to start afresh"
                    )


def _leaves_out(member: torch.optim.Optimizer) -> bool:
    """Return whether it is one as the contract has it, or fused by torch, whose SGD makes its momentum all the same."""
    is_fused = getattr(member, "_step_supports_amp_scaling", False) and not isinstance(member, torch.optim.SGD)
    return bool(getattr(member, "leaves_out", False) or is_fused)


class _JoinedState(MutableMapping[torch.Tensor, Any]):
    """The states of several optimizers, each parameter's where its optimizer has it."""

    def __init__(self, owners: dict[torch.Tensor, torch.optim.Optimizer]) -> None:
        self._owners = owners

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in states for states in self._states())

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return super().get(parameter, default) if parameter in self else default

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for states in self._states() for parameter in states)

    def __len__(self) -> int:
        return sum(len(states) for states in self._states())

    def _states(self) -> Iterator[Any]:
        return (owner.state for owner in dict.fromkeys(self._owners.values()))


def _shared_out(groups: Sequence[OptimizerGroup], parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    """The parameters of each group."""
    taken: list[list[NamedParameter]] = [[] for _ in groups]
    rest = next((index for index, group in enumerate(groups) if group.takes_the_rest), None)
    left_over = []
    for one in parameters:
        indices = [index for index, group in enumerate(groups) if _takes(group, one)]
        if len(indices) > 1:
            numbers = " and ".join(str(index) for index in indices)
            raise ConfigError(f"optimizer.groups: {one.name} ({one.role}) is in the groups {numbers}; one must have it")
        if not indices and rest is None:
            left_over.append(f"{one.name} ({one.role})")
        else:
            taken[indices[0] if indices else rest or 0].append(one)
    if left_over:
        raise ConfigError(
            f"optimizer.groups: in no group: {', '.join(left_over[:_NAMED])}{and_more(len(left_over), _NAMED)}. Name "
            "their roles or patterns, or give one group neither, which takes the rest"
        )
    is_whole = not parameters or not parameters[0].elsewhere  # else another pipeline stage may have them
    for index, (group, own) in enumerate(zip(groups, taken, strict=True)):
        if not own and is_whole:
            raise ConfigError(f"optimizer.groups: group {index} ({_words(group)}) takes no parameter of this model")
    return taken


def _takes(group: OptimizerGroup, one: NamedParameter) -> bool:
    if group.takes_the_rest:
        return False
    is_named = any(one.is_meant(pattern) for pattern in group.patterns)
    return (not group.roles or one.role in group.roles) and (not group.patterns or is_named)


def _words(group: OptimizerGroup) -> str:
    if group.takes_the_rest:
        return "the rest"
    keys = {"roles": group.roles, "patterns": group.patterns}
    return ", ".join(f"{key} {list(value)}" for key, value in keys.items() if value)
