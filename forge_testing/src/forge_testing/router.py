"""Conformance of routers (contract: ``forge_core.contracts.router``)."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.contracts.router import TOKEN_FACTS, Routing
from forge_core.train.build import cast_parameters
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import (
    accumulator_names,
    assert_forward_is_pure,
    assert_gradients_everywhere,
    assert_initialised,
    build_on_meta,
    materialise,
    snapshot,
)

_PREFIX = "blocks.0.feed_forward.router."

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class RouterConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "router"
    dim: ClassVar[int] = 16
    n_experts: ClassVar[int] = 8
    order_independent: ClassVar[bool] = True
    """Whether reordering the tokens reorders the assignments and changes nothing else. Not so for routers that look at
    a token's position or fill capacities in order."""

    def build_router(self, seed: int = 0) -> Any:
        """Build on meta, materialise and initialise, as the engine does."""
        router = self._uninitialised()
        # A wide distribution, so that tokens differ in their experts.
        router.init_weights(SeededInitializer(seed), _PREFIX, 0.5)
        return router

    def test_init_weights_fills_everything(self) -> None:
        router = self._uninitialised()
        rng = SeededInitializer(0)
        router.init_weights(rng, _PREFIX, 0.02)

        assert_initialised(router, rng, _PREFIX)

    def test_same_seed_same_weights(self) -> None:
        torch.manual_seed(1)
        first = snapshot(self.build_router())
        torch.manual_seed(2)
        second = snapshot(self.build_router())

        for name in first:
            assert torch.equal(first[name], second[name]), (
                f"{name} differs between two routers of one seed; init_weights must use the generator that it is given"
            )

    def test_needs_what_can_be_known_of_a_token(self) -> None:
        needs = set(getattr(self._uninitialised(), "needs", ()))

        assert needs <= {*TOKEN_FACTS}, (
            f"the router needs {', '.join(sorted(needs.difference(TOKEN_FACTS)))}; it can be given "
            f"{', '.join(TOKEN_FACTS)}"
        )

    @each_dtype
    @pytest.mark.parametrize("n_tokens", [0, 1, 7, 64])
    def test_routing_is_well_formed(self, n_tokens: int, dtype: torch.dtype) -> None:
        router = cast_parameters(self.build_router(), dtype)

        routing = _route(router, _hidden(n_tokens, self.dim, dtype))

        n_assignments = len(routing.token)
        for name, tensor in (("token", routing.token), ("expert", routing.expert), ("weight", routing.weight)):
            assert tensor.shape == (n_assignments,), (
                f"Routing.{name} must be flat, one entry an assignment ({n_assignments},), got {tuple(tensor.shape)}"
            )
        for name, tensor, most in (("token", routing.token, n_tokens - 1), ("expert", routing.expert, self.n_experts)):
            assert tensor.dtype == torch.int64, f"Routing.{name} must be int64, got {tensor.dtype}"
            assert ((tensor >= 0) & (tensor <= most)).all(), f"Routing.{name} must lie between 0 and {most}"
        if routing.top_k is not None:
            expected = torch.arange(n_tokens).repeat_interleave(routing.top_k)
            assert torch.equal(routing.token, expected), (
                f"with top_k = {routing.top_k} Routing.token must be 0, …, 0, 1, …, 1, …, each so many times"
            )
            assert (routing.expert < self.n_experts).all(), "with top_k and no padding, a token is assigned to none"
        routing = _without_none(routing, self.n_experts)
        n_assignments = len(routing.token)
        pairs = routing.token * self.n_experts + routing.expert
        assert len(set(pairs.tolist())) == n_assignments, "a token is assigned to the same expert twice"
        assert routing.weight.dtype == torch.float32, f"Routing.weight must be fp32, got {routing.weight.dtype}"
        assert torch.isfinite(routing.weight).all(), "Routing.weight has values that are not finite"

    @pytest.mark.parametrize("n_tokens", [0, 64])
    def test_auxiliary_and_metrics_are_tensors_of_the_right_kind(self, n_tokens: int) -> None:
        routing = _route(self.build_router(), _hidden(n_tokens, self.dim))

        for name, value in routing.auxiliary.items():
            assert isinstance(value, torch.Tensor), f"the auxiliary loss {name!r} is not a tensor"
            assert value.shape == (), f"the auxiliary loss {name!r} must be a scalar, got {tuple(value.shape)}"
            assert value.dtype == torch.float32, f"the auxiliary loss {name!r} must be fp32, got {value.dtype}"
            assert torch.isfinite(value), f"the auxiliary loss {name!r} is {value.item()} for {n_tokens} tokens"
        for name, value in routing.metrics.items():
            assert isinstance(value, torch.Tensor), f"the metric {name!r} is a host value; return a detached tensor"
            assert not value.requires_grad, f"the metric {name!r} is attached to the graph; detach it"

    def test_auxiliary_values_are_sums(self) -> None:
        router = self.build_router()
        hidden = _hidden(64, self.dim)

        once = _route(router, hidden).auxiliary
        twice = _route(router, torch.cat([hidden, hidden])).auxiliary

        for name in once:
            torch.testing.assert_close(
                twice[name],
                2 * once[name],
                rtol=1e-4,
                atol=1e-5,
                msg=f"the auxiliary loss {name!r} is not a sum over tokens: twice the same tokens give "
                f"{twice[name].item():.6g}, not twice {once[name].item():.6g}; multiply a mean by the number of tokens",
            )

    def test_invalid_tokens_are_not_routed(self) -> None:
        valid = _valid(64)

        routing = _route(self.build_router(), _hidden(64, self.dim), valid)
        assert not routing.weight[routing.expert == self.n_experts].any(), "an assignment to no expert has a weight"
        routing = _without_none(routing, self.n_experts)

        assert valid[routing.token].all(), "a token that is not valid has been routed"

    def test_invalid_tokens_are_not_counted(self) -> None:
        hidden, valid = _hidden(64, self.dim), _valid(64)
        masked, alone = self.build_router(), self.build_router()

        with_padding = _route(masked, hidden.requires_grad_(), valid)
        without_padding = _route(alone, hidden[valid], rows=valid.nonzero().flatten())
        for routing in (with_padding, without_padding):  # what is counted may be counted in backward
            torch.autograd.backward(_objective(_without_none(routing, self.n_experts), hidden), retain_graph=True)

        for name, value in without_padding.auxiliary.items():
            torch.testing.assert_close(
                with_padding.auxiliary[name],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=f"tokens that are not valid change the auxiliary loss {name!r}: {value.item():.6g} without them, "
                f"{with_padding.auxiliary[name].item():.6g} with them",
            )
        counted, expected = _accumulators(masked), _accumulators(alone)
        for name in expected:
            # not equal, as sums of what is no count are rounded as they are added
            torch.testing.assert_close(
                counted[name], expected[name], rtol=1e-5, atol=0, msg=f"tokens that are not valid change {name!r}"
            )

    def test_hidden_states_of_invalid_tokens_do_not_matter(self) -> None:
        hidden, valid = _hidden(64, self.dim), _valid(64)
        other = torch.where(valid[:, None], hidden, 100 * _hidden(64, self.dim, seed=1))
        router = self.build_router().eval()

        assert self._same(_route(router, hidden, valid), _route(router, other, valid)), (
            "what stands at tokens that are not valid changes the routing of valid ones"
        )

    def test_is_deterministic_in_eval(self) -> None:
        router = self.build_router().eval()
        hidden = _hidden(64, self.dim)

        assert self._same(_route(router, hidden), _route(router, hidden)), (
            "two calls in eval mode route the same tokens differently"
        )

    def test_does_not_depend_on_token_order(self) -> None:
        if not self.order_independent:
            pytest.skip("the router says that the order of tokens matters to it")
        router = self.build_router().eval()
        hidden = _hidden(64, self.dim)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0))

        straight, shuffled = _route(router, hidden), _route(router, hidden[order], rows=order)

        assert self._same(straight, shuffled._replace(token=order[shuffled.token])), (
            "reordering the tokens changes their assignments; set order_independent = False if that is meant"
        )

    def test_gradients_reach_every_parameter(self) -> None:
        router = self.build_router().train()

        _train(router, _hidden(64, self.dim))

        assert_gradients_everywhere(router)

    def test_forward_changes_only_accumulators(self) -> None:
        router = self.build_router().train()
        before = snapshot(router)

        _train(router, _hidden(64, self.dim))

        assert_forward_is_pure(before, router)

    def test_accumulators_add_up(self) -> None:
        router = self.build_router().train()
        hidden = _hidden(64, self.dim)

        _train(router, hidden)
        once = _accumulators(router)
        _train(router, hidden)

        for name, value in _accumulators(router).items():
            assert once[name].any(), f"nothing is added to the accumulator {name!r}"
            torch.testing.assert_close(
                value,
                2 * once[name],
                msg=f"the accumulator {name!r} does not hold twice as much after a second, equal call; it must add",
            )

    def test_recomputation_is_not_counted_again(self) -> None:
        plain, recomputed = self.build_router().train(), self.build_router().train()
        hidden = _hidden(64, self.dim)

        _train(plain, hidden)
        # an input that needs a gradient, so that something is recomputed for routers without parameters too
        again = functools.partial(_routed_objective, recomputed)
        torch.autograd.backward(checkpoint(again, hidden.clone().requires_grad_(), use_reentrant=False))

        expected = _accumulators(plain)
        for name, value in _accumulators(recomputed).items():
            assert torch.equal(value, expected[name]), (
                f"the accumulator {name!r} counts again what activation checkpointing computes again in backward"
            )

    def test_what_it_reports_are_scalars(self) -> None:
        router = self.build_router().train()
        if not hasattr(router, "step_metrics"):
            return
        _train_step(router, _hidden(64, self.dim))

        for name, value in router.step_metrics().items():
            assert isinstance(value, torch.Tensor), f"the metric {name!r} is not a tensor but a {type(value).__name__}"
            assert value.numel() == 1, (
                f"the metric {name!r} must have one value, and has the shape {tuple(value.shape)}"
            )
            assert torch.isfinite(value).all(), f"the metric {name!r} is {value.item()}"

    def test_contributes_to_the_step_as_a_whole_or_not_at_all(self) -> None:
        router = self.build_router().train()
        has_accumulators, has_step = hasattr(router, "accumulators"), hasattr(router, "before_optimizer_step")
        assert has_accumulators == has_step, (
            "accumulators and before_optimizer_step belong together, the router has only "
            f"{'accumulators' if has_accumulators else 'before_optimizer_step'}"
        )
        if not has_step:
            return
        _train(router, _hidden(64, self.dim))
        before, names = snapshot(router), accumulator_names(router)

        router.before_optimizer_step(_accumulators(router), 0.5)

        parameters = {name for name, _ in router.named_parameters()}
        for name, tensor in snapshot(router).items():
            assert name not in parameters or torch.equal(tensor, before[name]), (
                f"before_optimizer_step changes the parameter {name}, which is the optimizer's"
            )
            assert torch.isfinite(tensor).all(), f"before_optimizer_step leaves values that are not finite in {name}"
            assert name not in names or torch.equal(tensor, before[name]), (
                f"before_optimizer_step changes the accumulator {name}; the engine zeroes it"
            )

    def test_state_dict_holds_everything(self) -> None:
        router = self.build_router(seed=0).train()
        hidden = _hidden(64, self.dim)
        for _ in range(2):
            _train_step(router, hidden)
        other = self.build_router(seed=1)

        other.load_state_dict(router.state_dict())

        for steps in ("", " some steps later"):
            assert self._same(_route(router.eval(), hidden), _route(other.eval(), hidden)), (
                f"a router that loads the state_dict of another routes differently{steps}; something is missing in it"
            )
            for name, tensor in router.state_dict().items():
                assert torch.equal(other.state_dict()[name], tensor), (
                    f"a router that loads the state_dict of another differs in {name}{steps}; it lacks something"
                )
            for _ in range(2):
                for one in (router.train(), other.train()):
                    torch.manual_seed(0)  # as the engine does in each step
                    _train_step(one, hidden)

    def _same(self, first: Routing, second: Routing) -> bool:
        """Return whether two routings hold the same assignments, in any order, with the same weights."""
        one, other = (_table(_without_none(routing, self.n_experts)) for routing in (first, second))
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)

    def _uninitialised(self) -> Any:  # a Router is an nn.Module with more, which a Protocol cannot say
        router = build_on_meta(lambda: self.make(dim=self.dim, n_experts=self.n_experts))
        materialise(router)
        return router


