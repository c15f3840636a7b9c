"""Checks a site that is built: the size of each page, every link within it, and headings without a level.

``python docs/check_site.py docs/_build/html`` prints what it has found, and ends with 1 if anything is wrong.
``--build`` builds the site into that folder first, from nothing, and looks at the time, too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
MAX_BYTES = 300_000
"""Of a page."""
MAX_SECONDS = 90
"""Of a build from nothing."""


def main() -> int:
    """Check the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--build", action="store_true")
    given = parser.parse_args()
    found = [*_build(given.site)] if given.build else []
    found += problems(given.site)
    pages = [*given.site.rglob("*.html")]
    largest = max(pages, key=lambda path: path.stat().st_size)
    size, name = largest.stat().st_size, largest.relative_to(given.site)
    print(*found, f"{len(pages)} pages, the largest {name} with {size:,} bytes", sep="\n")
    return 1 if found else 0


def _build(site: Path) -> Iterator[str]:
    shutil.rmtree(site, ignore_errors=True)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", HERE, site], check=True)
    seconds = time.monotonic() - start
    print(f"built in {seconds:.0f} s")
    if seconds > MAX_SECONDS:
        yield f"the build took {seconds:.0f} s, more than {MAX_SECONDS}"


def problems(site: Path) -> Iterator[str]:
    """A sentence for each page that is too large or has a heading of no level, and each link that leads nowhere."""
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        if (size := path.stat().st_size) > MAX_BYTES:
            yield f"{name} has {size:,} bytes, more than {MAX_BYTES:,}"
        if page.flat:
            yield f"{name} has {page.flat} headings without aria-level, which screen readers cannot place"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{name} links to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {link}, and there is no such place on that page"


class _Page(HTMLParser):
    """The links of a page, the names of its places, and how many headings have no level."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.flat = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        self.flat += given.get("role") == "heading" and "aria-level" not in given
        if tag in ("a", "link", "script", "img") and (link := given.get("href") or given.get("src")):
            self.links.append(link)


if __name__ == "__main__":
    sys.exit(main())
