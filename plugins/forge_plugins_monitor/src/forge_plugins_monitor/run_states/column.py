"""Columns of ``forge runs``: what else there is to say about runs, such as their jobs in a cluster's queue.

A plugin yields them in the hook ``forge_run_columns``; all that are installed are asked. One that is empty for all runs
is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class RunColumn(Protocol):
    """One column."""

    title: str
    """Stands above it: one word in capitals."""

    def job_file(self, run: Path) -> Path | None:
        """The resolved job of a run that was prepared and has not begun, as far as the column knows of such; else
        ``None``. A directory in which a run has begun has a ``job.toml``."""
        ...

    def cells(self, runs: Sequence[Path]) -> Mapping[Path, Mapping[str, Any]]:
        """What there is to say, by the directory of the run. Nothing is said about a run that is left out.

        Each cell is plain data, which ``--json`` shows: ``text``, a few words for the table; ``state``, if the column
        knows it better than the run's files: ``"queued"`` or ``"running"``; and what else there is.

        Raises:
            ForgeError: whoever would know does not answer. The sentence is told, and the runs are shown without.
        """
        ...


class RunColumnFactory(Protocol):
    """Makes a column."""

    def __call__(self, config: Any, /) -> RunColumn:
        """Args:
        config: an instance of the component's config class, with its defaults.
        """
        ...
