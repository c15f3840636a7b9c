"""How long one start of a run may last: as it is written, and what is wrong with it."""

from __future__ import annotations

import re
from typing import Any

import attrs

from forge_core.errors import ConfigError

DEFAULT_LEAD = 120.0
"""Seconds before its end at which a run saves and stops, unless ``run.stop_before_end`` says otherwise."""

_FORM = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
"""Days, and up to three numbers."""


def seconds_of(limit: int | str) -> int:
    """The seconds of a time limit as Slurm writes it: ``30`` or ``"30"`` (minutes), ``"30:00"``, ``"12:00:00"``,
    ``"2-12"`` (days, hours) or ``"2-12:30:00"``.

    Raises:
        ConfigError: it is none of these, or no time at all.
    """
    seconds = 0
    if match := _FORM.fullmatch(str(limit)):
        days, numbers = match[1], match[2].split(":")
        units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
        seconds = int(days or 0) * 86_400 + sum(int(one) * unit for one, unit in zip(numbers, units, strict=False))
    if seconds == 0:
        raise ConfigError(
            f'{limit!r} is not a time limit; write minutes ("30"), hours:minutes:seconds ("12:00:00") or '
            'days-hours:minutes:seconds ("2-12:00:00")'
        )
    return seconds


def is_time_limit(_: object, attribute: attrs.Attribute[Any], value: int | str) -> None:
    """A validator of attrs fields."""
    seconds_of(value)


def lead_problem(lead: float | None, limit: int | str, what: str) -> str | None:
    """Say what is wrong with a ``run.stop_before_end`` of ``lead`` seconds, if ``what`` is ``limit``."""
    seconds = seconds_of(limit)
    if (DEFAULT_LEAD if lead is None else lead) < seconds:
        return None
    given = f"{DEFAULT_LEAD:g} s, the default," if lead is None else f"{lead:g} s"
    return f"{given} is not below {what} = {limit!r} = {seconds} s: the run would stop as soon as it starts"
