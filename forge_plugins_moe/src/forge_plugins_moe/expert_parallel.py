"""Expert parallelism: each rank along the axis ``ep`` has some of the experts, and is sent their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import fits
from forge_core.contracts.observation import Ends
from forge_core.contracts.parallel_pass import PassContext, Traffic
from forge_core.errors import ConfigError, PluginError
from forge_plugins_moe.config import ExpertParallelConfig, no_experts
from forge_plugins_moe.traffic import expert_traffic


class ExpertParallel:
    """Cuts every stack of experts that the model's plan names, and gives it a dispatcher.

    The ranks of ``ep`` are borrowed from data parallelism: they see different samples (or positions), so nothing is
    computed twice, and the gradient of an expert is whole once its tokens have come from everywhere. Parameters become
    ``DTensor``s of their whole shape ``(E, …)`` with any ``ep``, which checkpoints and norms understand; copies of
    an expert, if there are more ranks than ``ep``, are sharded by ``fsdp``.
    """

    def __init__(self, config: ExpertParallelConfig, *, build: Builder) -> None:
        self._config = config
        self._build = build

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``.

        Raises:
            ConfigError: the experts cannot be shared out evenly.
            PluginError: a stack of experts cannot be given a dispatcher.
        """
        if context.mesh.experts is None:
            raise ConfigError(f"{_KEY}: parallel.ep is 1; set it to 2 or more, or take the pass out")
        mesh = context.mesh.experts["ep"]
        touched = []
        for name in stacks_of(model):
            self._share_out(name, model.get_submodule(name), mesh)
            if self._config.overlap:
                self._overlap(name, model)
            touched.append(name)
        if not touched and context.mesh.degrees["pp"] == 1:  # a stage may have none, where another has some
            raise ConfigError(f"parallel.ep = {mesh.size()}: {no_experts(context.job)}")
        return model, touched

    def traffic(self, model: nn.Module, context: PassContext) -> Sequence[Traffic]:
        """Same as ``TravellingPass.traffic``."""
        assert context.mesh.experts is not None, "the pass has been applied"
        return [*expert_traffic(model, context, context.mesh.experts["ep"], self._build)]

    def layout(self, model: nn.Module) -> dict[str, Ends]:
        """Same as ``LaidOutPass.layout``: what experts are sent comes back before it leaves their module."""
        return {}

    def _share_out(self, name: str, module: Any, mesh: DeviceMesh) -> None:
        if not hasattr(module, "dispatcher"):
            raise PluginError(
                f"{name} is a stack of experts without a dispatcher, so that no tokens can be sent to other ranks; set "
                "parallel.ep = 1"
            )
        n_experts = 0
        for own, parameter in list(module.named_parameters(recurse=False)):
            n_experts = parameter.shape[0]
            if n_experts % mesh.size():
                raise ConfigError(
                    f"parallel.ep = {mesh.size()}: the {n_experts} experts of {name} cannot be shared out evenly"
                )
            setattr(module, own, _cut(parameter, mesh))
        module.breaks_graph = True
        module.first_expert = mesh.get_local_rank() * (n_experts // mesh.size())
        module.dispatcher = self._build(self._config.dispatcher, n_experts=n_experts, mesh=mesh)

    def _overlap(self, name: str, model: nn.Module) -> None:
        experts: Any = model.get_submodule(name)
        layer = model.get_submodule(name.rpartition(".")[0])
        if not hasattr(experts.dispatcher, "depart") or not hasattr(experts, "chunks"):
            what = f"the dispatcher {self._config.dispatcher.name!r}" if hasattr(experts, "chunks") else name
            raise ConfigError(f"{_KEY}.overlap: {what} cannot do anything while rows travel; remove it")
        if self._config.chunks == 1 and getattr(layer, "shared", None) is None:
            raise ConfigError(
                f"{_KEY}.overlap: {name} has no shared experts beside it that could be computed while rows travel; "
                f"set {_KEY}.chunks to 2 or more, or remove overlap"
            )
        experts.chunks = self._config.chunks


_KEY = "parallel.passes.expert_parallel"


def stacks_of(model: Any) -> list[str]:
    """The modules to which the model's plan gives the role ``expert``."""
    patterns = {pattern for pattern, role in model.parallel_plan().items() if role == "expert"}
    open_ones = [pattern for pattern in patterns if "*" in pattern]
    names = [name for name, _ in model.named_modules()]
    return [name for name in names if name in patterns or any(fits(name, pattern) for pattern in open_ones)]


def _cut(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's experts of the stack, which tensor parallelism may have cut by features already; on meta."""
    data, placements = parameter.data, [Shard(0)]
    if isinstance(data, DTensor):
        mesh = DeviceMesh._concatenate([mesh, data.device_mesh])
        placements += data.placements  # type: ignore[arg-type]  # shards too
        data = data.to_local()
    local = data.new_empty((data.shape[0] // mesh.size(0), *data.shape[1:]))
    whole = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
