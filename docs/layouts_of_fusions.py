"""The layouts in which fusions are trained, from the cells of the parity matrix."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CELLS = Path(__file__).resolve().parent.parent / "tests" / "parity" / "parity_matrix" / "cells.py"
_WITH_IMAGES = "model.name=vision_language"
_MARKS = {
    "replayed_choice": "bf16 with the choices of one process",
    "data.packing=true": "packed",
    "train.precision=bf16": "bf16",
    "phases=": "frozen and thawed",
}
"""Parts of settings by which trainings differ, and words for each."""


def trained_layouts() -> dict[str, dict[str, list[str]]]:
    """By layout, in words, and by fusion: the trainings in the matrix."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell, settings in _cells():
        trainings = found.setdefault(_layout(cell.ranks, cell.layout), {}).setdefault(_fusion(settings), [])
        if (words := _training(settings)) not in trainings:
            trainings.append(words)
    return found


def _cells() -> Iterator[tuple[Any, Sequence[str]]]:
    """The cells with images, and the settings of their training."""
    specification = importlib.util.spec_from_file_location("parity_cells", CELLS)
    assert specification is not None, "it is a file of Python"
    assert specification.loader is not None, "the same"
    module = sys.modules["parity_cells"] = importlib.util.module_from_spec(specification)  # as attrs looks for it there
    specification.loader.exec_module(module)
    for cell in module.CELLS.values():
        if _WITH_IMAGES in module.TRAININGS[cell.training]:
            yield cell, module.TRAININGS[cell.training]


def _fusion(settings: Sequence[str]) -> str:
    """``model.fusion={name="moma", …}`` and ``model.fusion.name=moma`` name one."""
    own = next((one for one in settings if one.startswith("model.fusion")), "model.fusion.name=joint_decoder")
    match = re.search(r"name\s*=\s*['\"]?(\w+)", own)
    assert match is not None, f"the training names no fusion: {own}"
    return match[1]


def _training(settings: Sequence[str]) -> str:
    own = (words for mark, words in _MARKS.items() if any(mark in one for one in settings))
    return next(own, "✓")


def _layout(ranks: int, settings: Sequence[str]) -> str:
    """The axes of a layout, and the passes that it adds."""
    given: Mapping[str, str] = dict(one.split("=", 1) for one in settings)
    degrees = {axis: int(given.get(f"parallel.{axis}", 1)) for axis in ("pp", "tp", "cp", "ep")}
    copies = int(given.get("parallel.dp_replicate", 1))
    shards = ranks // (degrees["pp"] * degrees["tp"] * degrees["cp"] * copies)
    words = [f"{axis.upper()}{degree}" for axis, degree in degrees.items() if degree > 1]
    if schedule := given.get("parallel.passes.pipeline.schedule"):
        words[0] += f" ({schedule})"
    if shards > 1:
        words.append(f"HSDP{copies}×{shards}" if copies > 1 else f"FSDP{shards}")
    further = {
        "whole positions": given.get("parallel.passes.tensor_parallel.sequence_parallel") == "false",
        "recomputation": any(key.startswith("parallel.passes.activation_checkpointing") for key in given),
        "compiled": "parallel.passes.compile" in given,
        "accumulation": ranks == 1 and "train.grad_accumulation" in given,
    }
    return ", ".join([" × ".join(words) or "one process", *(name for name, is_so in further.items() if is_so)])
