"""Builds the site of several versions into one folder, with a choice of versions on each page.

``python docs/versions.py SITE v0.1.0 v0.2.0`` builds each tag of git into a folder of its name: ``SITE/v0.1.0``. One
that is there already stays as it is, so that a release builds its own site alone. Each is built by ``make docs`` from
its own files, in an environment of its own. ``SITE/index.html`` leads to the newest, and ``SITE`` can be served, or
opened from a disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = "docs/_build/html"
CHOICE = "_static/versions.js"
"""In each version: what the choice is between. ``version_switcher.js`` reads it."""


def main(words: list[str], repository: Path = ROOT) -> int:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("tags", nargs="+", metavar="TAG")
    given = parser.parse_args(words)
    known = _git(repository, "tag", "--sort=-version:refname").split()
    if unknown := [tag for tag in given.tags if tag not in known]:
        parser.error(f"{unknown[0]}: git has no such tag; it has {', '.join(known) or 'none'}")
    given.site.mkdir(parents=True, exist_ok=True)
    for tag in given.tags:
        if not (given.site / tag).exists():
            build(repository, tag, given.site / tag)
    versions = [tag for tag in known if (given.site / tag).is_dir()]
    offer(given.site, versions)
    print(f"{given.site} has {', '.join(versions)}")
    return 0


def build(repository: Path, tag: str, folder: Path) -> None:
    """Build the site of a tag, whose files are checked out for as long as that takes.

    Raises:
        CalledProcessError: it cannot be built; the folder is not there then.
    """
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / "files"
        _git(repository, "worktree", "add", "--detach", str(files), tag)
        try:
            subprocess.run(["make", "-C", files, "docs"], check=True)
            shutil.copytree(files / BUILT, folder)
        finally:
            _git(repository, "worktree", "remove", "--force", str(files))


def offer(site: Path, versions: list[str]) -> None:
    """Write the choice into each version, and a page that leads to the first.

    Args:
        versions: folders of the site, the newest first.
    """
    pages = {
        one: sorted(page.relative_to(site / one).as_posix() for page in (site / one).rglob("*.html"))
        for one in versions
    }
    for version in versions:
        data = json.dumps({"current": version, "pages": pages})
        (site / version / CHOICE).write_text(f"window.siteVersions = {data};\n", encoding="utf-8")
    newest = f"{versions[0]}/index.html"
    (site / "index.html").write_text(
        f'<!doctype html><html lang="en"><title>Forge</title><meta http-equiv="refresh" content="0; url={newest}">'
        f'<a href="{newest}">Forge {versions[0]}</a></html>\n',
        encoding="utf-8",
    )


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
