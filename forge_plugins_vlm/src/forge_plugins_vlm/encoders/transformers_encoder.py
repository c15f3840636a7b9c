"""Encoders whose embeddings and layers are those of ``transformers``: SigLIP, SigLIP 2 of one size, CLIP and DINOv2.

Shapes: N = tiles, H × W = pixels, R × C = the grid of patches, T = hidden states, D = width.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_dense.initial_values import normal, ones, zeros
from forge_plugins_vlm.encoders.layer_sites import LayerParts
from forge_plugins_vlm.encoders.pixels import normalise
from forge_plugins_vlm.encoders.transformers_config import FixedSizeConfig, TransformersConfig
from forge_plugins_vlm.encoders.weight_files import Spelling, WeightFiles
from forge_plugins_vlm.initial_values import fan_in_std

Fill = Callable[[torch.Tensor, torch.Generator], object]


class TransformersEncoder(nn.Module):
    """What the families have in common: ``embeddings``, perhaps a ``pre_norm``, ``layers``, and perhaps a ``norm``.

    Raises:
        ConfigError: ``transformers`` is not installed, or ``feature_layer`` asks for more layers than there are.
    """

    family: ClassVar[str]
    """Its module in ``transformers.models``."""
    classes: ClassVar[tuple[str, str, str]]
    """There: the classes of its configuration, of embeddings and of a layer."""
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Of its configuration, beside the architecture."""
    in_files: ClassVar[Mapping[str, str]]
    """What the parts are called in files of weights."""
    parts: ClassVar[LayerParts] = LayerParts(
        attention_norm="layer_norm1", attention="self_attn", mlp_norm="layer_norm2", mlp="mlp", mlp_output="mlp.fc2"
    )
    """Of a layer."""
    anchor: ClassVar[str] = "embeddings.patch_embedding.weight"
    """Same as in ``WeightFiles``."""

    def __init__(self, config: TransformersConfig, **_: object) -> None:
        super().__init__()
        self.config, found = config, config.found
        configuration, embeddings, layer = _classes_of(self.family, self.classes)
        own = configuration(**attrs.asdict(found), **self.settings)
        own._attn_implementation = "sdpa"
        self.normalisation = config.normalisation
        self.embeddings = embeddings(own)
        self.pre_norm = nn.LayerNorm(found.hidden_size, found.layer_norm_eps) if "pre_norm" in self.in_files else None
        self.layers = nn.ModuleList(layer(own) for _ in range(config.depth))
        has_norm = "norm" in self.in_files and config.feature_layer == -1
        self.norm = nn.LayerNorm(found.hidden_size, found.layer_norm_eps) if has_norm else None

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Same as ``VisionEncoder.forward``.

        Raises:
            ValueError: tiles are of another size, or padded.
        """
        if sizes is not None:
            raise ValueError(f"{self.family} takes no padded tiles; siglip2_naflex and conv_vit do")
        self.config.grid(*pixels.shape[-2:])
        hidden = self._embed(self._normalised(pixels))
        if self.pre_norm is not None:
            hidden = self.pre_norm(hidden)
        for layer in self.layers:
            hidden = self._through(layer, hidden)
        return self._features(hidden)

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``VisionEncoder.init_weights``.

        Raises:
            ConfigError: the folder has no weights, or such that do not fit its configuration.
        """
        for name, tensor, fill in self._values():
            rng.fill(prefix + name, tensor, fill)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``VisionEncoder.parameter_roles``."""
        return {
            name: _role(module, key)
            for name, module, key, tensor in self._tensors()
            if isinstance(tensor, nn.Parameter)
        }

    def units(self) -> list[str]:
        """Same as ``VisionEncoder.units``."""
        return [f"layers.{number}" for number in range(len(self.layers))]

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``VisionEncoder.parallel_plan``."""
        modules = ((name, name.rpartition(".")[2]) for name, _ in self.layers.named_modules(prefix="layers"))
        return {name: _OF_LAYER[last] for name, last in modules if last in _OF_LAYER}

    def sites(self) -> dict[str, Site]:
        """Same as ``VisionEncoder.sites``."""
        return {name: site for unit in self.units() for name, site in self._parts().sites(unit).items()}

    def _parts(self) -> LayerParts:
        return self.parts

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        dtype = next(self.embeddings.parameters()).dtype
        return normalise(pixels, self.normalisation.mean, self.normalisation.deviation, dtype)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised pixels to ``(N, T, D)``."""
        hidden: torch.Tensor = self.embeddings(pixels)
        return hidden

    def _through(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        # of all layers, those of SigLIP and CLIP need a mask, and all take one behind the hidden states
        passed: torch.Tensor = layer(hidden, None)
        return passed

    def _features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the layers to features."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden[:, 1:] if getattr(self.config, "cls", "keep") == "drop" else hidden

    def _tensors(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Name, module that has it, name there, and tensor."""
        for path, module in self.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            yield from ((f"{path}.{key}" if path else key, module, key, tensor) for key, tensor in own)

    def _values(self) -> Iterator[tuple[str, torch.Tensor, Fill]]:
        """Name and tensor of all that there is, and what it is filled with."""
        read = self._reader()
        for name, module, key, tensor in self._tensors():
            if key == "position_ids":
                yield name, tensor, _count
            elif read is not None:
                yield name, tensor, read(name, tensor.shape)
            else:
                yield name, tensor, self._random(module, key)

    def _random(self, module: nn.Module, key: str) -> Fill:
        if key == "bias":
            return zeros
        if isinstance(module, nn.LayerNorm):
            return ones
        if isinstance(module, nn.Linear | nn.Conv2d):
            return normal(fan_in_std(module.weight))
        if key == "lambda1":
            factor = self.config.found.layerscale_value
            return lambda full, _: full.fill_(factor)
        return normal(1 / math.sqrt(self.config.dim))  # positions and the class token

    def _reader(self) -> Callable[[str, torch.Size], Fill] | None:
        """Gives a filler from the folder's weights for each name; ``None``: there is no folder."""
        if self.config.folder is None:
            return None
        files = WeightFiles(self.config.folder, self.anchor)
        n_layers = self.config.found.num_hidden_layers
        beyond = next(name for name, *_ in self._tensors() if name.startswith("layers.0."))
        if any(files.has(one.name) for one in self._spellings(beyond.replace(".0.", f".{n_layers}.", 1))):
            raise ConfigError(
                f"{self.config.folder}: its safetensors have more layers than num_hidden_layers = {n_layers} of its "
                "config.json"
            )

        def read(name: str, shape: torch.Size) -> Fill:
            return lambda full, _: full.copy_(files.read(self._spellings(name), shape))

        return read

    def _spellings(self, name: str) -> Sequence[Spelling]:
        """What a tensor may be called in files."""
        part, _, rest = name.partition(".")
        return [Spelling(f"{self.in_files.get(part, part)}.{rest}")]


