"""Calibrates this machine with as many processes as a run would have on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from forge_core.config.sections import Job
from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.errors import ForgeError
from forge_core.launch import launch_command
from forge_plugins_plan.calibration import Calibration, default_file
from forge_plugins_plan.measuring import device_words, measure


def calibrated(obj: Any, job: Job, ranks: int, out: Path | None) -> Path | None:
    """Measure, by processes of its own if ``ranks`` are several, and write it down.

    Args:
        obj: the ``Invocation``.
        ranks: of a node of the run; no more are started than this machine has GPUs, or cores.
        out: where to; by default ``default_file``.

    Returns:
        The file; ``None`` in a rank that a launcher has started for this.

    Raises:
        ForgeError: the file cannot be written.
    """
    if "RANK" in os.environ:
        device = choose_device(job.run.device)
        join_process_group(device)
        measured = measure(device)
        if dist.get_rank() == 0:
            _write(measured, out or default_file(measured.device, measured.ranks))
        dist.destroy_process_group()
        return None
    device = choose_device(job.run.device)
    there = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    number = min(ranks, there)
    file = out or default_file(device_words(device), number)
    if device.type != "cuda":
        click.echo(f"torch sees no GPU here; measuring the CPU: {device_words(device).partition(' ')[2]}", err=True)
    if number == 1:
        _write(measure(device), file)
        return file
    words = [*obj.arguments, *(["--out", str(file)] if out is None else [])]
    if code := launch_command(words, number, {}, obj.until_the_end):
        sys.exit(int(code))
    return file


def present_device(job: Job) -> str:
    """What a run would be on here, as ``Calibration.device``."""
    return device_words(choose_device(job.run.device))


def torch_version() -> str:
    """Of the torch that is installed."""
    return torch.__version__


def _write(measured: Calibration, file: Path) -> None:
    try:
        measured.write(file)
    except OSError as error:
        raise ForgeError(f"--out {file}: cannot be written: {error.strerror}") from error
    click.echo(f"measured {measured.device.partition(' ')[2]}; written to {file}", err=True)
