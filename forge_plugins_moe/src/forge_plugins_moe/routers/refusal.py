"""Refusing what a router cannot do with so many experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from forge_core.errors import ConfigError


class HasContradictions(Protocol):
    """A router's config."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts: (key, sentence)."""
        ...


def refuse_contradictions(config: HasContradictions, n_experts: int) -> None:
    """
    Raises:
        ConfigError: one sentence for each contradiction.
    """
    problems = [f"router.{key}: {sentence}" for key, sentence in config.contradictions(n_experts)]
    if problems:
        raise ConfigError("; ".join(problems))
