"""Requirements on installed distributions, such as ``"acme-routers>=0.3,<0.4"``, in the versions of PEP 440.

A few lines of our own, since ``packaging`` is not among the core's dependencies.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import attrs

from forge_core.errors import ConfigError

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*?)\s*")
_CLAUSE = re.compile(r"(~=|==|!=|>=|<=|>|<)\s*(.+)")
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>a|b|rc|alpha|beta|c|pre|preview)[-_.]?(?P<pre_number>\d*))?"
    r"(?:(?:[-_.]?(?:post|rev|r)[-_.]?|-)(?P<post>\d+))?"
    r"(?:[-_.]?dev[-_.]?(?P<dev>\d*))?"
    r"(?:\+[a-z0-9._-]+)?",  # a local build (`+cpu`) satisfies what its public version does
    re.IGNORECASE,
)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def unmet(requirement: str) -> str | None:
    """A sentence if the installed distribution does not meet ``requirement``.

    Raises:
        ConfigError: it is not a name with version clauses.
    """
    from importlib.metadata import PackageNotFoundError, version

    name, clauses = _parse(requirement)
    install = f"pip install '{requirement}'"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed: {install}"
    if all(clause.admits(Version.parse(installed)) for clause in clauses):
        return None
    return f"asks for {requirement.strip()}, and {name} {installed} is installed: {install}"


@attrs.frozen
class Version:
    """What PEP 440 compares."""

    release: tuple[int, ...]
    pre: tuple[str, int] | None
    post: int | None
    dev: int | None

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises ConfigError for anything that is not a version."""
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"'{text}' is not a version")
        parts = match.groupdict()
        letter = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
        pre = (parts["pre"] or "").lower()
        return cls(
            release=tuple(map(int, parts["release"].split("."))),
            pre=(letter.get(pre, pre), int(parts["pre_number"] or 0)) if pre else None,
            post=None if parts["post"] is None else int(parts["post"]),
            dev=None if parts["dev"] is None else int(parts["dev"] or 0),
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Sorts as versions do: 1.0.dev1, 1.0a1.dev1, 1.0a1, 1.0, 1.0.post1."""
        release = self.release
        while release and release[-1] == 0:
            release = release[:-1]
        without_pre = ("", 0) if self.dev is not None and self.post is None else ("~", 0)
        post = -1 if self.post is None else self.post
        dev = math.inf if self.dev is None else self.dev
        return release, self.pre or without_pre, post, dev

    @property
    def is_preview(self) -> bool:
        """Whether it comes before the release that it is named after."""
        return self.pre is not None or self.dev is not None

    def starts_with(self, release: tuple[int, ...]) -> bool:
        """Whether ``==`` with ``.*`` after ``release`` admits it."""
        return (*self.release, *[0] * len(release))[: len(release)] == release


@attrs.frozen
class Clause:
    """One comparison of a requirement."""

    comparison: str
    version: Version
    is_prefix: bool

    def admits(self, installed: Version) -> bool:
        """Whether the installed version is allowed."""
        if self.is_prefix:
            return installed.starts_with(self.version.release) is (self.comparison == "==")
        if self.comparison == "~=":
            return installed.key >= self.version.key and installed.starts_with(self.version.release[:-1])
        if self.comparison == "<" and installed.is_preview and not self.version.is_preview:
            return installed.key < self.version.key and not installed.starts_with(self.version.release)
        return _ORDER[self.comparison](installed.key, self.version.key)


def _parse(requirement: str) -> tuple[str, list[Clause]]:
    match = _REQUIREMENT.fullmatch(requirement)
    texts = [text.strip() for text in match[2].split(",")] if match and match[2] else []
    clauses = [_CLAUSE.fullmatch(text) for text in texts]
    if match is None or not all(clauses):
        raise ConfigError(f"'{requirement}' is not a requirement such as \"acme-routers>=0.3,<0.4\"")
    return match[1], [_clause(clause[1], clause[2]) for clause in clauses if clause]


def _clause(comparison: str, text: str) -> Clause:
    is_prefix = text.endswith(".*") and comparison in ("==", "!=")
    version = Version.parse(text.removesuffix(".*") if is_prefix else text)
    if comparison == "~=" and len(version.release) < 2:
        raise ConfigError(f"~= needs a version of at least two numbers, got '{text}'")
    return Clause(comparison, version, is_prefix)
