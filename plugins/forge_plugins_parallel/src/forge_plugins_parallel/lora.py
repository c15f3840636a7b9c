"""Low-rank adapters of linear layers: LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from forge_core.contracts.model import Initializer, ParameterRole, canonical_name, is_within
from forge_core.contracts.observation import Ends
from forge_core.contracts.parallel_pass import Folded, PassContext
from forge_core.errors import ConfigError, nearest
from forge_plugins_parallel.config import LoraConfig
from forge_plugins_parallel.cut_layers import CutLayer, distributed, local, sum_over_tp

_KEY = "parallel.passes.lora"
_NAME = "adapter"


class Lora:
    """Adds ``alpha / rank · up · down`` to the matrix of each chosen layer, and trains ``up`` and ``down`` alone.

    ``down`` is ``(rank, in)``, and begins as ``nn.Linear`` does; ``up`` is ``(out, rank)``, and begins at zero, so that
    the model begins as it is without the pass. All other parameters are frozen: they have no gradient, and the
    optimizer does not know them. Under tensor parallelism, a layer cut by output has its ``up`` cut likewise, and one
    cut by input its ``down``.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._scale = config.alpha / config.rank

    def add(self, model: nn.Module) -> None:
        """Same as ``AddingPass.add``.

        Raises:
            ConfigError: a pattern means no linear layer of a block, or none is left.
        """
        chosen = self._chosen(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for linear in chosen.values():
            setattr(linear, _NAME, Adapter(linear, self._config.rank, self._scale))
        model.__class__ = _adapted_model(type(model))  # type: ignore[arg-type]  # torch types __hash__ of modules oddly

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``.

        Raises:
            ConfigError: this pipeline stage has no adapter, and so nothing to train.
        """
        touched = [name for name, _ in _adapters_of(model)]
        if not touched:
            raise ConfigError(
                f"{_KEY}: a pipeline stage holds none of the layers that are adapted, and would have nothing to train; "
                "widen include, or lower parallel.pp"
            )
        for name in touched:
            linear = model.get_submodule(name)
            linear.get_submodule(_NAME).cut_as(linear)  # type: ignore[operator]  # an Adapter
            linear.__class__ = _adapted(type(linear))  # type: ignore[arg-type]  # torch types __hash__ of modules oddly
        return model, touched

    def layout(self, model: nn.Module) -> Mapping[str, Ends]:
        """Same as ``LaidOutPass.layout``. What is computed by a layer's weight would lack the adapter."""
        adapted = Ends(hidden="an adapter adds to the weight of its layer; fold it in by forge convert first")
        return {name: adapted for name, _ in _adapters_of(model)}

    def folded(self, names: Collection[str]) -> Mapping[str, Folded]:
        """Same as ``AddingPass.folded``."""
        end = f".{_NAME}.up"
        layers = [name.removesuffix(end) for name in names if name.endswith(end)]
        return {
            f"{one}.weight": Folded(
                (f"{one}.weight", f"{one}.{_NAME}.up", f"{one}.{_NAME}.down"), self._sum, self._scale
            )
            for one in layers
        }

    def _sum(self, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (weight.float() + self._scale * (up.float() @ down.float())).to(weight.dtype)

    def _chosen(self, model: Any) -> dict[str, nn.Linear]:
        roles = model.parameter_roles()
        routers = [pattern for pattern, role in model.parallel_plan().items() if role == "router"]
        found = {
            name: module
            for name, module in model.named_modules()
            if name.startswith("blocks.")
            and type(module) is nn.Linear
            and roles.get(f"{name}.weight") == "matrix"
            and not any(is_within(name, pattern) for pattern in routers)
        }
        for key in ("include", "exclude"):
            for pattern in getattr(self._config, key):
                if not any(fnmatchcase(name, pattern) for name in found):
                    near = nearest(pattern, found)
                    hint = f"did you mean {near!r}?" if near else f"there are {', '.join([*found][:8])}"
                    raise ConfigError(f"{_KEY}.{key}: {pattern!r} means no linear layer of a block; {hint}")
        chosen = {
            name: module
            for name, module in found.items()
            if _fits(name, self._config.include) and not _fits(name, self._config.exclude)
        }
        if not chosen:
            raise ConfigError(f"{_KEY}.exclude: leaves nothing of include = {[*self._config.include]}")
        return chosen


class Adapter(nn.Module):
    """What is added to the output of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.down = nn.Parameter(linear.weight.new_empty((rank, linear.in_features)))
        self.up = nn.Parameter(linear.weight.new_empty((linear.out_features, rank)))
        self.scale = scale

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill both."""
        rng.fill(f"{prefix}down", self.down, lambda full, rng: full.uniform_(-1, 1, generator=rng).div_(_root(full)))
        rng.fill(f"{prefix}up", self.up, lambda full, _: full.zero_())

    def cut_as(self, linear: Any) -> None:
        """Cut one of the two as ``tensor_parallel`` has cut the layer's weight, if it has; each rank has a part of the
        gradient of the other."""
        weight = linear.weight
        if not isinstance(weight, DTensor):
            return
        (placement,) = weight.placements
        assert isinstance(placement, Shard)
        cut, whole = ("up", "down") if placement.dim == 0 else ("down", "up")
        setattr(self, cut, distributed(getattr(self, cut), weight.device_mesh, placement))
        sum_over_tp(self, whole)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, in)`` to ``(…, out)``."""
        return F.linear(F.linear(hidden, local(self.down)), local(self.up)) * self.scale


class _Adapted:
    """Mixed into the class of a linear layer."""

    adapter: Adapter

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden)  # type: ignore[misc]  # that of the layer's own class
        adapted: torch.Tensor = output + self.adapter(hidden)
        return adapted


class _AdaptedModel:
    """Mixed into the class of a model, whose own declarations are about what it has without adapters."""

    def init_weights(self: Any, rng: Initializer) -> None:
        with _without_adapters(self):
            super().init_weights(rng)  # type: ignore[misc]  # that of the model's own class
        for name, adapter in _adapters_of(self):
            adapter.init_weights(rng, f"{name}.{_NAME}.")

    def parameter_roles(self: Any) -> dict[str, ParameterRole]:
        with _without_adapters(self):
            roles = dict(super().parameter_roles())  # type: ignore[misc]
        return roles | {f"{name}.{_NAME}.{one}": "matrix" for name, _ in _adapters_of(self) for one in ("down", "up")}

    def flops_per_token(self: Any, seq_len: int) -> float:
        """The gradients of frozen matrices are not computed: 4 a weight, and 6 of adapters. Those of experts and of a
        tied head stay counted, as only the model knows how often a token meets them."""
        with _without_adapters(self):
            flops: float = super().flops_per_token(seq_len)  # type: ignore[misc]
            roles = super().parameter_roles()  # type: ignore[misc]
            frozen: int = sum(p.numel() for name, p in self.named_parameters() if roles.get(name) in ("matrix", "head"))
        added = sum(p.numel() for _, adapter in _adapters_of(self) for p in adapter.parameters())
        return flops - 2.0 * frozen + 6.0 * added


def _adapters_of(model: nn.Module) -> list[tuple[str, Adapter]]:
    """With the name of the layer that each belongs to."""
    return [
        (canonical_name(name).removesuffix(f".{_NAME}"), module)
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    ]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    owners = [module for module in model.modules() if isinstance(module._modules.get(_NAME), Adapter)]
    adapters = [module._modules.pop(_NAME) for module in owners]
    try:
        yield
    finally:
        for module, adapter in zip(owners, adapters, strict=True):
            module._modules[_NAME] = adapter


@functools.cache  # one class for all layers of a kind, so that blocks still share one compiled graph
def _adapted(own: type[nn.Module]) -> type[nn.Module]:
    """Within a layer that is cut, where input and parameters are this rank's parts."""
    if issubclass(own, CutLayer):
        layer, inner = own.__bases__
        bases: tuple[type, ...] = (layer, _adapted(inner))
    else:
        bases = (_Adapted, own)
    return type(f"Adapted{own.__name__}", bases, {"__module__": __name__})


@functools.cache
def _adapted_model(own: type[nn.Module]) -> type[nn.Module]:
    return type(f"Adapted{own.__name__}", (_AdaptedModel, own), {"__module__": __name__})


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _root(matrix: torch.Tensor) -> float:
    """The square root of the input features."""
    return float(matrix.shape[1] ** 0.5)
