"""The weights of a sparse model from those of a dense one: upcycling, in memory.

Shapes: T = tokens, D = width of the residual stream, H = width of the dense layer, E = experts, G = parts into which a
copy of the dense layer is cut, so that an expert has the width H / G.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

import attrs
import torch
from attrs.validators import ge, le
from torch import nn

from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.contracts.model import canonical_name
from forge_core.contracts.router import Routing
from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer, named_tensors
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_moe.config import MoEConfig
from forge_plugins_moe.feed_forward import MoE

PRESERVED = 1e-5
"""Below this ``UpcycledLayer.spread``, what a layer computes is what the dense one did, but for rounding."""
_SAMPLE = 512
"""Tokens on which a router's weights are measured."""


def _is_scaled(how: Upcycling, _: attrs.Attribute[str], value: str) -> None:
    if value == "cbrt" and how.granularity == 1:
        raise ValueError(f"scale = {value!r} has no effect with granularity = 1, where nothing is cut")


@attrs.frozen(kw_only=True)
class Upcycling:
    """How experts come from dense layers. By default each is a copy (Komatsuzaki et al. 2022, arXiv 2212.05055).

    Raises:
        ValueError: from the constructor, for a value out of range.
    """

    granularity: int = attrs.field(default=1, validator=ge(1))
    """G. Each copy is cut into so many experts, whose rows of the router are equal at first, so that a token visits all
    parts of a copy or none (virtual groups, He et al. 2024, arXiv 2410.07524, section 3.2)."""
    scale: Literal["down_only", "cbrt"] = attrs.field(default="down_only", validator=_is_scaled)
    """What is scaled so that the weighted sum over a token's experts is what the dense layer gave. ``down_only``: the
    last matrix, which is exact. ``cbrt``: all three, by the cube root of the scale (He et al.), which changes what
    SwiGLU computes by some percent."""
    drop: float = attrs.field(default=0.0, validator=[ge(0), le(1)])
    """Fraction of each expert's hidden features that start anew, so that experts differ: their weights are drawn from a
    normal distribution of the mean and standard deviation of the replaced ones (drop-upcycling, Nakamura et al.
    2025, arXiv 2502.19261, section 3). The function is then not preserved."""
    seed: int = attrs.field(default=0, validator=ge(0))
    """Decides the routers' weights, and what ``drop`` draws."""


@attrs.frozen
class UpcycledLayer:
    """What became of one layer."""

    scale: float
    """By which its experts were multiplied: 1 over the weight that each part of a copy has in the mean of tokens."""
    spread: float
    """Largest relative difference of a token's weight from that mean. It is 0 where the weights of a token's experts
    always have the same sum, and else what a token's output is off by."""


