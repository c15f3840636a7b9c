"""A pattern of tokens: which ids of a vocabulary have a text that a regular expression matches."""

from __future__ import annotations

import re

import attrs
import torch

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError


@attrs.frozen(eq=False)
class TokenPattern:
    """Some tokens of a vocabulary."""

    text: str
    """The regular expression."""
    is_match: torch.Tensor
    """``(vocab,)`` bool, on the CPU: it matches the whole text of the token, with the space that belongs to it."""

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> TokenPattern:
        """
        Raises:
            ConfigError: ``text`` is no regular expression, or no token matches it.
        """
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise ConfigError(f"--match {text!r}: no regular expression: {error}") from None
        texts = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
        found = torch.tensor([pattern.fullmatch(one) is not None for one in texts])
        if not found.any():
            near = next((one for one in texts if text and text in one), None)
            hint = "" if near is None else f"; it has {near!r}, which the expression must match as a whole"
            raise ConfigError(f"--match {text!r}: no token of the vocabulary matches{hint}")
        return cls(text, found)

    def matches(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compare token ids of any shape, int64. An id beyond the tokenizer's vocabulary does not match."""
        n = len(self.is_match)
        return (tokens < n) & self.is_match[tokens.clamp(max=n - 1)]
