"""Keys and values of the positions so far, so that generation computes each position once."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class KeyValueCache:
    """The cache of a whole model for one batch.

    ``length`` columns are filled, the same number in all rows; rows with shorter prompts are padded on the left.
    """

    def __init__(self, layers: Iterable[str], batch_size: int, max_len: int) -> None:
        self.batch_size = batch_size
        self.max_len = max_len
        self.length = 0
        self.layers = {layer: LayerCache(max_len) for layer in layers}
        self.filled: torch.Tensor | None = None
        """``(B, length)`` bool, false at padding; ``None`` while there is no padding."""
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None
        """Tokens and positions so far, ``(B, length)``, where a model may have to compute them anew."""
        self.beside: tuple[torch.Tensor, ...] = ()
        """Further things that a model found in its first forward and needs in each."""

    def reserve(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Announce the columns that one forward is about to append.

        Args:
            tokens: ``(B, S)`` or ``(B, S, D)``, what forward was given.
            positions: ``(B, S)``, −1 at padding, or ``None`` if there is no padding anywhere.

        Raises:
            ValueError: there is no room, or positions are missing although an earlier chunk had padding.
        """
        batch_size, chunk = tokens.shape[:2]
        if batch_size != self.batch_size or self.length + chunk > self.max_len:
            raise ValueError(
                f"a cache of {self.batch_size} × {self.max_len} positions, {self.length} of them filled, "
                f"has no room for {batch_size} × {chunk} more"
            )
        if positions is None and self.filled is not None:
            raise ValueError("positions must be given, because earlier positions of this cache are padded")
        if positions is not None:
            before = (
                positions.new_ones(batch_size, self.length, dtype=torch.bool) if self.filled is None else self.filled
            )
            self.filled = torch.cat((before, positions >= 0), dim=1)
        self.length += chunk

    def remember(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything so far, with what one forward is about to append: tokens and positions, ``(B, length)``."""
        if positions is None:
            positions = torch.arange(self.length, self.length + tokens.shape[1], device=tokens.device)
        positions = positions.expand(tokens.shape)
        if self.past is not None:
            tokens, positions = torch.cat((self.past[0], tokens), 1), torch.cat((self.past[1], positions), 1)
        self.past = tokens, positions
        return self.past

    def restart(self, layers: dict[str, LayerCache]) -> None:
        """Begin anew with empty layers."""
        self.length, self.filled, self.layers = 0, None, layers


class LayerCache:
    """One layer's keys and values. Memory is taken with the first chunk, in its dtype, on its device, and for as many
    heads as this rank holds."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.beside: tuple[torch.Tensor, ...] = ()
        """What a layer found in its first forward and needs in each: keys and values of images."""

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``(B, H, S, head_dim)`` and return everything so far, ``(B, H, length, head_dim)``; keys are rotated.
        Values may have another ``head_dim``."""
        if self.k is None or self.v is None:
            self.k, self.v = (new.new_empty(*new.shape[:2], self.max_len, new.shape[3]) for new in (k, v))
        start, self.length = self.length, self.length + k.shape[2]
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]