class _FixedSize(TransformersEncoder):
    config: FixedSizeConfig

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(
            pixels, interpolate_pos_encoding=self.config.tile_size != self.config.native_size
        )
        return hidden


class SiglipEncoder(_FixedSize):
    """The encoders ``siglip`` and ``siglip2``."""

    family = "siglip"
    classes = ("SiglipVisionConfig", "SiglipVisionEmbeddings", "SiglipEncoderLayer")
    in_files = MappingProxyType({"layers": "encoder.layers", "norm": "post_layernorm"})


class ClipEncoder(_FixedSize):
    """The encoder ``clip``."""

    family = "clip"
    classes = ("CLIPVisionConfig", "CLIPVisionEmbeddings", "CLIPEncoderLayer")
    in_files = MappingProxyType({"layers": "encoder.layers", "pre_norm": "pre_layrnorm"})


class Dinov2Encoder(TransformersEncoder):
    """The encoder ``dinov2``. Its embeddings interpolate positions by themselves."""

    family = "dinov2"
    classes = ("Dinov2Config", "Dinov2Embeddings", "Dinov2Layer")
    settings = MappingProxyType({"use_mask_token": False})
    in_files = MappingProxyType({"layers": "encoder.layer", "norm": "layernorm"})
    parts = LayerParts(
        attention_norm="norm1", attention="layer_scale1", mlp_norm="norm2", mlp="layer_scale2", mlp_output="mlp.fc2"
    )
    anchor = "embeddings.patch_embeddings.projection.weight"

    def _parts(self) -> LayerParts:
        gated = self.config.found.use_swiglu_ffn
        return attrs.evolve(self.parts, mlp_output="mlp.down_proj") if gated else self.parts

    def _spellings(self, name: str) -> Sequence[Spelling]:
        (now,) = super()._spellings(name)
        for new, old, half in _OLDER:
            if new in now.name:
                return [now, Spelling(now.name.replace(new, old), half)]
        return [now]


_OLDER = (
    ("attention.q_proj", "attention.attention.query", None),
    ("attention.k_proj", "attention.attention.key", None),
    ("attention.v_proj", "attention.attention.value", None),
    ("attention.o_proj", "attention.output.dense", None),
    ("mlp.gate_proj", "mlp.weights_in", 0),
    ("mlp.up_proj", "mlp.weights_in", 1),
    ("mlp.down_proj", "mlp.weights_out", None),
)
"""Names of layers of DINOv2, those in files, and which half of the rows it is."""


_OF_LAYER: Mapping[str, ShardRole] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1", "gate_proj", "up_proj"), "column"),
    **dict.fromkeys(("out_proj", "o_proj", "fc2", "down_proj"), "row"),
}
"""What the linear layers of ``transformers`` are, by their names."""


def _classes_of(family: str, names: tuple[str, str, str]) -> tuple[Any, Any, Any]:
    module = f"transformers.models.{family}"
    try:
        configurations = importlib.import_module(f"{module}.configuration_{family}")
        modules = importlib.import_module(f"{module}.modeling_{family}")
    except ImportError as error:
        raise ConfigError(
            f"the vision encoder {family} needs the package transformers, from version 5 on, and it cannot be imported "
            f"({error}): pip install 'forge-plugins-vlm[encoders]'"
        ) from error
    return getattr(configurations, names[0]), getattr(modules, names[1]), getattr(modules, names[2])


def _role(module: nn.Module, key: str) -> ParameterRole:
    if key == "bias":
        return "bias"
    if isinstance(module, nn.LayerNorm) or key == "lambda1":
        return "norm"
    return "matrix" if isinstance(module, nn.Linear | nn.Conv2d) else "embedding"


def _count(full: torch.Tensor, _: torch.Generator) -> object:
    return full.copy_(torch.arange(full.shape[-1]).expand_as(full))
