"""The tuned lens: an affine map for each layer, after which the model's own norm and head read it out (Belrose et al.
2023, arXiv 2303.08112, section 3).

Shapes: B = batch, S = sequence, D = width, V = vocabulary, L = blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from forge_core.contracts.loss import IGNORED, LossSum
from forge_core.contracts.model import Initializer, ParameterRole
from forge_core.contracts.parallel_pass import Folded, PassContext
from forge_core.errors import ConfigError
from forge_plugins_interp.lenses.config import TunedLensConfig

_NAME = "lens"


class Translator(nn.Module):
    """``h + A h + b`` of what a block reads, ``(…, D)``; zero at first, and so the logit lens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.register_buffer("divergence", torch.empty(2), persistent=False)
        """The sum over positions, in nats, and their number."""
        self.divergence: torch.Tensor

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` to ``(…, D)``."""
        return stream + F.linear(stream, self.weight, self.bias)

    def translate(self, stream: torch.Tensor) -> torch.Tensor:
        """Same as ``forward``, outside of the model's forward, where parameters may be shards."""
        weight, bias = (one.full_tensor() if isinstance(one, DTensor) else one for one in (self.weight, self.bias))
        return stream + F.linear(stream, weight.to(stream.dtype), bias.to(stream.dtype))

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill all with zeros."""
        for name in ("weight", "bias", "divergence"):
            rng.fill(f"{prefix}{name}", getattr(self, name), lambda full, _: full.zero_())

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        """Same as ``StepModule.accumulators``."""
        return {"divergence": self.divergence}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        """Same as ``StepModule.before_optimizer_step``."""
        total, count = reduced["divergence"].unbind()
        self._mean = total / count.clamp(min=1)

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        """Same as ``ReportsMetrics.step_metrics``: the divergence from the model's prediction, in nats a token; 0 in a
        step without targets, as its loss."""
        return {"kl": self._mean.float()}


class TunedLens:
    """Freezes the model, and trains a ``Translator`` for what each block reads, to predict what the model predicts."""

    def __init__(self, config: TunedLensConfig) -> None:
        """``config`` has no keys."""

    def add(self, model: Any) -> None:
        """Same as ``AddingPass.add``.

        Raises:
            ConfigError: the model has more after its last block than a norm and a head.
        """
        if getattr(model, "n_predictors", 0):
            raise ConfigError(
                "parallel.passes.tuned_lens: the model predicts further tokens as well; leave out their predictors "
                "(model.multi_token)"
            )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        width = model.head.weight.shape[1]
        model.add_module(_NAME, nn.ModuleDict({layer: Translator(width) for layer in model.blocks}))
        model.__class__ = _with_lens(type(model))  # type: ignore[arg-type]  # torch types __hash__ of modules oddly

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``."""
        return model, [f"{_NAME}.{layer}" for layer in model.get_submodule(_NAME)]  # type: ignore[attr-defined]

    def folded(self, names: Collection[str]) -> Mapping[str, Folded]:
        """Same as ``AddingPass.folded``: the model's weights are as they were."""
        return {}


def translators_of(model: nn.Module) -> Mapping[str, Translator]:
    """Translators that the pass has added, by block; empty without it."""
    found: Any = getattr(model, _NAME, {})
    return dict(found.items()) if isinstance(model, _LensModel) else {}


class _LensModel:
    """Mixed into the class of a model. With a loss, its own is that of the translators."""

    def forward(
        self: Any, tokens: torch.Tensor, targets: torch.Tensor | None = None, loss: Any = None, **inputs: Any
    ) -> torch.Tensor | LossSum:
        """
        Returns:
            Without ``loss``, what the model gives. With it, for each target, the mean over layers of the divergence
            KL(model ‖ translated layer), in nats (equation 3).
        """
        if loss is None:
            logits: torch.Tensor = super().forward(tokens, **inputs)  # type: ignore[misc]
            return logits
        assert targets is not None, "a loss needs targets"

        def diverge(hidden: torch.Tensor, head: nn.Module, _: torch.Tensor) -> LossSum:
            return _divergence(hidden, head, targets, self.lens if self.training else None)

        with _read_out(self):
            summed: LossSum = super().forward(tokens, targets, diverge, **inputs)  # type: ignore[misc]
        return summed

    def train(self: Any, mode: bool = True) -> Any:
        """Same as ``nn.Module.train``. The model is read as it predicts: without dropout, noise of routers and capacity
        of experts."""
        super().train(False)  # type: ignore[misc]
        self.lens.train(mode)
        self.training = mode
        return self

    def init_weights(self: Any, rng: Initializer) -> None:
        """Fill those of the translators, too."""
        super().init_weights(rng)  # type: ignore[misc]
        for layer, translator in self.lens.items():
            translator.init_weights(rng, f"{_NAME}.{layer}.")

    def parameter_roles(self: Any) -> dict[str, ParameterRole]:
        """Those of the translators, too."""
        roles: dict[str, ParameterRole] = dict(super().parameter_roles())  # type: ignore[misc]
        for layer in self.lens:
            roles |= {f"{_NAME}.{layer}.weight": "matrix", f"{_NAME}.{layer}.bias": "bias"}
        return roles

    def flops_per_token(self: Any, seq_len: int) -> float:
        """The model forward alone; of each layer a translator, and the head forward and to its input."""
        frozen: float = super().flops_per_token(seq_len)  # type: ignore[misc]
        width = self.head.weight.shape[1]
        each: float = 6.0 * width * width + 4.0 * self.head.weight.numel()
        return frozen / 3 + len(self.lens) * each


@functools.cache
def _with_lens(own: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lens{own.__name__}", (_LensModel, own), {"__module__": __name__})


@contextmanager
def _read_out(model: Any) -> Iterator[None]:
    """Let the model's last block give its own output and, as further samples, what each layer is translated to: norm,
    head and all that the model does between them then treat these alike."""
    streams: list[torch.Tensor] = []

    def keep(layer: str) -> Any:
        return lambda block, args: streams.append(model.lens[layer](args[0].detach()))

    def attach(block: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((output, *streams))

    hooks = [block.register_forward_pre_hook(keep(layer)) for layer, block in model.blocks.items()]
    hooks.append([*model.blocks.values()][-1].register_forward_hook(attach))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _divergence(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, translators: nn.ModuleDict | None
) -> LossSum:
    """
    Args:
        hidden: ``((1 + L) · B, S, D)``, the model's own first.
        translators: whose sums grow, if any.
    """
    own, *layers = hidden.split(len(targets))  # type: ignore[no-untyped-call]  # torch's
    valid = targets != IGNORED
    with torch.no_grad():
        expected = torch.log_softmax(head(own).float(), -1)
    each = []
    for layer in layers:  # the logits of one layer at a time: they are computed again for the backward
        each.append(checkpoint(_divergence_of, layer, head, expected, use_reentrant=False) * valid)
    for translator, of_layer in zip(() if translators is None else translators.values(), each, strict=False):
        translator.divergence += torch.stack((of_layer.detach().sum(), valid.sum()))  # type: ignore[operator]
    mean = torch.stack(each).mean(0)
    return LossSum(mean.sum(), valid.sum(), mean.detach())


def _divergence_of(hidden: torch.Tensor, head: nn.Module, expected: torch.Tensor) -> torch.Tensor:
    """``(B, S)``, from log-probabilities ``(B, S, V)`` that are expected."""
    found = torch.log_softmax(head(hidden).float(), -1)
    return F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
