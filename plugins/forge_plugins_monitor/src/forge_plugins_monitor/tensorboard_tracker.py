"""Metrics as event files of TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from forge_core.contracts.tracker import Tracker
from forge_plugins_monitor.tracker_config import TensorBoardConfig
from forge_plugins_monitor.versions import versions


class TensorBoard(Tracker):
    """Scalars by name, series as histograms, figures as images, the job and the versions as texts.

    Its state is the last step: what a resumed run does again, and what one does again that has gone back to a
    checkpoint, is marked as taken back, and TensorBoard shows the later values only.
    """

    def __init__(self, config: TensorBoardConfig, /, *, run_name: str, run_dir: Path, job: Mapping[str, Any]) -> None:
        self._folder = run_dir / config.dir
        self._texts = {"job": job, "versions": versions()}
        self._writer: Any = None
        self._last = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        goes_back = step < self._last or (step == self._last and "loss" in metrics)
        writer = self._writer_from(step, goes_back=goes_back)
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), step)
        writer.flush()
        self._last = step

    def log_series(self, step: int, series: Mapping[str, Sequence[float]]) -> None:
        writer = self._writer_from(step)
        for name, values in series.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:  # there is no histogram of nothing
                writer.add_histogram(name, np.asarray(finite), step)

    def log_figure(self, step: int, name: str, path: Path) -> None:
        from PIL import Image

        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer_from(step).add_image(name, pixels, step, dataformats="HWC")

    def close(self, outcome: str) -> None:
        if self._writer is not None:
            self._writer.add_text("outcome", outcome, self._last)
            self._writer.close()

    def state(self) -> Mapping[str, Any]:
        return {"step": self._last} if self._last else {}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._last = state["step"]
        self._writer = self._open(self._last + 1)

    def _writer_from(self, step: int, *, goes_back: bool = False) -> Any:
        if goes_back and self._writer is not None:
            self._writer.close()
            self._writer = self._open(step)
        if self._writer is None:
            # files that are there are of a start from which nothing is resumed
            self._writer = self._open(0)
        return self._writer

    def _open(self, taken_back_from: int) -> Any:
        """A file of its own for each start."""
        writer = SummaryWriter(str(self._folder), purge_step=taken_back_from)
        for name, value in self._texts.items():
            text = json.dumps(value, indent=2, default=str)
            indented = "\n".join(f"    {line}" for line in text.splitlines())  # a block of Markdown
            writer.add_text(name, indented, taken_back_from)
        return writer
