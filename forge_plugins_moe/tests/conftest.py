from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_plugins_dense.transformer import Transformer

VOCABULARY = 50


def decoder(table: Mapping[str, Any] | None = None, *, seed: int | None = 0, **keys: Any) -> Transformer:
    """The decoder of a table ``[model]``, by default a tiny dense one, in evaluation mode; on meta without a seed.

    Weights are larger than usual, so that mistakes show.
    """
    tiny = {
        "name": "transformer",
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_seq_len": 64,
        "init_std": 0.2,
        "feed_forward": {"name": "mlp", "hidden_dim": 48},
    }
    build = ComponentBuilder(discover())
    with torch.device("meta"):
        model: Transformer = build(build.resolve("model", {**(table or tiny), **keys}), vocab_size=VOCABULARY)
    if seed is not None:
        materialise(model, torch.device("cpu"), seed)
    return model.eval()


@pytest.fixture(name="decoder")
def decoder_fixture() -> Callable[..., Transformer]:
    return decoder


@pytest.fixture
def tokens() -> torch.Tensor:
    """``(2, 24)`` ids."""
    return torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


class Counting(TorchDispatchMode):
    """How often each operation is computed."""

    def __init__(self):
        super().__init__()
        self.computed = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.computed[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counting() -> type[Counting]:
    return Counting
