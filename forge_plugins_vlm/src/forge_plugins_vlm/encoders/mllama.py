"""The encoder ``mllama``: the vision tower of Llama 3.2 Vision, of layers of ``transformers``.

Shapes: N = tiles, each a picture of R × C parts; A = parts that there always are, some of them empty; P = positions of
a part, its patches and a class token; T = P, rounded up to a multiple of eight; D = width of a layer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_dense.initial_values import normal, ones, zeros
from forge_plugins_vlm.encoders.layer_sites import LayerParts
from forge_plugins_vlm.encoders.mllama_config import MllamaConfig
from forge_plugins_vlm.encoders.pixels import normalise
from forge_plugins_vlm.initial_values import fan_in_std

_MULTIPLE = 8
"""Positions of a part are filled up to a multiple of it; in training, what is filled up was among the keys."""

_PARTS = LayerParts(
    attention_norm="input_layernorm",
    attention="self_attn",
    mlp_norm="post_attention_layernorm",
    mlp="mlp",
    mlp_output="mlp.fc2",
)
_GATED = attrs.evolve(_PARTS, attention="", mlp="")


class MllamaEncoder(nn.Module):
    """Patches of all parts of a picture see each other. Each feature has the last hidden state and those of some
    layers before it, side by side.

    Raises:
        ConfigError: ``transformers`` is not installed.
    """

    def __init__(self, config: MllamaConfig, **_: object) -> None:
        super().__init__()
        self.config, own = config, config.architecture
        modules = _modules()
        table = {**attrs.asdict(own), "supported_aspect_ratios": [list(one) for one in own.supported_aspect_ratios]}
        table["intermediate_layers_indices"] = [*own.intermediate_layers_indices]
        theirs = modules.MllamaVisionConfig(**table, vision_output_dim=config.dim)
        theirs._attn_implementation = "sdpa"
        patch, layer = own.patch_size, modules.MllamaVisionEncoderLayer
        self.patch_embedding = nn.Conv2d(3, own.hidden_size, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(own.hidden_size))
        self.gated_positional_embedding = modules.MllamaPrecomputedPositionEmbedding(theirs)
        self.pre_tile_positional_embedding = modules.MllamaPrecomputedAspectRatioEmbedding(theirs)
        self.post_tile_positional_embedding = modules.MllamaPrecomputedAspectRatioEmbedding(theirs)
        self.layernorm_pre, self.layernorm_post = nn.LayerNorm(own.hidden_size), nn.LayerNorm(own.hidden_size)
        self.layers = nn.ModuleList(layer(theirs, is_gated=False) for _ in range(own.num_hidden_layers))
        self.global_layers = nn.ModuleList(layer(theirs, is_gated=True) for _ in range(own.num_global_layers))

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Same as ``VisionEncoder.forward``: ``(N, R · C · P, dim)``, part by part.

        Raises:
            ValueError: tiles are of another size, or padded.
        """
        if sizes is not None:
            raise ValueError("mllama takes no padded tiles; siglip2_naflex and conv_vit do")
        rows, columns = self.config.parts(*pixels.shape[-2:])
        ratio = 1 + self.config.architecture.supported_aspect_ratios.index((rows, columns))
        ratios = torch.full((len(pixels), 1), ratio, dtype=torch.int64, device=pixels.device)
        hidden = self._embed(pixels, (rows, columns), ratios)
        mask = self._mask(rows * columns, hidden)
        shape, kept = hidden.shape, []
        hidden = hidden.flatten(1, 2)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, mask)
            if number in self.config.architecture.intermediate_layers_indices:
                kept.append((number, hidden))
        hidden = self.post_tile_positional_embedding(self.layernorm_post(hidden).view(shape), ratios).flatten(1, 2)
        for layer in self.global_layers:
            hidden = layer(hidden, mask)
        found = dict(kept)
        between = [found[number] for number in self.config.architecture.intermediate_layers_indices]
        features = torch.cat((hidden, torch.stack(between, dim=-1).flatten(2)), dim=-1) if between else hidden
        apart = features.view(*shape[:3], -1)[:, : rows * columns, : self.config.n_positions]
        whole: torch.Tensor = apart.flatten(1, 2)
        return whole

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``VisionEncoder.init_weights``."""
        for name, module, key, tensor in self._tensors():
            rng.fill(prefix + name, tensor, _random(module, key, self.config.architecture.hidden_size))

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``VisionEncoder.parameter_roles``."""
        return {name: _role(module, key) for name, module, key, _ in self._tensors()}

    def units(self) -> list[str]:
        """Same as ``VisionEncoder.units``."""
        kinds = (("layers", self.layers), ("global_layers", self.global_layers))
        return [f"{name}.{number}" for name, layers in kinds for number in range(len(layers))]

    def sites(self) -> dict[str, Site]:
        """Same as ``VisionEncoder.sites``, of all parts of a picture and what they are filled up with. What gated
        layers add has no module."""
        found: dict[str, Site] = {}
        for unit in self.units():
            found |= (_GATED if unit.startswith("global_layers") else _PARTS).sites(unit)
        return found

    def _embed(self, pixels: torch.Tensor, parts: tuple[int, int], ratios: torch.Tensor) -> torch.Tensor:
        """Pixels ``(N, 3, H, W)`` to ``(N, A, T, D)``. A part that is not there is of zeros, behind the normalisation.

        Args:
            parts: R and C.
            ratios: ``(N, 1)`` int64, which of the aspect ratios it is, from 1.
        """
        (rows, columns), most = parts, self.config.architecture.max_num_tiles
        said = self.config.normalisation
        normalised = normalise(pixels, said.mean, said.deviation, self.patch_embedding.weight.dtype)
        side = self.config.architecture.image_size
        cut = normalised.view(-1, 3, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        cut = F.pad(cut, (0, 0, 0, 0, 0, 0, 0, most - rows * columns))
        hidden = self.patch_embedding(cut.flatten(0, 1)).flatten(2).transpose(1, 2)
        hidden = hidden.view(-1, most, *hidden.shape[1:])
        hidden = self.pre_tile_positional_embedding(hidden, ratios)
        hidden = torch.cat((self.class_embedding.expand(*hidden.shape[:2], 1, -1), hidden), dim=2)
        hidden = self.layernorm_pre(self.gated_positional_embedding(hidden, ratios))
        return F.pad(hidden, (0, 0, 0, -hidden.shape[2] % _MULTIPLE))

    def _mask(self, n_parts: int, hidden: torch.Tensor) -> torch.Tensor:
        """``(1, 1, A · T, A · T)`` bool. As in training, what is empty is seen by all but what is empty as well."""
        _, most, length, _ = hidden.shape
        place = torch.arange(most * length, device=hidden.device)
        is_empty = (place // length >= n_parts) | (place % length >= self.config.n_positions)
        return ~(is_empty[:, None] & is_empty)[None, None]

    def _tensors(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        """Name, module that has it, name there, and parameter."""
        for path, module in self.named_modules():
            for key, tensor in module.named_parameters(recurse=False):
                yield f"{path}.{key}" if path else key, module, key, tensor


def _modules() -> Any:
    try:
        return importlib.import_module("transformers.models.mllama.modeling_mllama")
    except ImportError as error:
        raise ConfigError(
            f"the vision encoder mllama needs the package transformers, from version 5 on, and it cannot be imported "
            f"({error}): pip install 'forge-plugins-vlm[encoders]'"
        ) from error


def _random(module: nn.Module, key: str, width: int) -> Callable[[torch.Tensor, torch.Generator], object]:
    if key == "bias":
        return zeros
    if key.startswith("gate"):  # half open: what is behind a closed one would get no gradient
        return lambda full, _: full.fill_(math.pi / 4)
    if isinstance(module, nn.LayerNorm):
        return ones
    if isinstance(module, nn.Linear | nn.Conv2d):
        return normal(fan_in_std(module.weight))
    return normal(1 / math.sqrt(width))  # positions and the class token


def _role(module: nn.Module, key: str) -> ParameterRole:
    if key == "bias" or key.startswith("gate"):
        return "bias"
    if isinstance(module, nn.LayerNorm):
        return "norm"
    return "matrix" if isinstance(module, nn.Linear | nn.Conv2d) else "embedding"
