"""``experts.jsonl``: the load of every expert of every sparse layer at logged steps. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError

FILE = "experts.jsonl"


@attrs.frozen
class Loads:
    """One line."""

    step: int
    load: Mapping[str, Sequence[float]]
    """By layer: assignments to each expert, over all tokens of the step."""
    pairs: Mapping[str, Sequence[Sequence[float]]]
    """By layer: of each expert's tokens, the part that visits another expert too; empty if it was not asked for."""


class LoadHistory:
    """The file as a run writes it. A full disk, or a file that cannot be read, does not end a run: it is told once, and
    lines are missing."""

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self._path = run_dir / FILE
        self._log = log
        self._complained = False

    def forget_after(self, step: int) -> None:
        """Take out lines about later steps: that work is being done again."""
        try:
            lines = self._path.read_text(errors="replace").splitlines() if self._path.exists() else []
        except OSError as error:
            self._complain("read", error)
            return
        kept = [line for line in lines if (one := _loads_of(line)) is not None and one.step <= step]
        if lines:
            self._write("w", "".join(f"{line}\n" for line in kept))

    def add(self, step: int, load: Mapping[str, Sequence[float]], pairs: Mapping[str, Sequence[float]]) -> None:
        """
        Args:
            pairs: by layer, a matrix row after row.
        """
        line: dict[str, Any] = {"step": step, "load": {name: [int(one) for one in each] for name, each in load.items()}}
        if pairs:
            line["pairs"] = {name: _rows(flat, len(load[name])) for name, flat in pairs.items()}
        self._write("a", json.dumps(line) + "\n")

    def _write(self, mode: str, text: str) -> None:
        try:
            with self._path.open(mode) as file:
                file.write(text)
        except OSError as error:
            self._complain("write", error)

    def _complain(self, what: str, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._log(f"experts: cannot {what} {self._path}: {error.strerror}")


def read_loads(run_dir: Path) -> list[Loads]:
    """The whole lines so far.

    Raises:
        ConfigError: there are none.
    """
    path = run_dir / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    loads = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):  # cut short by a crash
            break
        one = _loads_of(line)
        if one is None:
            raise ConfigError(
                f"{path}:{number}: is damaged: a line has a step and, for each layer, the loads of its experts"
            )
        loads.append(one)
    if not loads:
        raise ConfigError(f'{path} has no line; a run writes it that has the callback "experts" and sparse layers')
    return loads


def _loads_of(line: bytes | str) -> Loads | None:
    """``None`` of a line that was cut short or damaged."""
    try:
        values = json.loads(line)
        step, load, pairs = values["step"], values["load"], values.get("pairs", {})
        numbers = [one for layer in load.values() for one in layer]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    is_whole = isinstance(step, int) and all(isinstance(one, (int, float)) for one in numbers)
    return Loads(step, load, pairs) if is_whole else None


def _rows(flat: Sequence[float], size: int) -> list[list[float]]:
    return [[round(one, 4) for one in flat[row * size : (row + 1) * size]] for row in range(size)]
