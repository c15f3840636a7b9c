"""What a run says when it has reached its end: how long it took, how good it is, and where to go on."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping

import attrs

from forge_core.engine.preparation import Prepared


@attrs.define
class EndReport:
    """Made when training begins. ``note`` is given what is recorded, on the first rank."""

    prepared: Prepared
    _loss: str = ""
    _since: float = attrs.field(factory=time.monotonic)

    def note(self, values: Mapping[str, float]) -> None:
        """Keep the newest loss; that of an evaluation, if there has been one."""
        for name in ("loss", "eval/loss"):
            if name in values and not (name == "loss" and self._loss.startswith("eval/")):
                self._loss = f"{name} {values[name]:.4g}"

    def line(self, step: int) -> str:
        """Such as ``done: 400 steps in 3 min 12 s; eval/loss 2.31; forge generate runs/demo``."""
        prepared = self.prepared
        here = step - prepared.start.step
        how_many = f"{step} steps" if here == step else f"{step} steps, the last {here}"
        directory = str(prepared.directory.path)
        has_text = prepared.source.tokenizer is not None
        where = f"forge generate {shlex.quote(directory)}" if has_text else f"files in {directory}"
        took = duration_words(time.monotonic() - self._since)
        return "; ".join(filter(None, [f"done: {how_many} in {took}", self._loss, where]))


def duration_words(seconds: float) -> str:
    """``3 min 12 s``: the largest unit and the one below it."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"
