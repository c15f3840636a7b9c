"""Which installed distributions announce themselves to Forge, found without importing or parsing anything else.

``importlib.metadata`` would do, at 25 ms for each command: a third of what ``forge --help`` may take. Installers write
a directory ``<name>-<version>.dist-info`` for every distribution (PEP 376), its name in normalised form (PEP 427), and
what it announces stands in ``entry_points.txt``; that is all we need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache

import attrs

ENTRY_POINT_GROUP = "forge.v1"
"""Where plugins announce themselves. The number is the major version of the contract."""
API_MINOR = 5
"""The minor version of the contract that this core offers. A plugin states the oldest one it works with as
``FORGE_API = "1.0"`` in its plugin module."""
API_VERSION = f"{ENTRY_POINT_GROUP.removeprefix('forge.v')}.{API_MINOR}"


@attrs.frozen
class PluginEntryPoint:
    """A distribution's entry points in the groups ``forge.v<major>``."""

    distribution: str
    """Normalised as in PEP 503."""
    version: str
    entry_points: tuple[tuple[int, str, str], ...]
    """The group's major version, the entry point's name, and its value ``"package.module"``."""
    core: str = ""
    """The versions of ``forge-core`` that its metadata ask for: ``"<0.2,>=0.1"``."""


@lru_cache(maxsize=1)  # a scan opens a file for each installed distribution: slow on a shared file system
def plugin_entry_points(path: tuple[str, ...]) -> tuple[PluginEntryPoint, ...]:
    """The announcements on an import path (``tuple(sys.path)``), sorted by distribution.

    Of several installations of one distribution the first one on the path counts, as it does for ``import``.
    """
    seen: set[str] = set()
    found = []
    for directory in path:
        for name, version, information in _installed_in(directory or "."):
            if name not in seen:
                seen.add(name)
                points = tuple(_entry_points(os.path.join(information, "entry_points.txt")))  # noqa: PTH118  # speed
                if points:
                    needs = _core_of(os.path.join(information, "METADATA"))  # noqa: PTH118
                    found.append(PluginEntryPoint(name, version, points, needs))
    return tuple(sorted(found, key=lambda one: one.distribution))


def canonical_distribution(name: str) -> str:
    """A distribution's name in the one spelling that is compared and written (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def extras_of(distribution: str) -> list[str]:
    """The optional parts that a distribution names; none if it is not installed."""
    from importlib import metadata  # for what is missing alone

    return metadata.metadata(distribution).get_all("Provides-Extra") or [] if installed(distribution) else []


def installed(distribution: str) -> str | None:
    """Its version here."""
    from importlib import metadata  # no plugin is found by it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _installed_in(directory: str) -> Iterator[tuple[str, str, str]]:
    try:
        entries = sorted(entry for entry in os.listdir(directory) if entry.endswith(".dist-info"))  # noqa: PTH208
    except OSError:  # not a directory (a zip archive, or missing), or not readable
        return
    for entry in entries:
        name, _, version = entry.removesuffix(".dist-info").partition("-")
        if version and not name.startswith("~"):  # pip renames what it is about to remove, and may be interrupted
            yield canonical_distribution(name), version, os.path.join(directory, entry)  # noqa: PTH118


def _entry_points(file: str) -> Iterator[tuple[int, str, str]]:
    text = _text(file)
    if "[forge.v" not in text:
        return
    major = None
    for line in text.splitlines():
        if line.startswith("["):
            group = _GROUP.fullmatch(line.strip())
            major = int(group[1]) if group else None
        elif major is not None and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield major, name.strip(), value.strip()


def _core_of(file: str) -> str:
    asked = _CORE.search(_text(file).partition("\n\n")[0])
    return asked[1].strip(" ()") if asked else ""


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as content:  # noqa: PTH123  # speed
            return content.read()
    except OSError:
        return ""


_CORE = re.compile(r"^Requires-Dist: forge[-_.]core\b([^;\n]*)$", re.M | re.I)
_GROUP = re.compile(r"\[forge\.v(\d{1,9})\]")
