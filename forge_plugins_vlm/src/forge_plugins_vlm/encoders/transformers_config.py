"""What can be set for encoders whose layers are those of ``transformers``. Nothing here may import torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs.validators import le

from forge_core.errors import ConfigError
from forge_plugins_vlm.config import sources_of_batches
from forge_plugins_vlm.contracts.vision_encoder import Grid, VisionEncoderConfig
from forge_plugins_vlm.encoders.architectures import (
    Architecture,
    ClipArchitecture,
    Dinov2Architecture,
    NaFlexArchitecture,
    SiglipArchitecture,
)
from forge_plugins_vlm.encoders.vision_folder import Normalisation, read_architecture, read_normalisation

if TYPE_CHECKING:
    from forge_core.config.sections import Job

ClassToken = Literal["drop", "keep"]

_HALF = (0.5, 0.5, 0.5)
CLIP = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), "bicubic")
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _one_of_two(config: TransformersConfig, _: attrs.Attribute[Any], value: Architecture | None) -> None:
    if (value is None) == (config.path is None):
        how = "is not there, nor is path" if value is None else "is given beside path"
        raise ValueError(f"{how}; give one of the two: path for the weights of a folder, architecture for random ones")


@functools.cache  # each forward asks for the grid
def _read_once(folder: Path, cls: Any, model_types: tuple[str, ...]) -> Any:
    return read_architecture(folder, cls, model_types)


def _are_positive(_: object, __: object, value: Grid | None) -> None:
    if value is not None and min(value) < 1:
        raise ValueError(f"must be positive, got {list(value)}")


@attrs.frozen(kw_only=True)
class TransformersConfig(VisionEncoderConfig):
    """What these encoders have in common."""

    model_types: ClassVar[tuple[str, ...]]
    """What ``config.json`` may call itself."""
    architecture_class: ClassVar[type[Architecture]]
    usual: ClassVar[Normalisation]
    """Of the family, where a folder does not say."""

    path: str | None = None
    """A folder with ``config.json``, safetensors and, perhaps, ``preprocessor_config.json``, as it is downloaded. Of a
    model of text and images, the vision tower is taken. Relative to the working directory; ``~`` is the home
    directory."""
    feature_layer: int = attrs.field(default=-1, validator=le(-1))
    """Which layer gives the features, from the end: −1 is the last, with the norm behind it, if the family has one; −2
    the one before, without a norm. Layers behind it are not built."""

    @property
    def found(self) -> Any:
        """The sizes: an ``Architecture``, of the table or of the folder.

        Raises:
            ConfigError: the folder does not have them.
        """
        architecture: Architecture | None = getattr(self, "architecture", None)
        if architecture is not None or self.folder is None:
            return architecture
        cls: Any = self.architecture_class  # mypy takes the hash of its instances for that of the class
        return _read_once(self.folder, cls, self.model_types)

    @property
    def folder(self) -> Path | None:
        """``path``, the home directory filled in."""
        return None if self.path is None else Path(self.path).expanduser()

    @property
    def normalisation(self) -> Normalisation:
        """How pictures are resized and normalised, by the folder or else as the family does it.

        Raises:
            ConfigError: the folder says something that is not allowed.
        """
        return self.usual if self.folder is None else read_normalisation(self.folder, self.usual)

    @property
    def dim(self) -> int:
        """Same as ``VisionEncoderConfig.dim``."""
        width: int = self.found.hidden_size
        return width

    @property
    def heads_to_cut(self) -> int:
        """Same as ``VisionEncoderConfig.heads_to_cut``."""
        heads: int = self.found.num_attention_heads
        return heads

    @property
    def depth(self) -> int:
        """Layers that are built.

        Raises:
            ConfigError: there are fewer than ``feature_layer`` asks for.
        """
        n_layers: int = self.found.num_hidden_layers
        if -self.feature_layer > n_layers:
            raise ConfigError(f"feature_layer = {self.feature_layer}, and the encoder has {n_layers} layers")
        return n_layers + 1 + self.feature_layer

    def flops(self, height: int, width: int) -> float:
        """Same as ``VisionEncoderConfig.flops``."""
        found, (rows, columns) = self.found, self.cells(height, width)
        positions = rows * columns + self.n_prefix
        layer = 4 * found.hidden_size**2 + found.mlp_weights
        patches = 2.0 * rows * columns * 3 * found.patch_size**2 * found.hidden_size
        total: float = patches + self.depth * positions * (2.0 * layer + 4.0 * found.hidden_size * positions)
        return total

    def cells(self, height: int, width: int) -> Grid:
        """Rows and columns of patches; what is less than a patch at the right and at the bottom is left out."""
        patch: int = self.found.patch_size
        return height // patch, width // patch

    @property
    def n_prefix(self) -> int:
        """Hidden states before those of patches."""
        return 0

    def notes(self, job: Job) -> Iterator[tuple[str, str]]:
        """A source resizes pictures by another filter than the weights were trained with."""
        wanted = self.normalisation.resample
        for place, source in (one for sources in sources_of_batches(job) for one in sources):
            found = getattr(source.processor.config, "resample", wanted)
            if self.folder is not None and found != wanted:
                sentence = f"its pictures are resized by {wanted!r}, and {place}.processor.resample is {found!r}"
                yield "path", f"{sentence}, by which features are a little different"

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with the folder, or with ``feature_layer``."""
        try:
            _ = self.normalisation, self.found
        except ConfigError as error:
            yield "path", str(error)
            return
        try:
            _ = self.depth
        except ConfigError as error:
            yield "feature_layer", str(error).partition("= ")[2]


