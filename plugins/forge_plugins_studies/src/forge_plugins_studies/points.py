"""Sweeps: one run for each value of a key, or for each combination of values of several."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import attrs

from forge_core.errors import ConfigError

_MOST_RUNS = 10_000
"""Each is checked, and has files of its own; arrays of Slurm have 1,001 tasks unless a cluster says otherwise."""


@attrs.frozen
class Point:
    """One run of a sweep."""

    suffix: str
    """What its name has behind the name of the sweep: ``"-lr-1e-3"``."""
    overrides: tuple[str, ...]
    """Settings of the command line: ``("optimizer.lr=1e-3",)``."""


def points_of(sweeps: Sequence[str]) -> list[Point]:
    """All combinations of ``("optimizer.lr=1e-3,3e-4", "train.seed=1,2")``; one point without overrides if empty.

    Values are separated by commas; those inside of brackets, braces and quotes are not.

    Raises:
        ConfigError: one has no key or no values, a key is there twice, or two runs would have the same name.
    """
    axes: dict[str, list[str]] = {}
    for text in sweeps:
        key, equals, values = text.strip().removeprefix("--").partition("=")
        key = key.strip()
        if not equals or not key or not all(split := _split(values)):
            raise ConfigError(f"--sweep {text}: expected key=value,value as in --sweep optimizer.lr=1e-3,3e-4")
        if key in ("run.name", "run.dir"):
            raise ConfigError(f"--sweep {text}: {key} is made for each run of the sweep; set it for all of them")
        if key in axes:
            raise ConfigError(f"--sweep {text}: {key} is swept twice; give all its values in one")
        axes[key] = split
    if (runs := math.prod(map(len, axes.values()))) > _MOST_RUNS:
        raise ConfigError(f"--sweep: that makes {runs:,} runs; at most {_MOST_RUNS:,} are started at once")
    short = {key: _shortest(key, axes) for key in axes}
    points = [
        Point(
            suffix="".join(f"-{short[key]}-{_plain(value)}" for key, value in zip(axes, values, strict=True)),
            overrides=tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True)),
        )
        for values in itertools.product(*axes.values())
    ]
    seen: dict[str, Point] = {}
    for one in points:
        other = seen.setdefault(one.suffix, one)
        if other is not one:
            raise ConfigError(
                f"--sweep: {' '.join(other.overrides)} and {' '.join(one.overrides)} would both be called "
                f"…{one.suffix}; leave one out"
            )
    return points


def _split(values: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _shortest(key: str, keys: dict[str, list[str]]) -> str:
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _plain(value: str) -> str:
    """The value as a part of a file name."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")
