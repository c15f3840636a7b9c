"""Answers about images without a run: a model that is what the test says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from forge_plugins_vlm.evaluation.config import ImageAnswersConfig
from forge_plugins_vlm.evaluation.image_answers import ImageAnswers
from forge_plugins_vlm.evaluation.questions import Questions

RED, LAST = 4, 20
"""Ids of the words ``red`` and ``system``, the last one of the tokenizer."""


class Longing:
    """An evaluation's context, whose model would best say ``system``, and else ``red``, of a head of ``size`` rows."""

    job = SimpleNamespace(train=SimpleNamespace(seq_len=16), parallel=SimpleNamespace(cp=1, tp=1))

    def __init__(self, size):
        self._size = size

    def looks_ahead(self):
        return False

    def batches(self, source):
        batch = source.read(torch.arange(len(source)).numpy())
        yield {name: torch.from_numpy(one) for name, one in batch.items()}

    def predict(self, batch):
        logits = torch.zeros(*batch["tokens"].shape, self._size)
        logits[..., RED] = 1.0
        if self._size > LAST:
            logits[..., LAST] = 2.0
        return logits

    def sum_over_ranks(self, numbers):
        return numbers


@pytest.fixture
def evaluation(open_source, picture, tmp_path):
    (tmp_path / "captions.json").write_text(json.dumps([{"image": picture("a.png"), "caption": "red"}]))
    source = open_source(path=str(tmp_path / "captions.json"), format="captions", placeholder="system")
    config = ImageAnswersConfig(max_new_tokens=1)
    return ImageAnswers(config, open_data=lambda *_: source, tokenizer=source.tokenizer, seq_len=16)


@pytest.mark.parametrize("lacking", [0, 1])
def test_no_answer_has_the_token_of_an_image_whether_the_head_has_it_or_not(evaluation, lacking):
    assert evaluation.run(Longing(LAST + 1 - lacking)) == {"exact_match": 1.0}


def test_a_question_whose_image_cannot_be_read_does_not_count(open_source, picture, tmp_path):
    said = [{"image": picture(f"{one}.png", one), "caption": "red"} for one in range(3)]
    (tmp_path / "captions.json").write_text(json.dumps(said))
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    source = open_source(path=str(tmp_path / "captions.json"), format="captions", on_error="skip")

    questions = Questions(source, 0, source.tokenizer.end_of_document)

    assert [one.answer for one in questions.questions] == [[RED], [RED]]
    given = questions.inputs(source, [0, 1], 16)["pixels"]
    expected = [np.asarray(Image.open(tmp_path / f"{one}.png")).transpose(2, 0, 1) for one in (1, 2)]
    assert np.array_equal(given[:, 0], np.stack(expected))
