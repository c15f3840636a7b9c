"""The components of our published packages: read when something is missing, to say what to install, and never
before."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def published(kind: str) -> dict[str, list[str]]:
    """The names of the published components of a kind (of commands, with ``"command"``), each with the distributions
    that provide it."""
    found: dict[str, list[str]] = {}
    for distribution, kinds in _file()["components"].items():
        for name in kinds.get(kind, ()):
            found.setdefault(name, []).append(distribution)
    return found


def cluster_of(environment: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The published cluster environment of which this process is one task of several: its distribution and name, and
    the variable that says so."""
    for name, variables in _file()["clusters"].items():
        counts = (environment[count] for count in variables["tasks"] if environment.get(count))
        if all(one in environment for one in variables["task"]) and next(counts, "1") != "1":
            distribution, _, bare = name.partition(":")
            return distribution, bare, variables["task"][0]
    return None


def serving_pass(capability: str) -> tuple[str, str]:
    """Distribution and name of the published pass that serves a mesh axis or ``"precision"``; both may be empty."""
    distribution, _, name = _file()["serves"].get(capability, "").partition(":")
    return distribution, name


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("known_plugins.toml").read_text(encoding="utf-8"))
