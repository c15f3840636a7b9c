"""What a sparse layer decides on, and what its experts give, for whoever observes it.

Shapes: B = batch, S = sequence, D = width of the residual stream, E = experts, k = experts a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from forge_core.contracts.observation import Site
from forge_plugins_moe.dispatch import Assignments

_STREAM = ("sample", "position", "width")


def moe_sites(layer: Any) -> dict[str, Site]:
    """Logits where the router has any; its choice, and what each chosen expert gives, where each token has the same
    number of experts."""
    folder = "forge_plugins_moe.sites"
    of_input = functools.partial(Site, where="input", computed_from=_STREAM)
    found = {}
    if hasattr(layer.router, "logits"):
        dims: tuple[str, ...] = ("sample", "position", "expert")
        found["router_logits"] = of_input(module="", dims=dims, compute=f"{folder}:router_logits")
    if isinstance(getattr(layer.router, "experts_per_token", None), int) and not layer.looks_ahead:
        dims = ("sample", "position", "choice")
        found["routing_expert"] = of_input(module="experts", dims=dims, compute=f"{folder}:chosen_experts")
        found["routing_weight"] = of_input(module="experts", dims=dims, compute=f"{folder}:weights_of_experts")
        dims = ("sample", "position", "choice", "width")
        compute, replace = f"{folder}:expert_outputs", f"{folder}:weighted_sum"
        found["expert_out"] = Site(module="experts", dims=dims, computed_from=_STREAM, compute=compute, replace=replace)
    if layer.shared is not None:
        found["shared_out"] = Site(module="shared", dims=_STREAM)
    return found


@torch.no_grad()
def router_logits(
    layer: Any, hidden: torch.Tensor, valid: torch.Tensor | None = None, **facts: torch.Tensor
) -> torch.Tensor:
    """``(B, S, E)`` fp32, before noise and biases of balancing; 0 at padding."""
    if valid is not None:
        hidden = torch.where(valid[..., None], hidden, 0.0)
    logits: torch.Tensor = layer.router.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    return logits if valid is None else torch.where(valid[..., None], logits, 0.0)


def chosen_experts(experts: Any, hidden: torch.Tensor, assignments: Assignments, *_: Any) -> torch.Tensor:
    """``(B, S, k)`` int64; E stands for none, as at padding and where an expert has no room."""
    return assignments.expert.view(*hidden.shape[:2], -1)


def weights_of_experts(experts: Any, hidden: torch.Tensor, assignments: Assignments, *_: Any) -> torch.Tensor:
    """``(B, S, k)`` fp32, what the outputs of ``chosen_experts`` are multiplied by."""
    return assignments.weight.detach().view(*hidden.shape[:2], -1)


def expert_outputs(experts: Any, hidden: torch.Tensor, assignments: Assignments, *_: Any) -> torch.Tensor:
    """``(B, S, k, D)``, what each expert of ``chosen_experts`` gives for the token, before it is weighted and summed; 0
    for none. With ``tensor_parallel``, these are this rank's tokens, as in the output of ``experts``.

    The experts work once more, on a token for each assignment, and so in every layout, also where their dispatcher
    sums before it sends anything back.

    Args:
        hidden: ``(B, S, D)``.
        assignments: of each token as many, one after the other.
    """
    given, n_assignments = assignments, len(assignments.token)
    each = Assignments(
        torch.arange(n_assignments, device=hidden.device),
        given.expert,
        torch.ones_like(given.weight),
        top_k=1,
        some_to_none=given.some_to_none,
    )
    copies = hidden.flatten(0, 1).index_select(0, given.token).view(len(hidden), -1, hidden.shape[2])
    output: torch.Tensor = experts.forward(copies, each)
    return output.unflatten(1, (-1, copies.shape[1] // hidden.shape[1]))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def weighted_sum(
    experts: Any,
    outputs: torch.Tensor,
    hidden: torch.Tensor,
    assignments: Assignments,
    *_: Any,
    part: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What ``experts`` give if each gives this, ``(B, S, k, D)`` to ``(B, S, D)``."""
    weight = part(assignments.weight.view(*hidden.shape[:2], -1))[..., None]
    return (outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * weight).sum(2).to(outputs.dtype)
