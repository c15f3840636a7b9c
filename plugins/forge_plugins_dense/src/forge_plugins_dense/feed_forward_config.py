"""What can be set for the feed-forward layer ``mlp``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import attrs
from attrs.validators import gt, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.activation_config import CLAMPED_SWIGLU, as_activation

if TYPE_CHECKING:
    from forge_core.config.sections import Job


def _has_effect(config: MLPConfig, _: attrs.Attribute[float], value: float) -> None:
    if config.hidden_dim is not None and value != 1.0:
        raise ValueError("has no effect beside hidden_dim; give one of the two")


def _with_clamp(config: MLPConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if value != attribute.default and config.activation != CLAMPED_SWIGLU:
        raise ValueError('has no effect without activation = "clamped_swiglu"')


def _is_possible(config: MLPConfig, _: attrs.Attribute[bool | None], value: bool | None) -> None:
    if value is False and config.activation == CLAMPED_SWIGLU:
        raise ValueError("clamped_swiglu has a gate; remove gated, or choose another activation")


@attrs.frozen(kw_only=True)
class MLPConfig:
    """A dense feed-forward layer."""

    hidden_dim: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Width of the hidden layer; by default ``8/3 · dim · multiplier``, rounded up to a multiple of 256 (Llama)."""
    multiplier: float = attrs.field(default=1.0, validator=[gt(0), _has_effect])
    """Scales the default ``hidden_dim``."""
    activation: Annotated[ComponentRef, Slot("activation", default="silu")] = attrs.field(
        default="silu",  # type: ignore[assignment]  # what the converter takes
        converter=as_activation,
    )
    """``gelu`` is exact, ``gelu_tanh`` its approximation (GPT-2, Gemma); ``relu2`` is ``relu(x)²`` (Primer).
    ``clamped_swiglu`` is ``(u + 1) · g · σ(slope · g)`` of what ``gate`` gives, at most the limit, and of what ``up``
    gives, within the limit on both sides (gpt-oss). Packages bring others."""
    activation_limit: float = attrs.field(default=7.0, validator=[gt(0), _with_clamp])
    """The limit of ``clamped_swiglu``."""
    activation_slope: float = attrs.field(default=1.702, validator=[gt(0), _with_clamp])
    """The slope of ``clamped_swiglu``."""
    gated: bool | None = attrs.field(default=None, validator=_is_possible)
    """Three matrices, ``down(activation(gate(x)) · up(x))``: SwiGLU with ``silu``, GeGLU with ``gelu_tanh``; or two,
    ``down(activation(up(x)))``. By default, ``silu`` is gated and the others of this
    package are not; ``clamped_swiglu`` is in any case."""
    bias: bool = False
    """Add a bias in each of the matrices."""

    @property
    def is_gated(self) -> bool:
        """``gated``, the default filled in."""
        return bool(getattr(self.activation.config, "gated_by_default", False)) if self.gated is None else self.gated

    def width(self, dim: int) -> int:
        """Width of the hidden layer in a model of width ``dim``."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return 256 * math.ceil(int(8 / 3 * dim * self.multiplier) / 256)

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this layer in this job, unless it is part of another one, which knows where it stands."""
        model = job.model.config
        stands = [getattr(model, "feed_forward", None), *(one.feed_forward for one in getattr(model, "layers", ()))]
        if stands[0] is None or any(one is not None and one.config is self for one in stands):
            yield from self.contradictions_in(job)

    def contradictions_in(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this layer in a block of this job's model."""
        tp = job.parallel.tp
        dim: int | None = getattr(job.model.config, "dim", None)
        width = self.hidden_dim if dim is None else self.width(dim)
        if width is not None and width % tp:
            default = "" if self.hidden_dim is not None else " (the default)"
            yield "hidden_dim", f"{width} features{default} cannot be shared out evenly to parallel.tp = {tp} ranks"
