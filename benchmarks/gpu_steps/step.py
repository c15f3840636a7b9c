"""A step of ``gpu.py``: one question to the machine, answered in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch


@attrs.frozen(kw_only=True)
class Setting:
    """Where a step runs."""

    device: torch.device
    tiny: bool
    """Sizes for a CPU: the step shows that it works, and times and memory are of no worth."""
    folder: Path
    """Empty, and gone afterwards."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def measures(self) -> bool:
        """Whether times and memory are of worth, and are judged."""
        return self.is_gpu and not self.tiny

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


Figures = Mapping[str, float | int | str]
"""The answer, in the order in which the table shows it."""


@attrs.frozen(kw_only=True)
class Step:
    """An entry of the list."""

    name: str
    asks: str
    """The question, as ``--list`` shows it."""
    seconds: int
    """How long it takes on one H200; it is given three times as long, and not begun when less is left."""
    run: Callable[[Setting], Figures]
    gib: int = 0
    """Memory that a GPU must have for it, with some room; 0: any has enough."""

    def refusal(self, gib: float, *, has_bf16: bool) -> str:
        """Why a GPU with ``gib`` GiB cannot answer; empty if it can."""
        if not has_bf16:
            return "computes in bf16, which this GPU does not have"
        return f"takes {self.gib} GiB, and this GPU has {gib:.1f}" if gib < self.gib else ""


class SkippedError(Exception):
    """This machine cannot answer; the message says why."""


class FailedError(Exception):
    """The answer is not what it must be.

    Args:
        figures: measured all the same.
    """

    def __init__(self, reason: str, figures: Figures) -> None:
        super().__init__(reason)
        self.figures = figures


def must(problems: Mapping[str, bool], figures: Figures) -> Figures:
    """``figures``, if none of ``problems`` is there.

    Raises:
        FailedError: with all that are.
    """
    found = [sentence for sentence, is_there in problems.items() if is_there]
    if found:
        raise FailedError("; ".join(found), figures)
    return figures
