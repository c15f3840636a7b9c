"""Multiple choice about images: log-likelihoods against those of whole sequences, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from small_vlm import WORDS

from forge_core.errors import ConfigError
from parity_matrix.cells import TRAININGS
from parity_matrix.launch import Launcher, Work

CHOICES = ["red", "blue circle", "left left right"]


@pytest.fixture
def lines(tmp_path):
    """Writes lines of questions, and gives the file."""

    def lines(*records):
        path = tmp_path / "choices.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        return str(path)

    return lines


@pytest.fixture
def asked(picture):
    first, second = (picture(name, seed, (16, 16)) for seed, name in enumerate(("one.png", "two.png")))
    return [
        {"image": first, "prompt": "<image> what is it ?", "choices": CHOICES, "answer": 1},
        {"image": [first, second], "prompt": "<image> <image> is it", "choices": ["no", "yes it is"], "answer": 0},
        {"prompt": "what is", "choices": ["green square", "it"], "answer": 1},
    ]


class Alone:
    """A context of one process."""

    def __init__(self, model, job):
        self.model, self.job, self.lines = model, job, []
        self.log = self.lines.append

    def looks_ahead(self):
        return False

    def batches(self, source, *, samples=0):
        for start in range(0, len(source), 3):
            numbers = torch.arange(start, start + 3).clamp(max=len(source) - 1).numpy()
            batch = {name: torch.from_numpy(entry) for name, entry in source.read(numbers).items()}
            batch["targets"][len(source) - start :] = -100
            yield batch

    def predict(self, batch):
        return self.model(batch.pop("tokens"), **batch)

    def sum_over_ranks(self, values):
        return {name: float(value) for name, value in values.items()}


@pytest.fixture
def make(build, tokenizer_path):
    """Builds the evaluation of a file."""

    def make(path, *, seq_len=32, **keys):
        table = {"name": "image_choices", "path": path, "processor": {"name": "square", "size": 16}, **keys}
        tokenizer = build(
            build.resolve("tokenizer", {"name": "tokenizer_file", "path": str(tokenizer_path)}), base=Path()
        )
        use = build.resolve("evaluation", {"token_grid": [2, 2], **table})
        return build(use, open_data=None, tokenizer=tokenizer, seq_len=seq_len, build=build)

    return make


def likelihood(model, folder, record, choice):
    """Of a choice, by one forward without padding."""
    names = record.get("image", [])
    names = names if isinstance(names, list) else [names]
    ids, slots, bounds, seen = [], [], [], 0
    latest = (0, 0, 0)
    for word in f"{record['prompt']} {choice}".split():
        here = range(4 * seen, 4 * seen + 4) if word == "<image>" else [-1]
        if word == "<image>":
            adjacent = bool(slots) and slots[-1] >= 0
            latest = (0, latest[1] if adjacent else seen, seen + 1)
            seen += 1
        ids += [WORDS.index(word)] * len(here)
        slots += here
        bounds += [latest] * len(here)
    pixels = [np.asarray(Image.open(folder / name)).transpose(2, 0, 1) for name in names]
    pixels = np.stack(pixels) if pixels else np.zeros((1, 3, 16, 16), np.uint8)
    entries = {"image_slots": [slots], "image_range": [bounds], "pixels": pixels[None]}
    logits = model(torch.tensor([ids]), **{name: torch.tensor(np.array(one)) for name, one in entries.items()})[0]
    own = len(choice.split())
    logits = logits[-own - 1 : -1].double().log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(ids[-own:])[:, None]).sum())


@torch.no_grad()
def test_the_choices_are_scored_as_whole_sequences_are(make_model, make, lines, asked, tmp_path):
    model = make_model().eval()
    context = Alone(model, SimpleNamespace(parallel=SimpleNamespace(cp=2, tp=2)))

    found = make(lines(*asked)).run(context)

    hits = normalised = right = 0.0
    for record in asked:
        sums = [likelihood(model, tmp_path, record, choice) for choice in record["choices"]]
        means = [one / len(choice.split()) for one, choice in zip(sums, record["choices"], strict=True)]
        hits += sums.index(max(sums)) == record["answer"]
        normalised += means.index(max(means)) == record["answer"]
        right += sums[record["answer"]]
    assert found == pytest.approx(
        {"accuracy": hits / 3, "normalised": normalised / 3, "log_likelihood": right / 3}, rel=1e-5
    )
    assert right / 3 < -math.log(31) / 2


@torch.no_grad()
def test_a_long_choice_loses_by_its_sum_and_may_win_by_its_mean(make_model, make, lines):
    class Fixed:
        """Likes one token at each place."""

        def __call__(self, tokens, **_):
            logits = torch.zeros(*tokens.shape, len(WORDS))
            logits[..., WORDS.index("circle")] = 2.0
            logits[..., WORDS.index("red")] = 1.0
            return logits

    questions = lines({"prompt": "what is", "choices": ["red", "circle circle"], "answer": 1})

    found = make(questions).run(Alone(Fixed(), SimpleNamespace(parallel=SimpleNamespace(cp=1, tp=1))))

    each = 2 - math.log(math.e**2 + math.e + len(WORDS) - 2)
    assert found == pytest.approx({"accuracy": 0, "normalised": 1, "log_likelihood": 2 * each})


def test_nothing_is_measured_of_a_model_that_looks_ahead(make, lines, asked):
    context = Alone(None, None)
    context.looks_ahead = lambda: True

    assert make(lines(*asked)).run(context) == {}
    assert "looks ahead" in context.lines[0]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prompt": None}, "'prompt' must be text, it is null"),
        ({"choices": "red"}, "'choices' must be an array"),
        ({"choices": ["red"]}, "'choices' must be two or more"),
        ({"choices": ["red", "red"]}, "'choices' must be different ones"),
        ({"choices": ["red", 2]}, "choice 1 must be text, it is 2"),
        ({"choices": ["red", "<image>"]}, "choice 1 has the placeholder '<image>'; remove it"),
        ({"choices": ["red", ""]}, "has nothing to learn"),
        ({"answer": 3}, "'answer' must be the place of the right choice, 0 to 2, it is 3"),
        ({"answer": True}, "'answer' must be the place of the right choice, 0 to 2, it is true"),
        ({"answer": "red"}, "'answer' must be the place of the right choice, 0 to 2, it is \"red\""),
        ({"prompt": "what"}, "has 0 placeholders '<image>' and 1 images"),
        ({"image": 3}, "an image must be the name of a file, it is 3"),
        ({"image": "none.png"}, "none.png cannot be read: No such file"),
        ({"image": None, "prompt": " "}, "'prompt' is empty; a choice needs something before it"),
    ],
)
def test_a_line_that_is_no_question_is_refused(make, lines, asked, changed, sentence):
    path = lines(asked[2], {**asked[0], **changed})

    with pytest.raises(ConfigError) as caught:
        make(path)
    assert sentence in str(caught.value)
    assert "line 2" in str(caught.value)


def test_a_picture_that_breaks_off_is_found_before_it_is_asked_about(make, lines, asked, picture, tmp_path):
    content = (tmp_path / picture("whole.jpg", 0, (40, 40))).read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])

    with pytest.raises(ConfigError, match=r"line 2: the image .*half.jpg cannot be read: image file is truncated"):
        make(lines(asked[0], {**asked[0], "image": "half.jpg"}))


def test_a_file_without_questions_and_a_question_that_is_too_long_are_refused(make, lines, asked):
    with pytest.raises(ConfigError, match="has no questions"):
        make(lines())
    with pytest.raises(ConfigError, match="is no file; it must be JSON Lines"):
        make("nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"has 13 tokens, and train.seq_len \+ 1 is 11; shorten"):
        make(lines(*asked), seq_len=10)
    assert make(lines(*asked), seq_len=10, samples=1)


LAYOUTS = {
    "fsdp2": (2, ["train.batch_size=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2": (2, ["parallel.pp=2", "train.batch_size=1", "train.grad_accumulation=4"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", ["joint", pytest.param("crossed", marks=pytest.mark.nightly)])
def test_choices_are_scored_the_same_in_every_layout(tmp_path_factory, tmp_path, training):
    launcher = Launcher(tmp_path_factory.mktemp("choices"))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
    records = [
        {"image": f"{number}.png", "prompt": "<image>a", "choices": ["b", "cd", "e f g"][: 2 + number % 2], "answer": 0}
        for number in range(3)
    ]
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    one_token = str(training == "crossed").lower()
    evaluation = (
        f'evaluations=[{{name="image_choices", path="{path}", processor={{name="square", size=16}}, '
        f'token_grid=[2, 2], one_token_an_image={one_token}, separator=""}}]'
    )
    shared = [*TRAININGS[training], evaluation, "train.steps=3", "eval.interval=0"]
    works = [Work(f"{training}-one", 1, shared)]
    works += [Work(f"{training}-{name}", ranks, [*shared, *keys]) for name, (ranks, keys) in LAYOUTS.items()]

    launcher.launch(works)

    def measured(name):
        lines = launcher.metrics(f"{training}-{name}")
        return {key: value for line in lines for key, value in line.items() if "image_choices" in key}

    expected = measured("one")
    assert len(expected) == 3
    for name in LAYOUTS:
        assert measured(name) == pytest.approx(expected, rel=1e-5, abs=1e-9), name
