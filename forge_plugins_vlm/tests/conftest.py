"""Builds small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_vlm import FUSIONS, SMALL

from forge_core.config.builder import ComponentBuilder
from forge_core.loading import SeededInitializer
from forge_core.registry.discovery import discover


@pytest.fixture(scope="session")
def build() -> ComponentBuilder:
    return ComponentBuilder(discover(()))


@pytest.fixture(scope="session")
def make_model(build) -> Callable[..., Any]:
    """Builds a model with initial values: of a fusion, or of other keys."""

    def make(of: str = "joint_decoder", *, name: str = "vision_language", seed: int = 0, **keys: Any) -> Any:
        table = {**(SMALL if name == "vision_language" else {}), **FUSIONS.get(of, {}), **keys}
        with torch.device("meta"):
            model = build(build.resolve("model", {"name": name, **table}), vocab_size=31)
        model.to_empty(device="cpu")
        model.init_weights(SeededInitializer(seed))
        with torch.no_grad():
            for gate in (one for name, one in model.named_parameters() if name.endswith("_gate.weight")):
                gate.fill_(0.7)
        return model

    return make
