"""Norms of gradients and weights, and how far an update moves them, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.train.gradients import squared_norms
from forge_plugins_monitor.config import LayerNormsConfig


class LayerNorms(Callback):
    """Reports, in each step that is logged, for each layer:

    - ``gradient_norm/<layer>``: L2 norm of the gradient before clipping, 0 if it is frozen. The squares add up to that
      of ``grad_norm``.
    - ``weight_norm/<layer>``: L2 norm of the weights before the update.
    - ``update_ratio/<layer>``: L2 norm of the update over that of the weights; 1e-3 is usual. 0 if it was left out.

    All are of the whole layer in any layout, and the host does not wait for them.
    """

    def __init__(self, config: LayerNormsConfig) -> None:
        self._config = config
        self._before: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        if not context.logged:
            return
        weights = {name: parameter.detach() for name, parameter in run.parameters.items()}
        gradients = {name: p.grad for name, p in run.parameters.items() if p.grad is not None}
        # a layer that a phase freezes, too: what is ever reported is reported in every logged step
        frozen = {layer_of(name): torch.zeros((), device=run.device) for name in weights}
        self._weights = norms_by_layer(weights, run.device)
        self._report(run, "weight_norm", self._weights)
        self._report(run, "gradient_norm", frozen | norms_by_layer(gradients, run.device))
        if self._config.updates:
            self._before = {name: weight.clone() for name, weight in weights.items()}

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if not self._before:
            return
        updates = {name: run.parameters[name].detach() - before for name, before in self._before.items()}
        self._before.clear()
        moved = norms_by_layer(updates, run.device)
        tiny = torch.finfo(torch.float32).tiny
        self._report(
            run, "update_ratio", {layer: moved[layer] / self._weights[layer].clamp(min=tiny) for layer in moved}
        )

    def _report(self, run: RunContext, what: str, values: Mapping[str, torch.Tensor]) -> None:
        run.report({f"{what}/{layer}": value for layer, value in values.items()})


def norms_by_layer(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The L2 norms, fp32 scalars on ``device``, of what belongs to each layer; one collective for each way in which
    tensors are sharded, and axis.

    Args:
        tensors: by the names of parameters, ``DTensor`` if they are sharded.
        device: the run's, over which ranks talk; tensors may be kept elsewhere.
    """
    names = [layer_of(name) for name in tensors]
    layers = list(dict.fromkeys(names))
    totals = torch.zeros(len(layers), device=device)
    for (mesh, sharded), squares in squared_norms([*tensors.values()]).items():
        each = squares.each.to(device)
        for dim in sharded:
            if mesh is not None and mesh.size(dim) > 1:
                dist.all_reduce(each, group=mesh.get_group(dim))
        places = torch.tensor([layers.index(names[index]) for index in squares.indices], device=device)
        totals.index_add_(0, places, each)
    return dict(zip(layers, totals.sqrt().unbind(), strict=True))


def layer_of(name: str) -> str:
    """``"blocks.3"`` of ``"blocks.3.attention.q.weight"``: up to the first number, and ``"embed"`` without one."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else name.partition(".")[0]
