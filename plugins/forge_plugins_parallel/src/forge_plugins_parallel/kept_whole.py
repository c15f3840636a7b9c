"""Frozen parameters that every rank has whole, which ``fsdp`` neither shards nor gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from forge_core.contracts.model import canonical_name
from forge_core.errors import ConfigError, nearest_hint

_KEY = "parallel.passes.fsdp.keep_whole"


def kept_whole(model: Any, patterns: Sequence[str], *, is_stage: bool) -> dict[str, nn.Parameter]:
    """The parameters that ``patterns`` mean, by their canonical names.

    Args:
        is_stage: whether ``model`` is a part of a pipeline, so that a pattern may mean what another one holds.

    Raises:
        ConfigError: a pattern means none, or one that is trained.
    """
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    kept: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        meant = {name: parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
        if not meant and not (is_stage and _may_be_elsewhere(model, pattern)):
            hint = nearest_hint(pattern, named)
            raise ConfigError(f"{_KEY}: {pattern!r} means no parameter of the model{hint}")
        for name, parameter in meant.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{_KEY}: {pattern!r} means {name}, which is trained, at least in a part of the run; only what the "
                    "model freezes for the whole run may be kept whole"
                )
        kept |= meant
    return kept


class ComputeDtype:
    """Has a model compute with parameters in a dtype that is not theirs, as mixed precision does with sharded ones.

    A forward pre-hook of the model: from the first forward on, modules have copies in that dtype. What is saved and
    loaded are the parameters themselves; once they have changed, the copies do.
    """

    def __init__(self, kept: Mapping[str, nn.Parameter], model: nn.Module, dtype: torch.dtype) -> None:
        own = {id(parameter) for parameter in kept.values()}
        self._dtype = dtype
        self._places = [
            (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in own and parameter.is_floating_point()
        ]
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        if not self._copies:  # the parameters have got their memory since the pass was applied
            made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
            for module, name in self._places:
                own = module.get_parameter(name)
                copied = nn.Parameter(own.detach().to(self._dtype), requires_grad=False)
                own, copied = made.setdefault(id(own), (own, copied))
                module.register_parameter(name, copied)
            self._copies = list(made.values())
            self._versions = [own._version for own, _ in self._copies]
        for i, (own, copied) in enumerate(self._copies):
            if own._version != self._versions[i]:
                copied.copy_(own)
                self._versions[i] = own._version


def _may_be_elsewhere(model: Any, pattern: str) -> bool:
    first = pattern.partition(".")[0]
    return first == "blocks" or "*" in first or getattr(model, first, model) is None
