"""What expert parallelism makes ranks send each other, told before a run by router and dispatcher themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext, Traffic
from forge_plugins_moe.nodes import Nodes
from forge_plugins_moe.visits import MeanVisits

_SAMPLE = 4096
"""Tokens whose routing is looked at: the mean of what they visit is right to about 0.02."""


def expert_traffic(model: nn.Module, context: PassContext, mesh: DeviceMesh, build: Builder) -> Iterator[Traffic]:
    """One for all layers that are configured alike.

    Where tokens go is asked of a router as it is when it starts, about hidden states that are independent and normal.

    Args:
        mesh: of ``ep``.
    """
    for layers in _alike(model).values():
        names, layer = [*layers], next(iter(layers.values()))
        what = f"{re.sub(r'[0-9]+', '*', names[0])} ({len(names)})"
        dispatcher = layer.experts.dispatcher
        nodes: Nodes = getattr(dispatcher, "nodes", None) or Nodes.of(mesh, None, "LOCAL_WORLD_SIZE")
        assignments = layer.sample_assignments(_SAMPLE, build)
        visits = MeanVisits.of(assignments, _SAMPLE, layer.experts.n_experts, mesh.size(), nodes.count)
        reason = (
            f"a token goes to {visits.experts:.3g} experts on {visits.ranks:.2f} of {visits.n_ranks} ranks, on "
            f"{visits.nodes:.2f} of {visits.n_nodes} nodes; forward and backward, without what is recomputed"
        )
        if not hasattr(dispatcher, "sent_bytes"):
            yield Traffic(what, None, None, f"{reason}; the dispatcher does not tell what it sends (sent_bytes)")
            continue
        within, between = dispatcher.sent_bytes(visits, _row_bytes(layer, context))
        tokens = len(names) * _tokens_per_step(context)
        yield Traffic(what, within * tokens, between * tokens, reason)


def _alike(model: nn.Module) -> Mapping[int, Mapping[str, Any]]:
    """Sparse layers that can tell where tokens go, by configuration and name."""
    found: dict[int, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "sample_assignments"):
            found.setdefault(id(module.config), {})[f"{canonical_name(name)}.experts"] = module
    return found


def _row_bytes(layer: Any, context: PassContext) -> int:
    return int(layer.experts.up.shape[-1]) * (4 if context.job.train.precision == "fp32" else 2)


def _tokens_per_step(context: PassContext) -> int:
    """That go through this rank."""
    train = context.job.train
    return (train.grad_accumulation or 1) * train.batch_size * train.seq_len // context.mesh.degrees["cp"]
