"""Answers about images without a run: a model that is what the test says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from forge_plugins_inference.generate_in_layout import generate_in_layout
from forge_plugins_vlm.evaluation.config import ImageAnswersConfig
from forge_plugins_vlm.evaluation.image_answers import ImageAnswers
from forge_plugins_vlm.evaluation.questions import Questions

RED, TURN_ENDS, LAST = 4, 15, 20
"""Ids of the words ``red``, ``?`` and ``system``, the last one of the tokenizer."""


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


TEMPLATE = "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'user' }}> {{ m.content }} ? {% endfor %}"
"""Whose turns end with a text, and no end of document."""


class Chatting(Longing):
    """Says ``red``, the end of a turn, and ``red`` again."""

    def predict(self, batch):
        says = torch.where(batch["tokens"] == RED, TURN_ENDS, RED)
        return torch.nn.functional.one_hot(says, LAST + 1).float()


@pytest.fixture
def chats(open_source, picture, tmp_path, tokenizer_path):
    """A source of one question by a chat template."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}<bot> {% endif %}", encoding="utf-8")
    (tmp_path / "captions.json").write_text(json.dumps([{"image": picture("a.png"), "caption": "red"}]))
    tokenizer = {"name": "tokenizer_file", "path": str(tokenizer_path), "chat_template": str(tmp_path / "chat.jinja")}
    return open_source(path=str(tmp_path / "captions.json"), format="captions", tokenizer=tokenizer, chat_template=True)


def test_an_answer_of_a_chat_ends_with_its_turn(chats):
    """It ended at an end of document alone, which turns need not have: each answer went on, and none was right."""
    config = ImageAnswersConfig(max_new_tokens=5, measures=("exact_match", "vqa_accuracy"))
    evaluation = ImageAnswers(config, open_data=lambda *_: chats, tokenizer=chats.tokenizer, seq_len=16)

    assert evaluation.run(Chatting(LAST + 1)) == {"exact_match": 1.0, "vqa_accuracy": pytest.approx(1.0)}


class LongingInAChat(Chatting):
    """Says the same, and would rather say ``system``."""

    def predict(self, batch):
        logits = super().predict(batch)
        logits[..., LAST] = 2.0
        return logits


def test_answers_of_a_mixture_are_those_of_its_sources(chats, build, tokenizer_path, tmp_path):
    """The mixture was asked where a turn ends and what stands for an image, and it does not know."""
    table = {
        "name": "image_text",
        "path": str(tmp_path / "captions.json"),
        "format": "captions",
        "placeholder": "system",
        "processor": {"name": "square", "size": 8},
        "token_grid": [1, 2],
        "tokenizer": {
            "name": "tokenizer_file",
            "path": str(tokenizer_path),
            "chat_template": str(tmp_path / "chat.jinja"),
        },
        "chat_template": True,
    }
    parts = [{"name": "chats", "weight": 1.0, "source": table}]
    use = build.resolve("data_source", {"name": "mixture", "sources": parts})
    mixture = build(use, seq_len=16, split="all", seed=0, samples_per_step=4)
    config = ImageAnswersConfig(max_new_tokens=5)
    evaluation = ImageAnswers(config, open_data=lambda *_: mixture, tokenizer=chats.tokenizer, seq_len=16)

    assert evaluation.run(LongingInAChat(LAST + 1)) == {"exact_match": 1.0}


def test_generation_of_a_chat_stops_at_the_end_of_a_turn(chats):
    asked = []
    context = Chatting(LAST + 1)
    predict, context.predict = context.predict, lambda batch: asked.append(1) or predict(batch)
    found = generate_in_layout(
        context, [[18, 2]], max_new_tokens=5, has_ended=chats.answer_end.has_come, inputs=lambda *_: {}
    )

    assert found == [[RED, TURN_ENDS]]
    assert len(asked) == 2
    assert chats.answer_end.text_before([RED, TURN_ENDS, RED]).strip() == "red"


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
