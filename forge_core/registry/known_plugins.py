"""The components of our published packages: read when something is missing, to say what to install, and never
before."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def publishers(kind: str, name: str) -> list[str]:
    """The published distributions that provide this component (or command, with the kind ``"command"``)."""
    return [distribution for distribution, kinds in _components().items() if name in kinds.get(kind, ())]


def publishers_of_kind(kind: str) -> list[str]:
    """The published distributions that provide components of this kind."""
    return [distribution for distribution, kinds in _components().items() if kind in kinds]


def published_names(kind: str) -> list[str]:
    """The names of all published components of a kind."""
    return [name for kinds in _components().values() for name in kinds.get(kind, ())]


def cluster_of(environment: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The published cluster environment of which this process is one task of several: its distribution and name, and
    the variable that says so."""
    for name, variables in _file()["clusters"].items():
        counts = (environment[count] for count in variables["tasks"] if environment.get(count))
        if all(one in environment for one in variables["task"]) and next(counts, "1") != "1":
            distribution, _, bare = name.partition(":")
            return distribution, bare, variables["task"][0]
    return None


def serving_pass(capability: str) -> tuple[str, str] | None:
    """Distribution and name of the published pass that serves a mesh axis or ``"precision"``."""
    distribution, colon, name = _file()["serves"].get(capability, "").partition(":")
    return (distribution, name) if colon else None


def _components() -> Mapping[str, Mapping[str, list[str]]]:
    components: Mapping[str, Mapping[str, list[str]]] = _file()["components"]
    return components


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("known_plugins.toml").read_text(encoding="utf-8"))
