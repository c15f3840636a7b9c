"""Puts the pages of the documentation into the wheel, for ``forge docs``, and into the source distribution."""

import bz2
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHIVE = "forge_plugins_monitor/pages/text.bz2"
IN_WHEELS = ("running.md", "slurm.md")
"""What one needs beside a job, perhaps where there is no network. All wheels together have 2 MB: of other pages they
have the names alone."""


class Pages(BuildHookInterface):
    """From a checkout, or from a source distribution, which has a copy. An editable installation reads the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        own, tree = root / "docs", root.parents[1] / "docs"
        folder = own if own.is_dir() else tree
        if not (folder / "hooks" / "index.md").is_file():
            raise FileNotFoundError(f"the pages of the documentation are neither in {own} nor in {tree}")
        if version == "editable":
            return
        files = [file for glob in ("*.md", "hooks/*.md", "how-to/*.md") for file in sorted(folder.glob(glob))]
        pages = {file.relative_to(folder).as_posix(): file for file in files}
        included = build_data["force_include"]
        if self.target_name == "sdist":
            included.update({str(page): f"docs/{name}" for name, page in pages.items()})
        else:
            self._archive().parent.mkdir(parents=True, exist_ok=True)
            self._archive().write_bytes(archive(pages))
            included[str(self._archive())] = ARCHIVE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._archive().unlink(missing_ok=True)

    def _archive(self) -> Path:
        return Path(self.directory) / "text.bz2"


def archive(pages: dict[str, Path]) -> bytes:
    """All in one, names and texts with zeros between, much smaller than each by itself; the same bytes for the same
    pages. A page that is not in wheels has no text. bzip2 is best for text."""
    texts = [
        part
        for name, page in pages.items()
        for part in (name, page.read_text(encoding="utf-8") if name in IN_WHEELS else "")
        if page.stem != "index"
    ]
    return bz2.compress("\0".join(texts).encode())
