"""What lies between the stages of a pipeline: hidden states, and what the model sends along (``TravellingModel``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from forge_core.errors import PluginError

HIDDEN = "hidden states"


@attrs.frozen
class Form:
    """Of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BetweenStages:
    """Knows it for any batch, on any rank, as all of them have read the same batches."""

    def __init__(
        self,
        model: Any,
        *,
        words: str,
        width: int,
        dtype: torch.dtype,
        sequence_parts: int,
        position_dims: Mapping[str, int | None],
    ) -> None:
        """
        Args:
            model: a part of it.
            words: names the model in messages.
            width: of hidden states.
            dtype: of hidden states.
            sequence_parts: ranks that share a sequence (context parallelism); each has a part of its positions only.
            position_dims: along which dimension an entry has positions, or ``None``; by default along the second.
        """
        self._model = model
        self._words = words
        self._width = width
        self._dtype = dtype
        self._sequence_parts = sequence_parts
        self._position_dims = position_dims
        self._names: list[str] | None = None

    def forms(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Form]:
        """Hidden states, then what travels beside them, by name.

        Raises:
            PluginError: the model sends other things than before, or such as have no gradients.
        """
        shapes = {name: self._seen(name, tuple(entry.shape)) for name, entry in batch.items()}
        rows, positions = shapes["tokens"]
        found = {HIDDEN: Form((rows, positions, self._width), self._dtype)}
        travelling = self._model.travels(shapes) if hasattr(self._model, "travels") else {}
        for name, (shape, dtype) in travelling.items():
            found[name] = Form(tuple(shape), dtype or self._dtype)
            if not found[name].dtype.is_floating_point:
                raise PluginError(
                    f"{self._words}.travels says that {name} is {dtype}; gradients go back for all that travels, so "
                    "that it must be of a floating dtype"
                )
        if self._names is None:
            self._names = list(found)
        if self._names != list(found):
            raise PluginError(
                f"{self._words}.travels names {', '.join(found)}, and before {', '.join(self._names)}; names must be "
                "the same for all batches"
            )
        return found

    def tensors(self, output: Any, forms: Mapping[str, Form]) -> list[torch.Tensor]:
        """What a stage has given, in the order and the dtypes of ``forms``.

        Raises:
            PluginError: it is not what the model has said.
        """
        hidden, along = output if isinstance(output, tuple) else (output, {})
        given = {HIDDEN: hidden, **along}
        if given.keys() != forms.keys():
            raise PluginError(
                f"{self._words}.travels names {', '.join(forms)}, and a stage without head gives {', '.join(given)}"
            )
        for name, form in forms.items():
            if tuple(given[name].shape) != form.shape:
                raise PluginError(
                    f"{self._words}: a stage gives {name} of the shape {tuple(given[name].shape)}, and the next one "
                    f"waits for {form.shape}; travels must say what forward gives"
                )
        return [given[name].to(form.dtype) for name, form in forms.items()]

    def _seen(self, entry: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = self._position_dims.get(entry, 1)
        if dim is None or dim >= len(shape):
            return shape
        return (*shape[:dim], shape[dim] // self._sequence_parts, *shape[dim + 1 :])


def along(forms: Mapping[str, Form], tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What travels beside hidden states, by name.

    Args:
        tensors: in the order of ``forms``, hidden states left out.
    """
    return dict(zip(list(forms)[1:], tensors, strict=True))
