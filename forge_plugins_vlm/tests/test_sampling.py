"""What a model in a layout is given to continue prompts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from forge_plugins_vlm.data.prompts import PromptReader
from forge_plugins_vlm.data.references import PictureFile
from forge_plugins_vlm.sampling import say


class Recording:
    """An ``EvaluationContext`` of one rank, whose model says the word 3 and keeps what it was given."""

    job = SimpleNamespace(parallel=SimpleNamespace(cp=1, tp=1), train=SimpleNamespace(seq_len=16))

    def __init__(self):
        self.given = []

    def batches(self, source):
        yield {name: torch.from_numpy(one) for name, one in source.read(np.arange(len(source))).items()}

    def predict(self, batch):
        self.given.append({name: one.clone() for name, one in batch.items()})
        return torch.nn.functional.one_hot(torch.full(batch["tokens"].shape, 3), 31).float()

    def sum_over_ranks(self, values):
        return values


def test_tokens_behind_a_prompt_see_what_its_last_one_sees(tmp_path, build, tokenizer_path, picture):
    table = {
        "name": "image_text",
        "path": str(tmp_path),
        "tokenizer": {"name": "tokenizer_file", "path": str(tokenizer_path)},
        "processor": {"name": "square", "size": 8},
        "token_grid": [1, 2],
        "packing": True,
    }
    config = build.resolve("data_source", table).config
    reader = PromptReader(config, build(config.tokenizer, base=Path()), build(config.processor))
    one, two = (PictureFile(tmp_path / picture(f"{number}.png", number), str(number)) for number in range(2))
    prompts = [reader("a <image>", [one], "first"), reader("<image> <image> what", [one, two], "second")]
    model = Recording()

    said = say(model, reader, prompts, max_new_tokens=2)

    assert said == ["a a", "a a"]
    last = model.given[-1]
    assert "document" not in last
    for row, (length, tiles) in enumerate(((3, 1), (5, 2))):
        assert (last["image_range"][row, length - 1 :, 2] == tiles).all()
        assert (last["image_slots"][row, length:] == -1).all()
        assert last["tokens"][row, length].item() == 3
    assert last["pixels"].shape[:2] == (2, 2)
    assert not last["pixels"][0, 1].any()
