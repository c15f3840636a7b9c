"""How long the sequence is that a position is in."""

from __future__ import annotations

from typing import Any

import torch


class SequenceLengths:
    """Tells a decoder how long its sequences and packed documents are, as a forward pre-hook.

    So it sees whole sequences; hooks that come after it, as that of context parallelism does, cut what it adds as they
    cut the rest of a batch.
    """

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add ``lengths`` to the arguments of ``Transformer.forward``, where a row may be shorter than the batch."""
        document, positions = kwargs.get("document"), kwargs.get("positions")
        if kwargs.get("cache") is not None or (document is None and positions is None):
            return None
        return args, kwargs | {"lengths": lengths_of(document, positions)}


def lengths_of(document: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """The number of tokens, without padding, in the sequence or document of each position, ``(B, S)`` int64.

    Args:
        document, positions: as ``Model.forward`` takes them; one of them is there.
    """
    like = positions if document is None else document
    assert like is not None, "there is nothing to count"
    document = torch.zeros_like(like) if document is None else document
    is_token = torch.ones_like(like) if positions is None else (positions >= 0).long()
    return torch.zeros_like(document).scatter_add_(1, document, is_token).gather(1, document)
