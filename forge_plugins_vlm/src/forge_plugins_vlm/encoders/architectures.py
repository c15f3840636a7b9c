"""Sizes of the vision transformers of ``transformers``, by the keys of their ``config.json``. Nothing here may import
torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import attrs
from attrs.validators import and_, ge, gt, le

HiddenAct = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu"]


def _divides_hidden_size(one: Architecture, _: attrs.Attribute[int], value: int) -> None:
    if one.hidden_size % value:
        raise ValueError(f"must divide hidden_size = {one.hidden_size}, got {value}")


def _is_square(_: object, __: attrs.Attribute[int], value: int) -> None:
    if math.isqrt(value) ** 2 != value:
        raise ValueError(f"must be a square, as learned positions are those of a square grid, got {value}")


def _has_a_patch(one: SquareArchitecture, _: attrs.Attribute[int], value: int) -> None:
    if value < one.patch_size:
        raise ValueError(f"must be at least patch_size = {one.patch_size}, got {value}")


@attrs.frozen(kw_only=True)
class Architecture(ABC):
    """What the families have in common."""

    hidden_size: int = attrs.field(default=768, validator=gt(0))
    """Width of a feature."""
    num_hidden_layers: int = attrs.field(default=12, validator=and_(ge(1), le(10_000)))
    """Transformer layers."""
    num_attention_heads: int = attrs.field(default=12, validator=[gt(0), _divides_hidden_size])
    """Heads of attention in each."""
    patch_size: int = attrs.field(default=16, validator=gt(0))
    """Height and width of the pixels that become a feature."""
    hidden_act: HiddenAct = "gelu_pytorch_tanh"
    """Activation of the MLPs: exact, by tanh, or ``x · sigmoid(1.702 x)``."""
    layer_norm_eps: float = attrs.field(default=1e-6, validator=gt(0.0))
    """Added to the variance in norms."""

    @property
    @abstractmethod
    def mlp_weights(self) -> int:
        """Weights of the MLP of a layer."""


@attrs.frozen(kw_only=True)
class SquareArchitecture(Architecture):
    """A family whose positions are learned for pictures of one size."""

    image_size: int = attrs.field(default=224, validator=[gt(0), _has_a_patch])
    """Height and width of a picture, in pixels."""


@attrs.frozen(kw_only=True)
class SiglipArchitecture(SquareArchitecture):
    """Sizes of a SigLIP; the defaults are those of ``siglip-base-patch16-224``."""

    intermediate_size: int = attrs.field(default=3072, validator=gt(0))
    """Width of the hidden layer of an MLP."""

    @property
    def mlp_weights(self) -> int:
        """Same as ``Architecture.mlp_weights``."""
        return 2 * self.hidden_size * self.intermediate_size


@attrs.frozen(kw_only=True)
class ClipArchitecture(SiglipArchitecture):
    """Sizes of the vision tower of a CLIP; the defaults are those of ``clip-vit-base-patch32``."""

    patch_size: int = attrs.field(default=32, validator=gt(0))
    """Height and width of the pixels that become a feature."""
    hidden_act: HiddenAct = "quick_gelu"
    """Same as ``Architecture.hidden_act``."""
    layer_norm_eps: float = attrs.field(default=1e-5, validator=gt(0.0))
    """Added to the variance in norms."""


@attrs.frozen(kw_only=True)
class NaFlexArchitecture(Architecture):
    """Sizes of a SigLIP 2 for pictures of any size; the defaults are those of ``siglip2-base-patch16-naflex``."""

    intermediate_size: int = attrs.field(default=3072, validator=gt(0))
    """Width of the hidden layer of an MLP."""
    num_patches: int = attrs.field(default=256, validator=[gt(0), _is_square])
    """Learned positions, a square grid that is resized to that of each picture."""

    @property
    def mlp_weights(self) -> int:
        """Same as ``Architecture.mlp_weights``."""
        return 2 * self.hidden_size * self.intermediate_size


@attrs.frozen(kw_only=True)
class Dinov2Architecture(SquareArchitecture):
    """Sizes of a DINOv2; the defaults are those of ``dinov2-base``."""

    image_size: int = attrs.field(default=518, validator=[gt(0), _has_a_patch])
    """Height and width of a picture, in pixels."""
    patch_size: int = attrs.field(default=14, validator=gt(0))
    """Height and width of the pixels that become a feature."""
    hidden_act: HiddenAct = "gelu"
    """Same as ``Architecture.hidden_act``."""
    mlp_ratio: int = attrs.field(default=4, validator=gt(0))
    """Width of the hidden layer of an MLP, in units of ``hidden_size``."""
    use_swiglu_ffn: bool = False
    """Gate the MLPs (SwiGLU, of about two thirds of that width), as ``dinov2-giant`` does."""
    qkv_bias: bool = True
    """Add a bias to queries, keys and values."""
    layerscale_value: float = 1.0
    """Initial factor on what a layer adds."""

    @property
    def mlp_weights(self) -> int:
        """Same as ``Architecture.mlp_weights``."""
        hidden = self.hidden_size * self.mlp_ratio
        if self.use_swiglu_ffn:
            return 3 * self.hidden_size * ((int(hidden * 2 / 3) + 7) // 8 * 8)
        return 2 * self.hidden_size * hidden