@attrs.frozen(kw_only=True)
class FixedSizeConfig(TransformersConfig):
    """An encoder that takes tiles of one size."""

    size: tuple[int, int] | None = attrs.field(default=None, validator=_are_positive)
    """Height and width of a tile, in pixels; by default the size that positions were learned for. For others they are
    interpolated (bicubic), as ``transformers`` does."""

    @property
    def tile_size(self) -> Grid:
        """Same as ``VisionEncoderConfig.tile_size``."""
        return self.size or self.native_size

    @property
    def native_size(self) -> Grid:
        """Height and width of the pictures that positions were learned for."""
        side: int = self.found.image_size
        return side, side

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``."""
        if (height, width) != self.tile_size:
            raise ValueError(
                f"the encoder takes tiles of {self.tile_size[0]} × {self.tile_size[1]} pixels, and not of {height} × "
                f"{width}; set size = [{height}, {width}] for these"
            )
        rows, columns = self.cells(height, width)
        if not rows or not columns:
            raise ConfigError(f"size = [{height}, {width}] is less than a patch of {self.found.patch_size} pixels")
        return rows, columns


@attrs.frozen(kw_only=True)
class SiglipConfig(FixedSizeConfig):
    """SigLIP (Zhai et al. 2023, arXiv 2303.15343)."""

    model_types = ("siglip_vision_model", "siglip")
    architecture_class = SiglipArchitecture
    usual = Normalisation(_HALF, _HALF, "bicubic")

    architecture: SiglipArchitecture | None = attrs.field(default=None, validator=_one_of_two)
    """Sizes, in place of ``path``: the weights are then random."""


@attrs.frozen(kw_only=True)
class Siglip2Config(SiglipConfig):
    """SigLIP 2 for pictures of one size (Tschannen et al. 2025, arXiv 2502.14786): the architecture of SigLIP,
    with other weights. Its folders call themselves ``siglip``."""

    usual = Normalisation(_HALF, _HALF, "bilinear")


@attrs.frozen(kw_only=True)
class ClassTokenConfig(FixedSizeConfig):
    """An encoder whose first hidden state is of no patch."""

    cls: ClassToken = "drop"
    """The hidden state of the class token: ``drop`` it, or ``keep`` it as the first feature. The features then are one
    row, as they have no grid."""

    @property
    def n_prefix(self) -> int:
        """Same as ``TransformersConfig.n_prefix``."""
        return 1

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``."""
        rows, columns = super().grid(height, width)
        return (rows, columns) if self.cls == "drop" else (1, rows * columns + 1)


@attrs.frozen(kw_only=True)
class ClipConfig(ClassTokenConfig):
    """The vision tower of CLIP (Radford et al. 2021, arXiv 2103.00020). The norm behind its last layer is of the class
    token alone, and so of no feature."""

    model_types = ("clip_vision_model", "clip")
    architecture_class = ClipArchitecture
    usual = CLIP

    architecture: ClipArchitecture | None = attrs.field(default=None, validator=_one_of_two)
    """Sizes, in place of ``path``: the weights are then random."""


@attrs.frozen(kw_only=True)
class Dinov2Config(ClassTokenConfig):
    """DINOv2 without registers (Oquab et al. 2023, arXiv 2304.07193)."""

    model_types = ("dinov2",)
    architecture_class = Dinov2Architecture
    usual = Normalisation(*_IMAGENET, "bicubic")

    architecture: Dinov2Architecture | None = attrs.field(default=None, validator=_one_of_two)
    """Sizes, in place of ``path``: the weights are then random."""


@attrs.frozen(kw_only=True)
class NaFlexConfig(TransformersConfig):
    """SigLIP 2 for pictures of any size and aspect (NaFlex; Tschannen et al. 2025, arXiv 2502.14786). It takes padded
    tiles; learned positions are resized to the grid of each picture."""

    model_types = ("siglip2_vision_model", "siglip2")
    architecture_class = NaFlexArchitecture
    usual = Normalisation(_HALF, _HALF, "bilinear")

    architecture: NaFlexArchitecture | None = attrs.field(default=None, validator=_one_of_two)
    """Sizes, in place of ``path``: the weights are then random."""

    @property
    def tile_size(self) -> None:
        """Same as ``VisionEncoderConfig.tile_size``."""
        return

    @property
    def usual_tile(self) -> Grid:
        """Same as ``VisionEncoderConfig.usual_tile``: as many patches as there are learned positions."""
        side = round(self.found.num_patches**0.5) * self.found.patch_size
        return side, side

    @property
    def takes_padding(self) -> bool:
        """Same as ``VisionEncoderConfig.takes_padding``."""
        return True

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``."""
        patch: int = self.found.patch_size
        if height % patch or width % patch:
            raise ValueError(
                f"siglip2_naflex takes tiles of multiples of patch_size = {patch} pixels, and not of {height} × {width}"
            )
        return self.cells(height, width)