def _hidden(n_tokens: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _route(
    router: Any, hidden: torch.Tensor, valid: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> Routing:
    """``rows``: which of all tokens these are, on which depends what else is known of them."""
    rows = torch.arange(len(hidden)) if rows is None else rows
    facts = {"token_ids": rows % 64 % 11, "sequence": rows // 16, "noise": rows * 7919}
    routing: Routing = router(hidden, valid, **{name: facts[name] for name in getattr(router, "needs", ())})
    return routing


def _train(router: Any, hidden: torch.Tensor) -> None:
    torch.autograd.backward(_routed_objective(router, hidden))


def _train_step(router: Any, hidden: torch.Tensor) -> None:
    """Without the optimizer's part."""
    _train(router, hidden)
    if hasattr(router, "before_optimizer_step"):
        router.before_optimizer_step(_accumulators(router), 0.5)
        for tensor in router.accumulators().values():
            tensor.zero_()


def _routed_objective(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    return _objective(_route(router, hidden.requires_grad_()), hidden)


def _objective(routing: Routing, hidden: torch.Tensor) -> torch.Tensor:
    """A scalar that depends on all that a router returns, and has a backward even if the router has no parameters."""
    factors = torch.randn(routing.weight.shape, generator=torch.Generator().manual_seed(0))
    auxiliary = sum(routing.auxiliary.values(), torch.zeros(()))
    return (routing.weight * factors).sum() + auxiliary + 0 * hidden.sum()


def _without_none(routing: Routing, n_experts: int) -> Routing:
    """Without the assignments to no expert."""
    some = routing.expert < n_experts
    token, expert, weight = routing.token[some], routing.expert[some], routing.weight[some]
    return routing._replace(token=token, expert=expert, weight=weight)


def _valid(n_tokens: int) -> torch.Tensor:
    return torch.arange(n_tokens) % 3 != 1


def _accumulators(router: Any) -> dict[str, torch.Tensor]:
    accumulators = router.accumulators().items() if hasattr(router, "accumulators") else ()
    return {name: tensor.clone() for name, tensor in accumulators}


def _table(routing: Routing) -> torch.Tensor:
    """``(A, 3)`` float64 rows of token, expert and weight, sorted by token and expert."""
    order = (routing.token * (routing.expert.max().item() + 1 if len(routing.expert) else 1) + routing.expert).argsort()
    columns = (routing.token, routing.expert, routing.weight.detach())
    return torch.stack([column[order].double() for column in columns], dim=1)
