"""The routed experts of a layer: their stacked weights, and their products without padding.

Shapes: T = tokens of a microbatch on this rank, A = assignments of tokens to experts, R = rows that this rank's experts
work on, E = experts, D = width of the residual stream, H = width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.contracts.model import Initializer, ParameterRole
from forge_core.errors import ConfigError
from forge_core.ops.accumulate import unchanged
from forge_plugins_dense.activation import FUNCTIONS, Activation, Clamp, activated
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_moe.batched_experts import batched_experts, in_batches
from forge_plugins_moe.config import FLOAT8_MULTIPLE
from forge_plugins_moe.dispatch import Assignments, Dispatcher, LocalDispatcher
from forge_plugins_moe.float8_product import emulated_float8_product, float8_product
from forge_plugins_moe.grouped import Product, grouped_product
from forge_plugins_moe.overlap import Meanwhile, overlapped

_MOST = 10.0
"""By which a gradient is scaled. An expert that had no token in one step may have many in the next."""


class Experts(nn.Module):
    """``E`` feed-forward layers, with a gate or of two matrices, in stacks ``(E, out, in)``; biases are ``(E, out)``.

    Which rows an expert works on is its dispatcher's to say.
    """

    gradient_scale: torch.Tensor | None

    def __init__(
        self,
        n_experts: int,
        dim: int,
        hidden_dim: int,
        activation: Activation | Clamp,
        *,
        gated: bool,
        bias: bool = False,
        scale_gradients: bool = False,
    ) -> None:
        super().__init__()
        self.n_experts, self.hidden_dim = n_experts, hidden_dim
        self.first_expert = 0
        """Of this rank's."""
        self.activate = activation
        self.batched = next((name for name, function in FUNCTIONS.items() if function is activation), None)
        """Its name, if ``batched_experts`` has it."""
        self.gate = nn.Parameter(torch.empty(n_experts, hidden_dim, dim)) if gated else None
        self.up = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.gate_bias = nn.Parameter(torch.empty(n_experts, hidden_dim)) if bias and gated else None
        self.up_bias = nn.Parameter(torch.empty(n_experts, hidden_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(n_experts, dim)) if bias else None
        self.register_buffer("gradient_scale", torch.empty(n_experts) if scale_gradients else None)
        self.dispatcher: Dispatcher = LocalDispatcher(n_experts)
        self.product: Callable[[torch.Tensor, torch.Tensor], Product] = grouped_product
        """How rows are multiplied; while it is this one, bf16 on a CPU goes through ``batched_experts`` instead."""
        self.chunks: int | None = None
        """In how many parts rows travel beside what is computed; ``None``: all at once, and nothing beside."""

    def forward(
        self, hidden: torch.Tensor, assignments: Assignments, meanwhile: Meanwhile | None = None
    ) -> torch.Tensor:
        """The weighted sum of its experts' outputs for each token, ``(B, S, D)``.

        Args:
            hidden: ``(B, S, D)``.
            assignments: of its T = B · S tokens.
            meanwhile: what can be done while rows are on their way.
        """
        if self.chunks is not None:
            dispatcher: Any = self.dispatcher
            tokens = hidden.flatten(0, 1)
            return overlapped(dispatcher, self.compute, tokens, assignments, self.chunks, meanwhile).view_as(hidden)
        dispatched = self.dispatcher.dispatch(hidden.flatten(0, 1), assignments)
        output = self.compute(dispatched.rows, dispatched.counts)
        return self.dispatcher.combine(output, dispatched).view_as(hidden)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Each row through its expert.

        Args:
            rows: ``(R, D)``, those of this rank's first expert first.
            counts: ``(E,)`` int64, rows of each of this rank's experts. Rows beyond their sum belong to none, and give
                anything.
        """
        gate = None if self.gate is None else self._local(self.gate)
        up, down = self._local(self.up), self._local(self.down)
        is_plain = self.up_bias is None and self.product is grouped_product
        if self.batched is not None and is_plain and in_batches(rows):
            return batched_experts(rows, counts, gate, up, down, self.batched)
        multiply = self.product(counts, up)
        raised = self._biased(multiply(rows, up), self.up_bias, counts)
        gated = None if gate is None else self._biased(multiply(rows, gate), self.gate_bias, counts)
        hidden = activated(self.activate, raised, gated)
        # of a part of the hidden features, the output is a part of the sum, which has as much of the bias
        return self._biased(multiply(hidden, down), self.down_bias, counts, up.shape[1] / self.hidden_dim)

    def learn_load(self, load: torch.Tensor) -> None:
        """From here on, scale the gradient of each expert's weights by the mean load over its own, if that is wanted;
        as before, if there was none.

        Args:
            load: ``(E,)`` fp32, tokens of each expert in a step.
        """
        if self.gradient_scale is not None:
            scale = (load.mean() / load.clamp(min=1)).clamp(max=_MOST)
            self.gradient_scale.copy_(torch.where(load.sum() > 0, scale, self.gradient_scale))

    def _biased(
        self, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor, part: float = 1.0
    ) -> torch.Tensor:
        """``(R, F)``, each row with so much of the bias of its expert; as it is without biases. Rows of no expert
        become 0, and their gradients, which may be anything, too."""
        if bias is None:
            return rows
        bias = self._local(bias) * part if part != 1 else self._local(bias)
        ends = counts.cumsum(0)
        place = torch.arange(len(rows), device=rows.device)[:, None]
        owner = (place >= ends - counts) & (place < ends)
        return torch.where(place < ends[-1], torch.addmm(rows, owner.to(rows.dtype), bias.to(rows.dtype)), 0)

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part, connected to the whole."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.gradient_scale is None:
            return local
        scale = self.gradient_scale[self.first_expert : self.first_expert + len(local)]
        scaled: torch.Tensor = _ScaleGradient.apply(local, scale)  # type: ignore[no-untyped-call]  # torch's
        return scaled

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``: each expert as a layer of its own would be."""
        if self.gate is not None:
            rng.fill_each(f"{prefix}gate", self.gate, normal(std))
        rng.fill_each(f"{prefix}up", self.up, normal(std))
        rng.fill_each(f"{prefix}down", self.down, normal(residual_std))
        for name, bias in self._biases().items():
            rng.fill_each(f"{prefix}{name}", bias, zeros)
        if self.gradient_scale is not None:
            rng.fill(f"{prefix}gradient_scale", self.gradient_scale, lambda full, _: full.fill_(1))

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        return {name: "bias" if name in self._biases() else "expert" for name, _ in self.named_parameters()}

    def feature_dims(self) -> Mapping[str, int]:
        """Same as ``StackedExperts.feature_dims``."""
        dims = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}
        return {name: dim for name, dim in dims.items() if getattr(self, name) is not None}

    def multiply_in_float8(self, capability: tuple[int, int] | None) -> None:
        """Same as ``Float8Experts.multiply_in_float8``."""
        sizes = self._local(self.up).shape[1:]
        if any(size % FLOAT8_MULTIPLE for size in sizes):
            raise ConfigError(
                f"of {sizes[0]} features on a rank and {sizes[1]} of a token, one is no multiple of {FLOAT8_MULTIPLE}, "
                "as products in float8 need"
            )
        if capability not in (None, (9, 0)):
            raise ConfigError(
                "torch multiplies experts in float8 on GPUs with compute capability 9.0 (H100, H200), and on none with "
                f"{capability[0]}.{capability[1]}"
            )
        self.product = emulated_float8_product if capability is None else float8_product

    def expert_parameters(self) -> int:
        """Weights of one expert, without biases."""
        return sum(stack[0].numel() for stack in (self.gate, self.up, self.down) if stack is not None)

    def _biases(self) -> dict[str, nn.Parameter]:
        biases = {"gate_bias": self.gate_bias, "up_bias": self.up_bias, "down_bias": self.down_bias}
        return {name: bias for name, bias in biases.items() if bias is not None}


class _ScaleGradient(torch.autograd.Function):
    """A stack as it is; the gradient of each layer of it is multiplied."""

    @staticmethod
    def forward(ctx: Any, stack: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale.clone())  # which has changed when the next step begins
        return unchanged(stack)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * scale.view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype), None
