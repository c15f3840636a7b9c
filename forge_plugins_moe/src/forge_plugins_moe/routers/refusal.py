"""Refusing what a router cannot do with so many experts."""

from __future__ import annotations

from forge_core.contracts.router import RouterConfig
from forge_core.errors import ConfigError


def refuse_contradictions(config: RouterConfig, n_experts: int) -> None:
    """
    Raises:
        ConfigError: one sentence for each contradiction.
    """
    problems = [f"router.{key}: {sentence}" for key, sentence in config.contradictions(n_experts)]
    if problems:
        raise ConfigError("; ".join(problems))
