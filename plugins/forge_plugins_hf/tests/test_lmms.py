"""The evaluation ``lmms_eval``, with tasks of one's own; where the harness is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("lmms_eval", reason="pip install 'forge-plugins-hf[lmms_eval]'")

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.build import build_on_meta, materialise
from forge_plugins_vlm.config import image_sources
from forge_plugins_vlm.data.prompts import PromptReader
from forge_plugins_vlm.data.references import PictureFile
from forge_plugins_vlm.images.square import Square
from forge_plugins_vlm.sampling import entries_of_prompts

JOB = """
[run]
name = "shapes"
dir = "{folder}/runs"
[model]
name = "vision_language"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 48
init_std = 0.125
[model.encoder]
name = "conv_vit"
dim = 32
n_layers = 1
n_heads = 2
[data]
name = "image_text"
path = "{folder}/shapes/train.json"
format = "llava"
token_grid = [4, 4]
processor = {{name = "square", size = 32}}
tokenizer = {{name = "tokenizer_file", path = "{folder}/shapes/tokenizer.json"}}
[train]
steps = 60
seq_len = 24
batch_size = 16
precision = "fp32"
[optimizer]
name = "adamw"
lr = 5e-3
[scheduler]
name = "constant"
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
output_type: {kind}
doc_to_visual: !function pictures.visual
doc_to_text: ""
doc_to_target: {target}
{more}
"""
ANSWERS = """
generation_kwargs:
  max_new_tokens: {most}
  temperature: {temperature}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOICES = """
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
TARGETS = """
def target(doc):
    return doc["answer"]

def results(doc, found):
    return {"loss": found[0][0]}
"""
PERPLEXITY = """
process_results: !function targets.results
metric_list:
  - metric: loss
    aggregation: mean
    higher_is_better: false
"""
N = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on drawn shapes, and tasks about held-out ones."""
    folder = tmp_path_factory.mktemp("lmms")
    assert main(["vlm", "shapes", "--out", str(folder / "shapes"), "--train", "64", "--held-out", str(N)]) == 0
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    assert main(["run", str(folder / "job.toml")]) == 0
    held_out = json.loads((folder / "shapes/held_out.json").read_text())
    lines = []
    for number, record in enumerate(held_out):
        answer, other = (record_of["conversations"][-1]["value"] for record_of in (record, held_out[number - 1]))
        choices = [answer, other] if number % 2 == 0 else [other, answer]
        row = {"picture": str(folder / "shapes" / record["image"]), "answer": answer, "choices": choices}
        lines.append(json.dumps({**row, "right": number % 2}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))
    (folder / "pictures.py").write_text(
        "from PIL import Image\n\n\ndef visual(doc):\n    return [Image.open(doc['picture']).convert('RGB')]\n"
    )
    write(folder, "captions", "generate_until", "answer", ANSWERS.format(most=8, temperature=0))
    write(folder, "choices", "multiple_choice", "right", CHOICES)
    return folder


def write(folder, name, kind, target, more):
    text = TASK.format(name=name, folder=folder, kind=kind, target=target, more=more)
    (folder / f"{name}.yaml").write_text(text)


def evaluated(folder, capsys, *tasks, keys=()):
    capsys.readouterr()
    asked = ["--evaluation", "lmms_eval", "--tasks", ",".join(tasks), "--include-path", str(folder)]
    code = main(["eval", str(folder / "runs" / "shapes"), *asked, *keys, "--json"])
    said = capsys.readouterr()
    return code, said


