"""A model with images learns the next token, and not the one that it is given."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from small_vlm import FUSIONS, WORDS

SPELLED, LENGTH, ROWS, STEPS = WORDS[3:13], 12, 8, 60
"""Words of captions, words of a caption, captions in a batch, batches."""
BY_DAY = ("joint_decoder", "cross_attention")
"""An image has a position for each of its tokens, and one."""


@pytest.mark.parametrize(
    "fusion", [pytest.param(one, marks=[pytest.mark.nightly] * (one not in BY_DAY)) for one in FUSIONS]
)
def test_captions_by_chance_are_not_learned(fusion, build, make_model, open_source, picture, tmp_path):
    """Each word is one of ten, and no caption comes twice: nothing but its length can be known beforehand. A model
    whose targets are the tokens that it sees gets to a loss of nearly 0."""
    chance = np.random.default_rng(0)
    image = picture("a.png")
    turns = [" ".join(chance.choice(SPELLED, LENGTH)) for _ in range(ROWS * STEPS)]
    records = [
        {"image": image, "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": turn}]}
        for turn in turns
    ]
    (tmp_path / "captions.json").write_text(json.dumps(records), encoding="utf-8")
    keys = {"processor": {"name": "square", "size": 16}, "token_grid": [2, 2], "seq_len": 20}
    one = fusion == "cross_attention"
    source = open_source(path=str(tmp_path / "captions.json"), format="llava", one_token_an_image=one, **keys)
    model, loss = make_model(fusion), build(build.resolve("loss", {"name": "cross_entropy"}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for step in range(STEPS):
        batch = source.read(np.arange(ROWS * step, ROWS * (step + 1)))
        summed = model(**{name: torch.as_tensor(entry) for name, entry in batch.items()}, loss=loss)
        mean = summed.total / summed.count
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())

    floor = math.log(len(SPELLED)) * LENGTH / (LENGTH + 1)  # where a caption ends is soon known
    assert 0.97 * floor < np.mean(losses[-20:]) < 1.15 * floor < losses[0]
