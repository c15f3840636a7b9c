"""Weights of a folder, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge_core.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Spelling(NamedTuple):
    """How files may call a tensor."""

    name: str
    half: int | None = None
    """Whether it is the first (0) or the second (1) half of the rows of that one."""


class WeightFiles:
    """The safetensors of a folder.

    Args:
        anchor: the end of the name of a tensor that each such encoder has. What comes before it in the folder comes
            before all names, as ``vision_model.`` does in a model of text and images.

    Raises:
        ConfigError: there are none, a file cannot be read, or none of them has the tensor.
    """

    def __init__(self, folder: Path, anchor: str) -> None:
        self.folder = folder
        self._files = {name: file for file in _files(folder) for name in _names(file)}
        found = sorted((name for name in self._files if name.endswith(anchor)), key=len)
        if not found:
            raise ConfigError(f"{folder}: no tensor of its safetensors is named {anchor}, as one of this encoder is")
        self._prefix = found[0].removesuffix(anchor)

    def read(self, spellings: Sequence[Spelling], shape: torch.Size) -> torch.Tensor:
        """The tensor that goes by the first of these names that is there, on the CPU, in the dtype of the file.

        Raises:
            ConfigError: none is, or it has another shape than the architecture asks for.
        """
        known = next((one for one in spellings if self.has(one.name)), None)
        if known is None:
            name = self._prefix + spellings[0].name
            raise ConfigError(f"{self.folder}: its safetensors have no tensor {name}, which its config.json asks for")
        file, name = self._files[self._prefix + known.name], self._prefix + known.name
        with _opened(file) as content:
            tensor: torch.Tensor = content.get_tensor(name)
        wanted = shape if known.half is None else torch.Size((2 * shape[0], *shape[1:]))
        if tensor.shape != wanted:
            raise ConfigError(
                f"{file}: the tensor {name} has the shape {list(tensor.shape)}, and the configuration of the encoder "
                f"asks for {list(wanted)}"
            )
        return tensor if known.half is None else tensor.chunk(2)[known.half]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._prefix + name in self._files


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            names = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of weights: {error}") from error
        if outside := sorted(name for name in names if Path(name).name != name):
            raise ConfigError(f"{index} names {outside[0]}; files must be in the same folder")
        return [folder / name for name in sorted(names)]
    if not (folder / SINGLE).exists():
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors, which save_pretrained of "
            "transformers writes"
        )
    return [folder / SINGLE]


def _names(file: Path) -> list[str]:
    with _opened(file) as content:
        return list(content.keys())


def _opened(file: Path) -> Any:
    from safetensors import (
        SafetensorError,
        safe_open,
    )  # comes with transformers, and encoders without files need neither

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there; the model's download is not complete") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; it may be cut off, download it again") from error
