"""The dtype in which a model computes."""

from __future__ import annotations

import torch

from forge_core.config.sections import Precision


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of activations: bf16 also for ``bf16_pure``."""
    return {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


def cast_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype to which fp32 parameters are cast before each use, if they are."""
    return compute_dtype(precision) if precision in ("bf16", "fp16") else None
