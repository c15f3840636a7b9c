"""Blocks that recompute themselves, for the comparison in a plan only: how much each way to do it would save."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge_core.component import Use
from forge_core.contracts.parallel_pass import PassContext

MODES = ("none", "selective", "full")
"""Keep everything; keep what ``Model.recompute_plan`` names; keep the input of each block."""


@attrs.frozen(kw_only=True)
class RecomputeConfig:
    """Which of ``MODES``."""

    mode: str


def recompute_use(mode: str) -> Use:
    """As a pass that a job could name; it is none, so that the core offers no component."""
    return Use(
        kind="parallel_pass",
        name="recompute",
        provider="forge-core",
        factory="forge_core.plan.recompute:RecomputeBlocks",
        config=RecomputeConfig(mode=mode),
    )


class RecomputeBlocks:
    """Every block under torch's checkpoint."""

    def __init__(self, config: RecomputeConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        more: dict[str, Any] = {}
        if self._config.mode == "selective":
            more["context_fn"] = partial(create_selective_checkpoint_contexts, _policy(model))
        touched = []
        for name, block in model.blocks.items():  # type: ignore[union-attr,operator]  # declared by the model
            # nothing random is computed here, and a fake generator has no state to keep
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)
            touched.append(f"blocks.{name}")
        return model, touched


def _policy(model: Any) -> Any:
    kept = {name for name, decision in model.recompute_plan().items() if decision == "keep"}

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        namespace, _, name = operation.name().rpartition("::")  # such as aten::mm.out, or flex_attention
        return (
            CheckpointPolicy.MUST_SAVE
            if f"{namespace or 'higher_order'}.{name.partition('.')[0]}" in kept
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return policy