class UpcycledState(Mapping[str, torch.Tensor]):
    """Parameters and persistent buffers of a sparse model, by name; each is made when it is asked for.

    Args:
        dense: those of the dense model, by name, as ``state_dict()`` gives them.
        sparse: the sparse model, built on meta. It differs from the dense one in its feed-forward layers, of which each
            that is a ``MoE`` gets experts from the dense layer of its name.
        read: gives one of ``dense``, if those are on meta. It is asked for one block's after the other's.

    Raises:
        ConfigError: the two models do not fit; the experts are not as wide as ``granularity`` says; or the router does
            not send a token to all parts of a copy.
    """

    def __init__(
        self,
        dense: Mapping[str, torch.Tensor],
        sparse: nn.Module,
        how: Upcycling,
        read: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        saved = model_tensors(named_parameters([sparse]), [sparse])
        self.shapes = {key.removeprefix("model."): tensor for key, tensor in saved.items()}
        """All of them, on meta."""
        self.layers: dict[str, UpcycledLayer] = {}
        """By the name of the feed-forward layer."""
        self._dense, self._read, self.how = dense, read or dense.__getitem__, how
        self._sparse = {canonical_name(name): part for name, part in sparse.named_modules() if isinstance(part, MoE)}
        self._experts = {
            f"{layer}.experts.{matrix}": (layer, matrix)
            for layer, part in self._sparse.items()
            for matrix, _ in part.experts.named_parameters()
        }
        self._refuse_misfits(sparse)
        self._drawn = self._draw(sparse)
        vocab_size: int = sparse.vocab_size  # type: ignore[assignment]  # the contract of a model
        for layer, part in self._sparse.items():
            self.layers[layer] = self._measure(layer, part, vocab_size)

    @property
    def preserves(self) -> bool:
        """Return whether the sparse model computes what the dense one does, but for rounding."""
        return (
            self.how.drop == 0
            and self.how.scale == "down_only"
            and all(layer.spread < PRESERVED for layer in self.layers.values())
            and all(part.config.capacity_factor is None for part in self._sparse.values())
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._experts:
            return self._stack(*self._experts[name])
        value = self._read(name) if name in self._dense else self._drawn[name]
        return value.to(self.shapes[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _stack(self, layer: str, matrix: str) -> torch.Tensor:
        """``(E, H / G, D)``, or ``(E, D, H / G)`` for ``down``: expert ``e`` is part ``e % G`` of copy ``e // G``."""
        shape = self.shapes[f"{layer}.experts.{matrix}"]
        axis = 1 if matrix == "down" else 0
        parts = self._read(f"{layer}.{matrix}.weight").float().chunk(self.how.granularity, dim=axis)
        parts = tuple(part * self._factor(layer, matrix) for part in parts)
        stack = torch.empty(shape.shape, dtype=shape.dtype)
        for expert in range(len(stack)):
            part = parts[expert % len(parts)]
            stack[expert] = self._start_anew(part, axis, f"{layer}.{expert}", matrix) if self.how.drop else part
        return stack

    def _factor(self, layer: str, matrix: str) -> float:
        scale = self.layers[layer].scale
        if self.how.scale == "cbrt":
            return float(scale ** (1 / 3))
        return scale if matrix == "down" else 1.0

    def _start_anew(self, weight: torch.Tensor, axis: int, expert: str, matrix: str) -> torch.Tensor:
        """With other values for the same hidden features in all of an expert's matrices."""
        n_features = weight.shape[axis]
        features = torch.randperm(n_features, generator=self._generator(expert))[: round(self.how.drop * n_features)]
        if len(features) == 0:
            return weight
        replaced = weight.index_select(axis, features)
        drawn = torch.empty_like(replaced).normal_(generator=self._generator(f"{expert}.{matrix}"))
        return weight.index_copy(axis, features, drawn * replaced.std(correction=0) + replaced.mean())

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.how.seed}:drop:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))

    def _draw(self, sparse: nn.Module) -> dict[str, torch.Tensor]:
        """First values of what the dense model does not have, with equal rows of routers for the parts of a copy."""
        given = self._dense.keys() | self._experts.keys()
        drawing = Drawing(self.how.seed, lambda name: name not in given)
        with torch.no_grad():
            sparse.init_weights(drawing)  # type: ignore[operator]  # the contract of a model
        parts = self.how.granularity
        for layer, part in self._sparse.items():
            for name, _ in named_tensors(part.router):
                rows = drawing.drawn[f"{layer}.router.{name}"]
                if rows.ndim and len(rows) == part.config.n_experts:
                    drawing.drawn[f"{layer}.router.{name}"] = rows[::parts].repeat_interleave(parts, dim=0)
        return drawing.drawn

    def _refuse_misfits(self, sparse: nn.Module) -> None:
        if not self._sparse:
            raise ConfigError("the sparse model has no layer with experts")
        for layer, part in self._sparse.items():
            _refuse_layer(layer, part, self._dense, self.how)
        sparse_only = tuple(f"{layer}.{part}." for layer in self._sparse for part in ("router", "experts"))
        expected = {name for name in self.shapes if not name.startswith(sparse_only)}
        expected |= {f"{layer}.{matrix}.weight" for layer, matrix in self._experts.values()}
        if missing := sorted(expected - self._dense.keys()):
            raise ConfigError(
                f"the two models differ in more than feed-forward layers: the dense one has no {missing[0]}"
            )
        if strange := sorted(name for name in self._dense.keys() - expected if not self._is_tied(name, expected)):
            raise ConfigError(
                f"the two models differ in more than feed-forward layers: the sparse one has no {strange[0]}"
            )

    def _is_tied(self, name: str, expected: Collection[str]) -> bool:
        """Return whether a tensor of the dense model is one of those of the sparse model, by another name."""
        memory = self._dense[name].untyped_storage()._cdata
        return any(self._dense[one].untyped_storage()._cdata == memory for one in expected)

    @torch.no_grad()
    def _measure(self, layer: str, part: MoE, vocab_size: int) -> UpcycledLayer:
        """By what weights the router multiplies, for hidden states as a norm gives them."""
        router = copy.deepcopy(part.router).to_empty(device="cpu")
        for name, tensor in named_tensors(router):
            tensor.copy_(self._drawn[f"{layer}.router.{name}"])
        dim = part.experts.up.shape[2]
        generator = torch.Generator().manual_seed(self.how.seed)
        hidden = nn.functional.rms_norm(torch.randn(_SAMPLE, dim, generator=generator), (dim,))
        norm = f"{layer}_norm.weight"  # what a block of the dense decoder calls it
        if norm in self._dense:
            hidden = hidden * self._read(norm).float()
        facts = {
            "token_ids": torch.arange(_SAMPLE) % vocab_size,
            "sequence": torch.zeros(_SAMPLE, dtype=torch.int64),
            "noise": torch.arange(_SAMPLE),
        }
        facts = {name: facts[name] for name in part.needs}
        with torch.random.fork_rng(devices=[]):  # in training, some routers add noise
            torch.manual_seed(self.how.seed)
            training = self._share_of_parts(router.train()(hidden, None, **facts), part.config.n_experts)
        # what predicts the choice of experts in evaluation has not learned anything yet
        share = training
        if getattr(router, "predictor", None) is None:
            share = self._share_of_parts(router.eval()(hidden, None, **facts), part.config.n_experts)
        mean = share.mean()
        if any((one - one.mean(1, keepdim=True)).abs().max() > PRESERVED * mean for one in (training, share)):
            raise ConfigError(
                f"granularity = {self.how.granularity}: {layer}.router does not send a token to all parts of a copy "
                "of the dense layer alike; it must go by its scores alone, without noise, and its top_k must be a "
                f"multiple of {self.how.granularity}"
            )
        return UpcycledLayer(scale=1 / mean.item(), spread=((share - mean).abs().max() / mean).item())

    def _share_of_parts(self, routing: Routing, n_experts: int) -> torch.Tensor:
        """The weight of each part for each token, ``(T, G)``, whichever copies it is of."""
        share = torch.zeros(_SAMPLE, n_experts + 1)
        share.index_put_((routing.token, routing.expert), routing.weight.float(), accumulate=True)
        return share[:, :-1].view(_SAMPLE, -1, self.how.granularity).sum(1)


class Drawing(SeededInitializer):
    """Keeps what a model on meta would be filled with: of tensors that are wanted, without the memory of others."""

    def __init__(self, seed: int, is_wanted: Callable[[str], bool]) -> None:
        super().__init__(seed)
        self._is_wanted = is_wanted
        self.drawn: dict[str, torch.Tensor] = {}

    def fill(self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]) -> None:
        if self._is_wanted(name):
            super().fill(name, self._room(name, tensor), fill)

    def fill_each(
        self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]
    ) -> None:
        if self._is_wanted(name):
            super().fill_each(name, self._room(name, tensor), fill)

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.drawn[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.drawn[name]


def _refuse_layer(layer: str, part: MoE, dense: Mapping[str, torch.Tensor], how: Upcycling) -> None:
    if part.shared is not None:
        raise ConfigError(
            f"{layer}: nothing of a dense layer is shared by experts; set shared_experts = 0 in the sparse model"
        )
    if part.config.bias or _has_another_activation(part.config):
        key = "bias" if part.config.bias else "activation"
        raise ConfigError(
            f"{layer}: {key} of experts does not come from a dense layer; leave out {key} in the sparse model"
        )
    if f"{layer}.up.bias" in dense:
        raise ConfigError(f"{layer} has biases in the dense model; experts can be made of layers without biases alone")
    if part.config.n_experts % how.granularity:
        raise ConfigError(
            f"granularity = {how.granularity}: {part.config.n_experts} experts are not whole copies of a dense layer "
            f"that is cut into {how.granularity} parts; make it a multiple"
        )
    if how.scale == "cbrt" and part.experts.gate is None:
        raise ConfigError(f'scale = "cbrt" is for the three matrices of SwiGLU, and {layer} has two; use "down_only"')
    for matrix, stack in part.experts.named_parameters():
        name = f"{layer}.{matrix}.weight"
        if name not in dense:
            raise ConfigError(f"the dense model has no {name}, from which the experts of {layer} could come")
        wanted = list(stack.shape[1:])
        wanted[1 if matrix == "down" else 0] *= how.granularity
        if list(dense[name].shape) != wanted:
            raise ConfigError(
                f"{name} of the dense model has shape {tuple(dense[name].shape)}, and {how.granularity} parts as wide "
                f"as the experts of {layer} make {tuple(wanted)}; leave out hidden_dim and width_factor there"
            )


def _has_another_activation(config: MoEConfig) -> bool:
    """Experts compute another function of the same matrices than the dense layer."""
    dense, own = config.dense.config, config.expert
    return isinstance(dense, MLPConfig) and any(
        getattr(own, key) != getattr(dense, key) for key in ("activation", "activation_limit", "activation_slope")
    )
