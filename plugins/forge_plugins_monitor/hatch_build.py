"""Puts the pages of the documentation into the wheel, for ``forge docs``, and into the source distribution."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pages(BuildHookInterface):
    """From a checkout, or from a source distribution, which has a copy. An editable installation reads the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        own, tree = root / "docs", root.parents[1] / "docs"
        pages = own if own.is_dir() else tree
        if not (pages / "hooks" / "index.md").is_file():
            raise FileNotFoundError(f"the pages of the documentation are neither in {own} nor in {tree}")
        target = "docs" if self.target_name == "sdist" else "forge_plugins_monitor/pages/text"
        if version != "editable":
            for page in sorted([*pages.glob("*.md"), *pages.glob("hooks/*.md")]):
                build_data["force_include"][str(page)] = f"{target}/{page.relative_to(pages).as_posix()}"
