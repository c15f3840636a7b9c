"""Questions as the samples of a source have them, and the same with other images."""

from __future__ import annotations

import numpy as np
import pytest

from forge_core.contracts.batch import Entry
from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.entries import ENTRIES
from forge_plugins_vlm.evaluation import image_answers
from forge_plugins_vlm.evaluation.config import ImageAnswersConfig
from forge_plugins_vlm.evaluation.image_answers import ImageAnswers
from forge_plugins_vlm.evaluation.pictures import WithImages
from forge_plugins_vlm.evaluation.questions import Questions

END = 9


class Source:
    """Four samples of an image and two or three tokens of a prompt; the first two ask the same of the same image."""

    tokenizer, vocab_size, fingerprint, forbidden = None, 10, "four", [7]
    prompts = ([7, 1], [7, 1], [7, 2], [7, 1, 2])
    answers = ([3], [4, 5], [3], [6])
    pictures = (10, 10, 20, 30)

    def __len__(self) -> int:
        return 4

    def entries(self) -> dict[str, Entry]:
        return {name: ENTRIES[name] for name in ("pixels", "image_slots", "image_range")}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        size = (len(indices), 6)
        batch = {"tokens": np.full(size, END), "targets": np.full(size, -100), "image_slots": np.full(size, -1)}
        batch["image_range"] = np.zeros((*size, 3), np.int64)
        batch["pixels"] = np.zeros((len(indices), 2, 3, 1, 1), np.uint8)
        for row, index in enumerate(indices.tolist()):
            prompt, answer = self.prompts[index], [*self.answers[index], END]
            whole = [*prompt, *answer]
            batch["tokens"][row, : len(whole) - 1] = whole[:-1]
            batch["targets"][row, len(prompt) - 1 : len(whole) - 1] = answer
            batch["image_slots"][row, 0] = 0
            batch["image_range"][row, : len(whole) - 1] = (0, 0, 1)
            batch["pixels"][row, 0] = self.pictures[index]
        return batch


def test_a_question_is_the_sample_up_to_its_first_answer():
    found = Questions(Source(), 0, END).questions

    assert [one.prompt for one in found] == [[*prompt] for prompt in Source.prompts]
    assert [one.answer for one in found] == [[*answer] for answer in Source.answers]


def test_the_answers_of_equal_questions_are_references_of_each():
    questions = Questions(Source(), 0, END)

    assert questions.references(["a", "b", "c", "d"]) == [["a", "b"], ["b", "a"], ["c"], ["d"]]


def test_text_that_is_generated_sees_what_the_prompt_has_seen():
    given = Questions(Source(), 0, END).inputs(Source(), [2, 3], 8)

    assert given["image_slots"].tolist() == [[0] + [-1] * 7] * 2
    assert (given["image_range"] == (0, 0, 1)).all()
    assert given["image_range"].shape == (2, 8, 3)
    assert given["pixels"][:, 0, 0, 0, 0].tolist() == [20, 30]


def test_samples_have_the_images_of_others_or_blank_ones():
    def seen(images, samples=0):
        return WithImages(Source(), images, samples).read(np.arange(4))["pixels"][:, :, 0, 0, 0].tolist()

    assert seen("real") == [[10, 0], [10, 0], [20, 0], [30, 0]]
    assert seen("shuffled") == [[20, 20], [30, 30], [10, 10], [10, 10]]  # the blank tile of a row is never taken
    assert seen("shuffled", 2)[:2] == [[10, 10], [10, 10]]
    assert seen("blank") == [[0, 0]] * 4


def test_answers_never_have_what_the_source_forbids(monkeypatch):
    class Tokenizer:
        end_of_document = END

        def decode(self, tokens):
            return " ".join(map(str, tokens))

    class Context:
        def looks_ahead(self):
            return False

    asked = {}
    monkeypatch.setattr(
        image_answers, "generate_in_layout", lambda *_, **given: asked.update(given) or [[3], [4, 5], [3], [6]]
    )
    one = ImageAnswers(
        ImageAnswersConfig(max_new_tokens=2), open_data=lambda *_: Source(), tokenizer=Tokenizer(), seq_len=6
    )

    assert one.run(Context()) == {"exact_match": 1.0}
    assert asked["forbidden"] == [7]


def test_packed_samples_are_no_questions():
    class Packed(Source):
        def read(self, indices):
            batch = super().read(indices)
            return {**batch, "document": np.zeros_like(batch["tokens"])}

    with pytest.raises(ConfigError, match="set packing = false"):
        Questions(Packed(), 0, END)
