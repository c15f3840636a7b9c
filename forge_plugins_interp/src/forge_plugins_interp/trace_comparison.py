"""Where two traces part."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_interp.fingerprint import Fingerprint, difference

FILE = "trace.jsonl"


@attrs.frozen
class Compared:
    """One thing of a step in two traces."""

    step: int
    kind: str
    name: str
    difference: float
    """Relative, as ``fingerprint.difference`` has it; NaN if one of the two has not computed it, as a loss that takes
    the head's weight does without ``logits``."""
    only: Path | None = None
    """The one of the two that has it, if the other has not."""

    def words(self) -> str:
        """Such as ``the gradient of blocks.1.attention.q.weight``."""
        return {
            "site": f"site {self.name}",
            "site_gradient": f"the gradient at site {self.name}",
            "gradient": f"the gradient of {self.name}",
            "update": f"the update of {self.name}",
        }[self.kind]


def trace_lines(step: int, kind: str, found: Mapping[str, Fingerprint]) -> str:
    """Lines of a trace: a JSON object for each name."""
    facts = ({"step": step, "kind": kind, "name": name, **one.table()} for name, one in found.items())
    return "".join(f"{json.dumps(line)}\n" for line in facts)


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """The lines of a trace.

    Raises:
        ConfigError: there is none, or one that is damaged or empty.
    """
    path = folder / FILE
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {FILE}; forge trace CONFIG --out {folder} writes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"{path} is empty: the run ended before a step that was to be traced")
    return lines


def compare_traces(a: Path, b: Path) -> list[Compared]:
    """All things of the steps that both have, in the order in which ``a`` computes them.

    Raises:
        ConfigError: a trace cannot be read, or they have no step in common.
    """
    first, second = read_trace(a), read_trace(b)
    steps = {line["step"] for line in first} & {line["step"] for line in second}
    if not steps:
        raise ConfigError(f"{a} and {b} have no step in common")
    theirs = {_key(line): line for line in second}
    mine = {_key(line): line for line in first}
    found = []
    for key, line in mine.items():
        if key[0] in steps:
            other = theirs.get(key)
            found.append(Compared(*key, math.nan, a) if other is None else Compared(*key, difference(line, other)))
    found += [Compared(*key, math.nan, b) for key in theirs if key[0] in steps and key not in mine]
    return found


def first_parting(compared: Sequence[Compared], tolerance: float) -> Compared | None:
    """The first thing that differs by more than ``tolerance``."""
    return next((one for one in compared if one.difference > tolerance), None)


def _key(line: dict[str, Any]) -> tuple[int, str, str]:
    return line["step"], line["kind"], line["name"]
