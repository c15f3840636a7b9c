"""A folder with a vision model as ``transformers`` saves it: what its JSON files say. Nothing here may import torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from forge_core.errors import ConfigError
from forge_core.job import InvalidError, structure
from forge_core.registry.catalog import Catalog

T = TypeVar("T")

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's filters, by their numbers."""
_NO_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "drop_path_rate", "hidden_dropout_prob")


@attrs.frozen
class Normalisation:
    """How the pictures are made that an encoder was trained on."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    resample: str
    """Filter of resizing, one of ``RESAMPLES``."""


def read_architecture(folder: Path, cls: type[T], model_types: Collection[str]) -> T:
    """The sizes in ``config.json``; of a model of text and images, those of its vision tower.

    Args:
        cls: has the keys to read, with the family's defaults.
        model_types: of towers of that family.

    Raises:
        ConfigError: there is no such file, it is of another family, or a key has a value that is not allowed.
    """
    path = folder / CONFIG
    whole = _read(path)
    tower = whole.get("vision_config", whole)
    if not isinstance(tower, Mapping):
        raise ConfigError(f"{path}: vision_config must be a table, got {tower!r}")
    model_type = tower.get("model_type", whole.get("model_type"))
    if model_type not in model_types:
        raise ConfigError(f"{path} describes a model of the type {model_type!r}, and not of {' or '.join(model_types)}")
    if tower.get("num_channels", 3) != 3:
        raise ConfigError(f"{path}: num_channels = {tower['num_channels']!r}; pictures have 3 channels here")
    for key in _NO_DROPOUT:
        if tower.get(key):
            raise ConfigError(f"{path}: {key} = {tower[key]!r}; encoders are without dropout here, set it to 0")
    keys = {field.name for field in attrs.fields(cls)}  # type: ignore[arg-type]  # an attrs class
    return _structured(path, {key: value for key, value in tower.items() if key in keys}, cls)


def read_normalisation(folder: Path, usual: Normalisation) -> Normalisation:
    """What ``preprocessor_config.json`` says; ``usual`` where there is no such file or key.

    Raises:
        ConfigError: a value in it is not allowed.
    """
    path = folder / PREPROCESSOR
    if not path.exists():
        return usual
    said = _read(path)
    if not said.get("do_rescale", True) or abs(said.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ConfigError(
            f"{path}: pixels are rescaled by 1 / 255 here; set do_rescale = true, and that rescale_factor"
        )
    mean, deviation = said.get("image_mean", usual.mean), said.get("image_std", usual.deviation)
    if not said.get("do_normalize", True):
        mean, deviation = (0.0,) * 3, (1.0,) * 3
    for key, value in (("image_mean", mean), ("image_std", deviation)):
        if not _are_three_numbers(value):
            raise ConfigError(f"{path}: {key} must be three numbers, one a channel, got {value!r}")
    if not all(deviation):
        raise ConfigError(f"{path}: image_std must not be 0, got {deviation!r}")
    resample = said.get("resample", RESAMPLES.index(usual.resample))
    if resample not in range(len(RESAMPLES)):
        raise ConfigError(f"{path}: resample must be a number of Pillow's filters, 0 to 5, got {resample!r}")
    return Normalisation(tuple(map(float, mean)), tuple(map(float, deviation)), RESAMPLES[resample])  # type: ignore[arg-type]  # three


def _are_three_numbers(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value)
    )


def _structured(path: Path, table: Mapping[str, Any], cls: type[T]) -> T:
    try:
        return structure(table, cls, Catalog([]))
    except InvalidError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; give the folder of a downloaded model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a table, got {found!r}")
    return found
