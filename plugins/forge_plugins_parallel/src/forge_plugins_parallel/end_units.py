"""The units at the two ends of a model: its embedding, and its head with the norm before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from forge_plugins_parallel.cut_layers import VocabParallelEmbedding

_LOOKUPS = (nn.Embedding.forward, VocabParallelEmbedding.forward)
_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


@attrs.define(eq=False)
class EndUnit:
    """What is gathered outside of the blocks: the embedding before the first one, the head after the last one, or both
    in one unit if they are tied.

    A loss may read the head's weight without calling the head, and may call it several times. So ``fsdp`` does not go
    by these modules' forwards, as it does for other units, but by those of the model and of its blocks. The gradient of
    the last block's output is there once all that follows has been through backward; the head's own gradient then is,
    too.
    """

    modules: Mapping[str, nn.Module]
    """By their names in the model: ``embed``; ``norm`` and ``head``; or all three."""
    first: nn.Module
    """The block before which an embedding is freed."""
    last: nn.Module
    """The block during which a head is gathered."""
    _frees: bool = False
    _has_started: bool = False
    """There has been a forward of the model."""
    _has_begun: bool = False
    """The last block of this forward has run."""
    _is_early: bool = False
    """Norm or head have been called before that, so that backward needs them for longer."""

    @property
    def name(self) -> str:
        """``embed`` or ``head``."""
        return [*self.modules][-1]

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self.modules.values():
            yield from module.parameters()

    @property
    def has_embedding(self) -> bool:
        return "embed" in self.modules

    @property
    def has_head(self) -> bool:
        return "head" in self.modules

    def hook(self, model: nn.Module, *, frees: bool) -> None:
        """Gather, free and reduce from here on. All modules have been given to ``fully_shard`` as one unit.

        Args:
            model: the root of FSDP.
            frees: an embedding is not kept for backward, which does not read it.
        """
        self._frees = frees
        state = self.sharded._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        model.register_forward_pre_hook(torch.compiler.disable(self._start))  # type: ignore[no-untyped-call]  # torch's
        for module in self.modules.values():
            module.register_forward_pre_hook(torch.compiler.disable(self._use))  # type: ignore[no-untyped-call]  # torch's
        if self.has_embedding and frees:
            self.first.register_forward_pre_hook(torch.compiler.disable(self._free))  # type: ignore[no-untyped-call]  # torch's
        if self.has_head:
            self.last.register_forward_hook(torch.compiler.disable(self._begin_head))  # type: ignore[no-untyped-call]  # torch's

    def _start(self, *_: Any) -> None:
        self._has_started = True
        self._has_begun = self._is_early = False
        if self.has_embedding:
            self._gather()

    def _use(self, module: nn.Module, _: Any) -> None:
        """Of a module that is called, which for a head may be earlier than foreseen, for an embedding later."""
        self._is_early |= not self._has_begun and module is not self.modules.get("embed")
        self._gather()

    def _free(self, *_: Any) -> None:
        self.sharded.reshard()

    def _begin_head(self, _: nn.Module, __: Any, output: Any) -> None:
        self._gather()
        self._has_begun = True
        if not self._is_early and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._end_head)  # type: ignore[no-untyped-call]  # torch's

    def _end_head(self, _: torch.Tensor) -> None:
        """In backward."""
        for group in self._groups:
            if not self.has_embedding:
                group.post_backward()
            elif self._frees and group.reshard_after_backward:
                group.reshard()  # the embedding's gradient is to come

    def _gather(self) -> None:
        for group in self._groups:
            if not group.is_unsharded:
                # as part of a forward, so that what is gathered next does not wait until this has been copied
                state = TrainingState.FORWARD if self._has_started else TrainingState.IDLE
                with group.use_training_state(state):
                    self.sharded.unshard()

    @property
    def sharded(self) -> Any:
        """One of the modules, by which FSDP knows the unit."""
        return next(iter(self.modules.values()))

    @property
    def _groups(self) -> list[Any]:
        """One with FSDP's parameters; none if it has left all of them alone."""
        state = self.sharded._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def end_units(model: Any) -> list[EndUnit]:
    """Those of a model, or of a pipeline's part of one, before FSDP has seen it.

    What cannot be told from the model contract to be used at one end only stays with the rest of the model: an
    embedding that does more than look up, whose weights backward reads; a parameter that other modules have, too; a
    part without blocks between its ends.
    """
    trunk = _trunk(model)
    if not trunk:
        return []
    embed = {"embed": model.embed} if model.embed is not None and _looks_up(model.embed) else {}
    head = {} if model.head is None else {"norm": model.norm, "head": model.head}
    head = {name: module for name, module in head.items() if module is not None}
    are_tied = not _ids(embed).isdisjoint(_ids(head))
    return [
        EndUnit(modules, trunk[0], trunk[-1])
        for modules in ([embed | head] if are_tied else [embed, head])
        if _ids(modules) and _are_apart(modules, model)
    ]


def _trunk(model: Any) -> list[nn.Module]:
    """The blocks between the ends: without those after the head, which predict further tokens."""
    blocks = list(model.blocks.values())
    after = getattr(model, "n_predictors", 0) if model.head is not None else 0
    return blocks[: len(blocks) - after]


def _looks_up(embed: nn.Module) -> bool:
    """Return whether it is a table, with others in it perhaps."""
    return all(
        isinstance(module, nn.Embedding) and type(module).forward in _LOOKUPS
        for module in embed.modules()
        if module is embed or next(module.parameters(recurse=False), None) is not None
    )


def _are_apart(modules: Mapping[str, nn.Module], model: nn.Module) -> bool:
    """Return whether nothing else in the model has parameters of theirs, and FSDP can take them."""
    if any(isinstance(module, _CONTAINERS) for module in modules.values()):
        return False
    own = _ids(modules)
    others = (
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.partition(".")[0] not in modules
    )
    return own.isdisjoint(map(id, others))


def _ids(modules: Mapping[str, nn.Module]) -> set[int]:
    return {id(parameter) for module in modules.values() for parameter in module.parameters()}
