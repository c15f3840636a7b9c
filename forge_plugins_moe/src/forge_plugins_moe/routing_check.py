"""A router that does not keep its contract: what can be seen for nothing is looked at in each forward, values where
``check_routing`` asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from forge_core.contracts.router import Routing
from forge_core.errors import PluginError


def refuse_form(routing: Routing, router: str) -> None:
    """Types, shapes and dtypes, which need no wait for the device.

    Args:
        router: its name.

    Raises:
        PluginError: with the tensor that is wrong.
    """
    for problem in _wrong_form(routing):
        raise _error(router, problem)


def refuse_values(routing: Routing, router: str, n_tokens: int, n_experts: int, valid: torch.Tensor | None) -> None:
    """What is in the tensors, after ``refuse_form``.

    Raises:
        PluginError: with the tensor that is wrong.
    """
    for problem in _wrong_values(routing, n_tokens, n_experts, valid):
        raise _error(router, problem)


def _error(router: str, problem: str) -> PluginError:
    return PluginError(f"the router {router} returned {problem}. This is a bug in the router.")


def _wrong_form(routing: object) -> Iterator[str]:
    if not isinstance(routing, Routing):
        yield f"a {type(routing).__name__}, which must be a Routing"
        return
    token, expert, weight = routing.token, routing.expert, routing.weight
    auxiliary = routing.auxiliary if isinstance(routing.auxiliary, Mapping) else {"auxiliary": routing.auxiliary}
    named = {"token": token, "expert": expert, "weight": weight, **auxiliary}
    if no_tensors := [name for name, value in named.items() if not isinstance(value, torch.Tensor)]:
        yield f"for {no_tensors[0]!r} a {type(named[no_tensors[0]]).__name__}, which must be a tensor"
        return
    if not len(token) == len(expert) == len(weight):
        yield f"{len(token)} tokens, {len(expert)} experts and {len(weight)} weights, which must be equally many"
        return
    for name, tensor, dtype in (
        ("token", token, torch.int64),
        ("expert", expert, torch.int64),
        ("weight", weight, torch.float32),
    ):
        if tensor.ndim != 1:
            yield f"a Routing.{name} of the shape {tuple(tensor.shape)}, which must be ({len(tensor)},)"
            return
        if tensor.dtype != dtype:
            yield f"a Routing.{name} in {tensor.dtype}, which must be in {dtype}"
    for name, value in routing.auxiliary.items():
        if value.ndim or value.dtype != torch.float32:
            yield f"the auxiliary loss {name!r} that is no fp32 scalar"


def _wrong_values(routing: Routing, n_tokens: int, n_experts: int, valid: torch.Tensor | None) -> Iterator[str]:
    token, expert, weight = routing.token, routing.expert, routing.weight
    for name, tensor, most in (("token", token, n_tokens - 1), ("expert", expert, n_experts)):
        wrong = tensor[(tensor < 0) | (tensor > most)]
        if len(wrong):
            yield f"the {name} {int(wrong[0])} in Routing.{name}, which must lie between 0 and {most}"
    if not torch.isfinite(weight).all():
        yield "values in Routing.weight that are not finite"
    for name, value in routing.auxiliary.items():
        if not torch.isfinite(value):
            yield f"the auxiliary loss {name!r} that is not finite"
    yield from _wrong_assignments(routing, n_tokens, n_experts, valid)


def _wrong_assignments(routing: Routing, n_tokens: int, n_experts: int, valid: torch.Tensor | None) -> Iterator[str]:
    token, expert, weight = routing.token, routing.expert, routing.weight
    if routing.top_k is not None and (
        len(token) != n_tokens * routing.top_k
        or not torch.equal(token, torch.arange(n_tokens, device=token.device).repeat_interleave(routing.top_k))
    ):
        yield f"top_k = {routing.top_k} and a Routing.token that is not 0, …, 0, 1, …, each so many times"
    some = expert < n_experts
    if valid is not None and not valid[token[some]].all():
        yield "an assignment of padding in Routing.token"
    if valid is None and routing.top_k is not None and not some.all():
        yield "assignments to no expert in Routing.expert, with top_k and without padding"
    if weight[~some].any():
        yield "a weight of an assignment to no expert in Routing.weight, which must be 0"
    pairs = token[some] * n_experts + expert[some]
    if len(pairs.unique()) < len(pairs):  # type: ignore[no-untyped-call]  # torch's
        yield "a token twice with the same expert"