def test_answers_are_those_of_forge_vlm_generate(folder, capsys):
    code, said = evaluated(folder, capsys, "captions")
    assert code == 0, said.err
    found = json.loads(said.out[said.out.index("{") :])

    right = 0
    for line in (folder / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert main(["vlm", "generate", str(folder / "runs" / "shapes"), "--image", row["picture"]]) == 0
        right += capsys.readouterr().out.strip() == row["answer"]
    assert found["eval/lmms_eval/captions/exact_match"] == pytest.approx(right / N)


def test_choices_are_the_likeliest_by_token(folder, capsys):
    code, said = evaluated(folder, capsys, "choices")
    assert code == 0, said.err
    found = json.loads(said.out[said.out.index("{") :])

    assert found["eval/lmms_eval/choices/acc"] == pytest.approx(by_hand(folder))


@pytest.fixture
def counted(monkeypatch):
    """How often pictures were opened and preprocessed."""
    counts = {"opened": 0, "preprocessed": 0}

    def count(owner, name, what):
        whole = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[what] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(Image, "open", "opened")
    count(Square, "__call__", "preprocessed")
    return counts


@pytest.mark.parametrize(("task", "times"), [("captions", 2), ("choices", 2), ("given", 3)])
def test_each_image_is_decoded_and_preprocessed_once(folder, capsys, counted, monkeypatch, task, times):
    if task == "given":
        (folder / "targets.py").write_text(TARGETS)
        write(folder, "given", "loglikelihood", "!function targets.target", PERPLEXITY)
    code, said = evaluated(folder, capsys, task)
    assert code == 0, said.err
    once = said.out[said.out.index("{") :]
    assert counted == {"opened": N, "preprocessed": N}

    monkeypatch.setattr("forge_plugins_hf.lmms_pictures.MOST_KEPT", 0)
    counted.update(opened=0, preprocessed=0)
    code, said = evaluated(folder, capsys, task)
    assert code == 0, said.err
    assert said.out[said.out.index("{") :] == once
    assert counted == {"opened": times * N, "preprocessed": times * N}


def by_hand(folder):
    """The part of the questions whose answer is likelier by token than the other, by the saved model alone."""
    found = open_model(folder / "runs" / "shapes")
    right = 0
    for line in (folder / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses = [found(row["picture"], choice) for choice in row["choices"]]
        right += losses.index(min(losses)) == row["right"]
    return right / N


def open_model(run):
    """Gives the loss of a text behind a picture, nats a token."""
    checkpoint = open_checkpoint(run / "checkpoints/step_00000060")
    job = load_job(run / "job.toml", catalog=discover)
    (source,) = (one for _, one in image_sources(job.data.config, "data"))
    build = ComponentBuilder(discover())
    tokenizer = build(source.tokenizer, base=Path())
    reader = PromptReader(source, tokenizer, build(source.processor))
    model = build_on_meta(job, tokenizer.vocab_size, build)
    materialise(model, torch.device("cpu"), 0)
    own = model.state_dict()
    saved = {name: checkpoint.read(f"model.{name}") for name in own if f"model.{name}" in checkpoint.saved_tensors()}
    model.load_state_dict({**own, **saved})
    model.eval()

    @torch.no_grad()
    def loss(picture, text):
        prompt = reader(reader.usual_text(1), [PictureFile(Path(picture), picture)], "here")
        ids = tokenizer.encode(text).tolist()
        width = len(prompt.tokens) + len(ids)
        entries = {
            name: torch.from_numpy(one) for name, one in entries_of_prompts(reader, [prompt], [0], width).items()
        }
        tokens = torch.tensor([[*prompt.tokens, *ids]])
        logits = model(tokens, **entries)[0, len(prompt.tokens) - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids)).item()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tp=2",), ("parallel.pp=2",)], ids=["fsdp2", "tp2", "pp2"])
def test_every_layout_gives_the_same(folder, capfd, layout):
    _, alone = evaluated(folder, capfd, "captions", "choices")
    code, together = evaluated(folder, capfd, "captions", "choices", keys=["--nproc", "2", *layout])
    assert code == 0, together.err

    one, two = (json.loads(said.out[said.out.index("{") :]) for said in (alone, together))
    assert len(one) >= 2
    assert two == pytest.approx(one)


@pytest.mark.parametrize(
    ("task", "kind", "more", "sentence"),
    [
        ("sampled", "generate_until", ANSWERS.format(most=8, temperature=0.7), "samples its answers"),
        (
            "rounds",
            "generate_until_multi_round",
            ANSWERS.format(most=8, temperature=0),
            "is generate_until_multi_round",
        ),
    ],
)
def test_what_is_not_done_is_refused(folder, capsys, task, kind, more, sentence):
    write(folder, task, kind, "answer", more)
    code, said = evaluated(folder, capsys, task)

    assert code == 2
    assert re.search(sentence, said.err)


@pytest.fixture
def asked(folder, capsys, monkeypatch):
    """Returns the prompts that a task comes to, of which each row's images and question are given by code."""

    def asked(visual, text="''", most=8, keys=()):
        prompts = []
        monkeypatch.setattr(
            "forge_plugins_hf.lmms_model.say", lambda _, __, some, **___: prompts.extend(some) or [""] * len(some)
        )
        name = f"given-{abs(hash((visual, text, most)))}"
        lines = ["from pathlib import Path", "from PIL import Image", "def visual(doc):", f"    return {visual}"]
        (folder / f"{name}.py").write_text("\n".join([*lines, "def text(doc):", f"    return {text}", ""]))
        write(folder, name, "generate_until", "answer", ANSWERS.format(most=most, temperature=0))
        task = (folder / f"{name}.yaml").read_text().replace("pictures.visual", f"{name}.visual")
        (folder / f"{name}.yaml").write_text(task.replace('doc_to_text: ""', f"doc_to_text: !function {name}.text"))
        code, said = evaluated(folder, capsys, name, keys=keys)
        return prompts, code, said.out + said.err

    return asked


def test_a_video_is_its_frames_as_in_training(folder, asked):
    film = folder / "film"
    film.mkdir()
    pictures = [json.loads(line)["picture"] for line in (folder / "questions.jsonl").read_text().splitlines()[:2]]
    for number, picture in enumerate(pictures):
        (film / f"{number}.png").write_bytes(Path(picture).read_bytes())

    of_film, code, said = asked(f"[{str(film)!r}]")
    assert code == 0, said
    of_frames, *_ = asked(f"[[Image.open(one).convert('RGB') for one in {pictures}], None]")

    assert len(of_film) == len(of_frames) == N
    assert of_film[0].tokens == of_frames[0].tokens
    assert len(of_film[0].images) == 2
    for one, other in zip(of_film[0].images, of_frames[0].images, strict=True):
        assert (one.tiles == other.tiles).all()


@pytest.mark.parametrize(
    ("visual", "sentence"),
    [
        ("['/nowhere/film.mp4']", "question 0 of .* has the video '/nowhere/film.mp4', and there is no such file"),
        ("[{'array': [0.0], 'sampling_rate': 1}]", "question 0 of .* has a dict where an image or the path of a video"),
    ],
)
def test_what_is_neither_an_image_nor_a_video_is_refused_by_its_question(asked, visual, sentence):
    prompts, code, said = asked(visual)

    assert code == 2
    assert not prompts
    assert re.search(sentence, said)


IMAGE = "[Image.open(doc['picture']).convert('RGB')]"
LONG = "' '.join(['a red circle'] * (20 if int(doc['picture'][-5]) % 2 else 1))"
"""For some rows more than the model takes."""


def test_questions_that_are_too_long_are_refused_before_the_first_is_asked(asked):
    prompts, code, said = asked(IMAGE, LONG)

    assert code == 2
    assert not prompts
    assert re.search(
        r"\d of 6 questions are too long; question \d+ of .* has \d+ tokens, and an answer 8; the model", said
    )
    assert 'Set too_long = "cut"' in said


def test_questions_that_are_too_long_lose_the_beginnings_of_their_texts_if_asked_for(asked):
    whole, *_ = asked(IMAGE, "'a red circle'")
    prompts, code, said = asked(IMAGE, LONG, keys=["--too-long", "cut"])

    assert code == 0, said
    assert re.search(r"\d of 6 questions are too long, and lose the beginnings of their texts", said)
    lengths = [len(one.tokens) for one in prompts]
    assert max(lengths) == 48 - 8
    longest = prompts[lengths.index(max(lengths))]
    assert len(longest.images) == 1
    assert longest.tokens[-3:] == whole[0].tokens[-3:]
    assert min(lengths) == len(whole[0].tokens)


def test_images_that_are_too_long_alone_are_refused(asked):
    prompts, code, said = asked(f"{IMAGE} * 3", keys=["--too-long", "cut"])

    assert code == 2
    assert not prompts
    assert "its 3 images alone are too long" in said


def test_an_unknown_task_is_refused(folder, capsys):
    code, said = evaluated(folder, capsys, "captoins")

    assert code == 2
    assert "'captoins' is no task of lmms_eval" in said.err
