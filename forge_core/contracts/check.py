"""Checks of ``forge doctor``: what is fine on this machine, what is not, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import attrs

if TYPE_CHECKING:
    from forge_core.registry.catalog import Catalog

State = Literal["fine", "warning", "wrong"]


@attrs.frozen
class Finding:
    """One line of the report."""

    subject: str
    """The subject in a word or two: ``"disk speed"``."""
    state: State
    """``warning``: runs will work, and worse than they could, or not in every case. ``wrong``: they will fail."""
    found: str
    """The state found, with numbers and units."""
    advice: str = ""
    """The remedy; needed for anything that is not fine."""

    def __attrs_post_init__(self) -> None:
        if self.state != "fine" and not self.advice:
            raise ValueError(f"{self.subject}: what is not fine needs an advice")


@attrs.frozen
class CheckContext:
    """Facts that a check may use, besides the machine and its environment."""

    run_dir: Path
    """Where runs will be written. It need not exist."""
    catalog: Catalog
    """The installed plugins."""


class CheckFunction(Protocol):
    """The signature of what a ``Check`` names as ``run``."""

    def __call__(self, surroundings: CheckContext, /) -> Iterable[Finding]:
        """Look. It runs on one process a host, may take seconds, and leaves nothing behind."""


class WriteFacts(Protocol):
    """The signature of what a ``Check`` names as ``writes``."""

    def __call__(self) -> tuple[str, str]:
        """The name and the text of a file with the facts of this machine, for ``forge doctor --init``."""


Surroundings = CheckContext
"""The older name."""
