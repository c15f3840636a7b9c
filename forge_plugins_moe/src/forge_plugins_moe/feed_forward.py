"""The feed-forward layer ``moe``: a router, experts, and shared experts.

Shapes: B = batch, S = sequence, T = B · S tokens, D = width of the residual stream, E = experts, A = assignments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import Site
from forge_core.contracts.router import TOKEN_FACTS, Routing
from forge_core.errors import ConfigError, PluginError
from forge_core.ops.accumulate import accumulate
from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.activation import make_activation
from forge_plugins_moe.capacity import drop_beyond_capacity
from forge_plugins_moe.config import MoEConfig
from forge_plugins_moe.dispatch import Assignments, count_by_expert
from forge_plugins_moe.experts import Experts
from forge_plugins_moe.overlap import Meanwhile
from forge_plugins_moe.routing_check import refuse_form, refuse_values
from forge_plugins_moe.shared_experts import SharedExperts
from forge_plugins_moe.sites import moe_sites


def moe(config: MoEConfig, /, *, dim: int, layer: int, n_layers: int, build: Builder) -> nn.Module:
    """The layer of one block: sparse, or the dense one where the config says so."""
    if not config.is_sparse(layer):
        dense: nn.Module = build(config.dense, dim=dim, layer=layer, n_layers=n_layers)
        return dense
    return MoE(config, dim=dim, build=build)


class MoE(nn.Module):
    """``y_t = Σ_{i chosen for t} w_{t,i} · FFN_i(x_t) + Σ_shared FFN_s(x_t)``.

    What it reports a step, of all ranks and microbatches together: ``load_violation``, ``max_i(c_i) / mean(c) − 1`` of
    the counts ``c`` of assignments to each expert (MaxVio, Wang et al. 2024, arXiv 2408.15664); ``load_entropy`` of
    ``c / Σc``, 1 where all are equal; ``experts_idle``, the fraction without a token; and ``dropped``, the fraction of
    assignments that found no room. The other counts are of what the router chose, before anything is dropped. All are
    NaN of a layer that no gradient passes, which counts nothing.

    Raises:
        ConfigError: an expert's width is not known.
        PluginError: the router needs to know of tokens what nothing here can tell it.
    """

    load: torch.Tensor
    dropped: torch.Tensor
    last_load: torch.Tensor
    last_dropped: torch.Tensor

    def __init__(self, config: MoEConfig, *, dim: int, build: Builder) -> None:
        super().__init__()
        expert, hidden_dim = config.expert, _width(config, dim)
        self.config = config
        self.router = build(config.router, dim=dim, n_experts=config.n_experts)
        if unknown := sorted(self.needs.difference(TOKEN_FACTS)):
            raise PluginError(
                f"the router {config.router.qualified_name} needs {unknown[0]!r}; of each token it can be given "
                f"{', '.join(TOKEN_FACTS)}. This is a bug in the router."
            )
        self.experts = Experts(
            config.n_experts,
            dim,
            hidden_dim,
            make_activation(expert, build),
            gated=expert.is_gated,
            bias=config.bias,
            scale_gradients=config.scale_gradients,
        )
        self.shared: SharedExperts | None = None
        if config.shared_experts:
            width = config.shared_experts * (config.shared_hidden_dim or hidden_dim)
            wide = attrs.evolve(expert, hidden_dim=width, multiplier=1.0, bias=False)
            self.shared = SharedExperts(wide, dim=dim, gated=config.shared_gate, build=build)
        self.register_buffer("load", torch.empty(config.n_experts), persistent=False)
        self.register_buffer("dropped", torch.empty(config.n_experts), persistent=False)
        self.register_buffer("last_load", torch.empty(config.n_experts), persistent=False)
        self.register_buffer("last_dropped", torch.empty(config.n_experts), persistent=False)

    @property
    def needs(self) -> frozenset[str]:
        """What its router needs to know of tokens."""
        return frozenset(getattr(self.router, "needs", ()))

    @property
    def looks_ahead(self) -> bool:
        """Return whether the router chooses by later tokens, in the mode that it is in."""
        return not getattr(self.router, "causal", True)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None, **facts: torch.Tensor) -> torch.Tensor:
        return self._routed_by(self.router, hidden, valid, facts, drops=self.training)

    def generate(self, hidden: torch.Tensor, valid: torch.Tensor | None = None, **facts: torch.Tensor) -> torch.Tensor:
        """Same as ``forward``, where later tokens are not there yet. Experts take all tokens that come, with any
        capacity in training, as a text must not depend on the texts that are written beside it.

        Raises:
            ConfigError: the router needs them, and has no other for this.
        """
        router = self.router.inference_router() if hasattr(self.router, "inference_router") else None
        if router is None:
            router = self.router
            if not getattr(router, "causal", True):
                raise ConfigError(
                    f"the router {self.config.router.name} chooses among later tokens too, and cannot generate text; "
                    "train it with a router for that, as expert_choice has with predictor = true"
                )
        return self._routed_by(router, hidden, valid, facts, drops=False)

    def _routed_by(
        self,
        router: nn.Module,
        hidden: torch.Tensor,
        valid: torch.Tensor | None,
        facts: Mapping[str, torch.Tensor],
        *,
        drops: bool,
    ) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        flat = None if valid is None else valid.flatten()
        routing = router(tokens, flat, **{name: facts[name].flatten() for name in getattr(router, "needs", ())})
        name = self.config.router.qualified_name
        refuse_form(routing, name)
        if self.config.check_routing and not isinstance(tokens, FakeTensor):  # a plan has no values
            refuse_values(routing, name, len(tokens), self.config.n_experts, flat)
        assignments = _given(routing, some_to_none=valid is not None)
        load = count_by_expert(assignments.expert, self.config.n_experts)
        dropped = torch.zeros_like(load)
        if self.config.capacity_factor is not None and drops:
            assignments, dropped = drop_beyond_capacity(assignments, len(tokens), self.config)

        shared = None if self.shared is None else Meanwhile(self.shared, hidden)
        output = self.experts(hidden, assignments, shared)
        if shared is not None:
            output = output + shared.output()
        output = accumulate(output, self.load, load.float())
        if self.config.capacity_factor is not None:
            output = accumulate(output, self.dropped, dropped.float())
        for name, value in routing.auxiliary.items():
            output = attach_auxiliary_loss(output, value, name, place="read")
        return output

    @torch.no_grad()
    def sample_assignments(self, n_tokens: int, build: Builder) -> Assignments:
        """Where so many tokens would go in the first step, if hidden states were independent and normal.

        The router is another one, on the CPU: this one may be on meta or in parts.
        """
        dim = self.experts.up.shape[-1]
        router: Any = build(self.config.router, dim=dim, n_experts=self.config.n_experts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            router.init_weights(SeededInitializer(0), "", 0.02)
            hidden, place = torch.randn(n_tokens, dim), torch.arange(n_tokens)
            facts = {"token_ids": torch.randint(2**15, (n_tokens,)), "sequence": place // 512, "noise": place}
            routing = router(hidden, None, **{name: facts[name] for name in self.needs})
        given = _given(routing, some_to_none=False)
        if self.config.capacity_factor is None:
            return given
        return drop_beyond_capacity(given, n_tokens, self.config)[0]

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        return {"load": self.load, "dropped": self.dropped}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        """It keeps what it reports, and tells the experts."""
        self.experts.learn_load(reduced["load"] - reduced["dropped"])
        self.last_load.copy_(reduced["load"])
        self.last_dropped.copy_(reduced["dropped"])

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        load, total = self.last_load, self.last_load.sum()
        share = load / total
        entropy = -torch.special.xlogy(share, share).sum()
        return {
            "load_violation": load.max() / load.mean() - 1,
            "load_entropy": entropy / max(math.log(len(load)), 1e-9),
            "experts_idle": torch.where(total > 0, (load == 0).float().mean(), torch.nan),
            "dropped": self.last_dropped.sum() / total,
        }

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        self.router.init_weights(rng, f"{prefix}router.", std)
        self.experts.init_weights(rng, f"{prefix}experts.", residual_std, std)
        if self.shared is not None:
            self.shared.init_weights(rng, f"{prefix}shared.", residual_std, std)
        for name, buffer in self.named_buffers(recurse=False):
            rng.fill(f"{prefix}{name}", buffer, lambda full, _: full.zero_())

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {"router": "router", "experts": "expert"}
        if self.shared is not None:
            plan |= {f"shared.{name}": role for name, role in self.shared.parallel_plan().items()}
        return plan

    def recompute_plan(self) -> dict[str, Recompute]:
        products = ("aten._grouped_mm", "aten._scaled_grouped_mm", "forge_moe.grouped_product")
        return dict.fromkeys((*products, "forge_moe.batched_experts"), "keep")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles: dict[str, ParameterRole] = {
            f"router.{name}": "matrix" if parameter.ndim > 1 else "bias"
            for name, parameter in self.router.named_parameters()
        }
        roles |= {f"experts.{name}": role for name, role in self.experts.parameter_roles().items()}
        if self.shared is not None:
            roles |= {f"shared.{name}": role for name, role in self.shared.parameter_roles().items()}
        return roles

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``."""
        return moe_sites(self)

    def active_parameters(self) -> int:
        visited = min(getattr(self.router, "experts_per_token", self.config.n_experts), self.config.n_experts)
        modules = [module for module in (self.router, self.shared) if module is not None]
        always = sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1)
        return always + round(visited * self.experts.expert_parameters())


def _given(routing: Routing, *, some_to_none: bool) -> Assignments:
    return Assignments(
        routing.token,
        routing.expert,
        routing.weight.float(),
        routing.top_k,
        some_to_none=some_to_none or routing.top_k is None,
    )


def _width(config: MoEConfig, dim: int) -> int:
    """Of one routed expert.

    Raises:
        ConfigError: neither the config nor its dense layer says.
    """
    width = config.expert_width(dim)
    if width is None:
        raise ConfigError(
            f"model.feed_forward.hidden_dim: say how wide an expert is, as the layer {config.dense.name!r} does not"
        )
    return width
