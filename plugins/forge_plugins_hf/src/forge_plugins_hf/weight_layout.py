"""Weight layouts: a model's configuration and weights as Hugging Face has them, both ways.

A package that has a model yields its layouts in the hook ``forge_weight_layouts``, marked ``optionalhook=True``. The
module of a layout should import torch where a tensor is made and not before: ``forge validate`` asks for
``config_json`` if a run exports its checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

if TYPE_CHECKING:
    import torch


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


ReadPart = Callable[[str, Sequence["slice"]], "torch.Tensor"]
"""Reads the part of a tensor, by its name, within a slice of each of its first dimensions."""


@attrs.frozen
class Recipe:
    """A tensor that is made of others."""

    reads: tuple[str, ...]
    """Names of tensors on the other side."""
    make: Callable[..., torch.Tensor] = _same
    """Given those, in this order; by default there is one, which is the tensor. It works on meta as well."""
    read_part: Callable[[ReadPart, Sequence[slice]], torch.Tensor] | None = None
    """Given a function that reads a part of a tensor on the other side, and a part of this one: that part. Without it,
    a rank that holds a part of the tensor reads all that the tensor is made of, unless it is one as it is."""

    @property
    def is_renaming(self) -> bool:
        """Return whether the tensor is another one as it is, so that a part of it can be read."""
        return self.make is _same


def stack_of(reads: tuple[str, ...]) -> Recipe:
    """Tensors of one shape along a new first dimension. A rank reads the ones that it holds, and its part of each."""

    def read_part(read: ReadPart, part: Sequence[slice]) -> torch.Tensor:
        first, *others = part
        return _stacked(*(read(name, others) for name in reads[first]))

    return Recipe(reads, _stacked, read_part)


def _stacked(*tensors: torch.Tensor) -> torch.Tensor:
    import torch  # forge validate does without

    return torch.stack(tensors)


class WeightLayout(ABC):
    """Base class. Nothing of it reads weights: the command opens them, a tensor at a time."""

    architectures: ClassVar[tuple[str, ...]]
    """The names that ``architectures`` in ``config.json`` may have."""
    order: ClassVar[int] = 1
    """Of several layouts that are equal to a model, the one with the lowest order is written."""
    training_only: ClassVar[Collection[str]] = ()
    """Keys of ``config.json`` that say how a model was trained, and that ours has not, such as dropout. The command
    says which are left out."""

    foreign: ClassVar[Collection[str]] = ()
    """Patterns, as those of ``fnmatch``, of tensors in parts that our model has not, such as ``vision_tower.*``. A
    folder that has such tensors is refused, unless the user leaves them out."""

    unpacks: ClassVar[Collection[str]] = ()
    """Values of ``quant_method`` in ``quantization_config`` whose tensors its recipes read as they are stored."""

    @abstractmethod
    def model_table(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """The table ``[model]`` that a ``config.json`` stands for, with ``vocab_size``.

        Every key that it looks up is one that it knows; the command refuses the keys that it has not looked up, unless
        they say nothing of what the model computes. The same is asked of tables within it that it opens by
        ``forge_plugins_hf.config_json.part_of``.

        Raises:
            ConfigError: the model uses something that ours has not.
        """

    @abstractmethod
    def config_json(self, config: Any, vocab_size: int) -> dict[str, Any]:
        """The content of ``config.json`` for a model's config.

        Raises:
            ConfigError: no architecture of this layout is equal to the model.
        """

    @abstractmethod
    def to_forge(self, config: Any, names: Collection[str]) -> Mapping[str, Recipe]:
        """How each tensor of our model is made of theirs.

        Args:
            names: of the tensors that there are.

        Raises:
            ConfigError: tensors are missing, or left over.
        """

    @abstractmethod
    def to_huggingface(self, config: Any) -> Mapping[str, Recipe]:
        """How each of their tensors is made of ours."""

    def in_memory(self, name: str) -> str:
        """A tensor of their files, as ``transformers`` calls it in memory. Adapters of PEFT go by that."""
        return name

    def misfit(self, table: Mapping[str, Any], folder: Path) -> str | None:
        """A sentence about what files beside ``config.json`` say and our model does otherwise, such as how pixels are
        normalised; ``None``: there is nothing.

        Args:
            table: as ``model_table`` makes it.
        """
        return None

    def data_table(self, config_json: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
        """Keys of ``[data]`` that suit the model, beside ``path`` and ``tokenizer``; by default those of plain text.

        Args:
            tokens: ids of the tokenizer's tokens.
        """
        return {"name": "text_files"}

    def data_beside(self, data: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Give keys of ``[data]`` what files beside ``config.json`` say, such as how images are resized.

        Args:
            data: as ``data_table`` makes them.
        """
        return data

    def with_data(self, config_json: dict[str, Any], data: Any, tokens: Mapping[str, int]) -> dict[str, Any]:
        """Give ``config.json`` what the data of a run say, such as which token stands for an image.

        Args:
            config_json: as ``config_json`` makes it.
            data: the config of the run's data.
            tokens: ids of the tokenizer's tokens; empty, if there is no ``tokenizer.json``.

        Raises:
            ConfigError: neither model nor data say something that it needs.
        """
        return config_json


class WeightLayoutFactory(Protocol):
    """Makes a layout."""

    def __call__(self, config: Any, /) -> WeightLayout:
        """Args:
        config: an instance of the component's config class, with its defaults.
        """
        ...
