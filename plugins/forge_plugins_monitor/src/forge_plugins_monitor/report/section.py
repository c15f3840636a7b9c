"""Report sections: the parts of the page that ``forge report`` writes.

A plugin yields them in the hook ``forge_report_sections``; all that are installed are on the page. A section is built
with its config and nothing else, once a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from forge_plugins_monitor.report.run_record import RunRecord


class ReportSection(ABC):
    """One part of the page. It may be about all runs at once, and is left out where it has nothing to say."""

    title: ClassVar[str]
    """Stands above it; plain text."""
    place: ClassVar[float] = 100.0
    """Sections stand by ascending places, those of one place by name. Our own have 10 to 60."""

    @abstractmethod
    def render(self, runs: Sequence[RunRecord]) -> str:
        """HTML to stand below the title, or an empty string to be left out.

        The page must not reach out to a network: pictures are ``data:`` URLs or SVG. Texts of others are escaped with
        ``html.escape``; ``forge_plugins_monitor.report.chart`` and ``.table`` escape by themselves. An error that is
        raised here is told in place of the section, and the rest of the page is written.
        """


class ReportSectionFactory(Protocol):
    """Makes a section."""

    def __call__(self, config: Any, /) -> ReportSection:
        """Args:
        config: an instance of the component's config class, with its defaults.
        """
        ...
