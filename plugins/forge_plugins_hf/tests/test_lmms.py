"""The evaluation ``lmms_eval``, with tasks of one's own; where the harness is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

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
        "from PIL import Image\n\n\ndef visual(doc):\n    return [Image.open(doc['picture'])]\n"
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


def test_an_unknown_task_is_refused(folder, capsys):
    code, said = evaluated(folder, capsys, "captoins")

    assert code == 2
    assert "'captoins' is no task of lmms_eval" in said.err
