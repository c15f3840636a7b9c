"""How long one start of a run may last: as it is written, and what is wrong with it."""

from __future__ import annotations

import re
from typing import Any

import attrs

from forge_core.errors import ConfigError

DEFAULT_LEAD = 120.0
"""Seconds before its end at which a run saves and stops, unless ``run.stop_before_end`` says otherwise."""

_FORMS = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?P<hours>\d+):(?P<hour_minutes>\d+):(?P<hour_seconds>\d+)"
    r"|(?P<minutes>\d+)(?::(?P<seconds>\d+))?)"
)


def seconds_of(limit: int | str) -> int:
    """The seconds of a time limit as Slurm writes it: ``30`` or ``"30"`` (minutes), ``"30:00"``, ``"12:00:00"``,
    ``"2-12"`` (days, hours) or ``"2-12:30:00"``.

    Raises:
        ConfigError: it is none of these, or no time at all.
    """
    match = _FORMS.fullmatch(str(limit))
    parts = {name: int(digits) for name, digits in match.groupdict().items() if digits} if match else {}
    units = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}
    seconds = sum(number * units[re.sub(r"^(day|hour)_", "", name)] for name, number in parts.items())
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
