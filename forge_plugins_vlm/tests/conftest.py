"""Builds small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from small_vlm import FUSIONS, SMALL, WORDS
from tokenizers import models, pre_tokenizers

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer


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


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A ``tokenizer.json`` of ``WORDS``, whose ids are their places."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:3])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def open_source(build, tokenizer_path):
    """Opens ``image_text`` with some keys; the processor is ``square`` of 8 pixels, the grid 1 × 2."""

    def open_source(*, seq_len=16, split="all", **keys):
        table = {
            "name": "image_text",
            "tokenizer": {"name": "tokenizer_file", "path": str(tokenizer_path)},
            "processor": {"name": "square", "size": 8},
            "token_grid": [1, 2],
            **keys,
        }
        use = build.resolve("data_source", {key: value for key, value in table.items() if value is not None})
        return build(use, seq_len=seq_len, split=split, seed=0, samples_per_step=4)

    return open_source


@pytest.fixture
def picture(tmp_path):
    """Writes a picture of noise, of its seed, and returns its name."""

    def picture(name, seed=0, size=(8, 8)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return name

    return picture
