"""``forge run`` and the commands that open its runs do on a GPU what they do on a CPU: by the stand-in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import fork_server
from forge_plugins_interp.store import Store

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB = """
[run]
name = "whole"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 32
[data]
name = "text_files"
path = "text"
pattern = "*.txt"
tokenizer = "bytes"
validation = 0.2
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[metrics]
interval = 1
[eval]
interval = 4
[checkpoint]
interval = 2
"""
IMAGES = """
[run]
name = "images"
[model]
name = "vision_language"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 32
encoder = { name = "conv_vit" }
connector = { name = "mlp" }
fusion = { name = "joint_decoder" }
[data]
name = "image_text"
path = "shapes/train.json"
format = "llava"
token_grid = [4, 4]
max_images = 1
validation = 0.2
processor = { name = "square", size = 32 }
tokenizer = { name = "tokenizer_file", path = "shapes/tokenizer.json" }
[train]
steps = 2
seq_len = 24
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[[evaluations]]
name = "image_dependence"
max_new_tokens = 3
"""
PAIRS = """
[data]
name = "preference_pairs"
path = "pairs.jsonl"
reference = "reference.npz"
[train]
seq_len = 32
precision = "fp32"
"""
TRAINED = (
    ["vlm", "shapes", "--out", "shapes", "--train", "16", "--held-out", "4"],
    ["run", "images.toml"],
    ["run", "job.toml"],
    ["run", "job.toml", "run.name=parts", "train.steps=2"],
    ["run", "job.toml", "run.name=parts"],
)
RUN, PROMPT = "runs/whole", ["--prompt", "line 5"]
PATCHED = ["--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b"]
SITE, COMPONENTS = ["--sites", "blocks.1.resid_post"], ["--directions", "principal", "--fit-samples", "4"]
IMAGE = "shapes/images/held_out/00000.png"
QUESTIONS = ["--evaluation", "exact_match", "--path", "questions.jsonl", "--max-new-tokens", "4", "--stop", ""]
ROWS = {  # by the file of the code
    "generate_in_layout.py": ["eval", RUN, *QUESTIONS, "--json"],
    "reference_evaluation.py": ["eval", RUN, "--evaluation", "preference_reference", "--job", "pairs.toml", "--json"],
}
"""Evaluations that do something for each row of a batch."""
COMMANDS = {
    "eval": ["eval", RUN, "--json"],
    "generate": ["generate", RUN, *PROMPT, "--temperature", "0", "--max-new-tokens", "4", "--json"],
    "attention": ["attention", RUN, *PROMPT, "--json"],
    "lens": ["lens", RUN, *PROMPT, "--json"],
    "lens attributes": ["lens", RUN, *PROMPT, "--attribute", "e", "--minus", "x", "--heads", "--json"],
    "attributions": ["patch", RUN, *PATCHED, "--method", "attribution", "--json"],
    "paths": ["patch", RUN, *PATCHED, "--from", "blocks.0.mlp_out", "--to", "blocks.1.resid_post", "--json"],
    "accuracy": ["eval", RUN, "--evaluation", "accuracy", "--json"],
    "extract": ["extract", RUN, "--sites", "blocks.*.resid_post", "--samples", "6", "--out", "values-{device}"],
    "extract components": ["extract", RUN, *SITE, "--features", "3", *COMPONENTS, "--out", "components-{device}"],
    "compare": ["compare", "values-cpu", "values-{device}", "--metric", "procrustes", "--json"],
    "images": ["eval", "runs/images", "--json"],
    "generate of images": ["vlm", "generate", "runs/images", "--image", IMAGE, "--max-new-tokens", "3", "--json"],
    "patch": ["patch", RUN, *PATCHED, "--json"],
}


@pytest.fixture(scope="module")
def answers(stand_in, tmp_path_factory):
    """Of each command, on the GPU and on the CPU; of the trainings, their folder."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text("".join(f"line {number * n} of text\n" for n in range(20)))
    (folder / "job.toml").write_text(JOB)
    (folder / "images.toml").write_text(IMAGES)
    (folder / "pairs.toml").write_text(PAIRS)
    pairs = [{"prompt": f"line {n} of ", "chosen": "text", "rejected": "words"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    questions = [{"prompt": f"line {n}", "answer": " of"} for n in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))

    by_rows = [[*command, f"train.batch_size={rows}"] for command in ROWS.values() for rows in (1, 4)]
    trained = _type(TRAINED, folder, {**os.environ, **stand_in})
    assert [answer["code"] for answer in trained] == [0] * len(TRAINED), trained[0]["error"]
    assert all("on cuda" in answer["said"] for answer in trained[1:])
    on_cpu = _type([*_on("cpu"), *by_rows], folder, dict(os.environ))
    on_gpu = _type([*_on("cuda"), *by_rows], folder, {**os.environ, **stand_in})
    names = [*COMMANDS, *((file, rows) for file in ROWS for rows in (1, 4))]
    return folder, dict(zip(names, zip(on_gpu, on_cpu, strict=True), strict=True))


def _on(device):
    return [[argument.replace("{device}", device) for argument in command] for command in COMMANDS.values()]


def _type(commands, folder, environment):
    file = folder / "commands.json"
    file.write_text(json.dumps(commands))
    ended = fork_server.run(
        [sys.executable, str(HERE / "commands.py"), str(file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [{**json.loads(line), "error": ended.stderr[-4000:]} for line in ended.stdout.splitlines()]


def test_a_run_that_is_resumed_goes_on_bit_for_bit(answers):
    folder, _ = answers
    whole, parts = (
        [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    losses = [{line["step"]: line["loss"] for line in lines if "loss" in line} for lines in (whole, parts)]

    assert losses[1] == losses[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_says_on_a_cpu(answers, command):
    on_gpu, on_cpu = answers[1][command]

    assert on_gpu["code"] == on_cpu["code"] == 0, on_gpu["error"]
    if "--json" in COMMANDS[command]:
        _assert_equal(on_gpu, on_cpu)


def test_a_store_has_the_values_that_it_has_on_a_cpu(answers):
    folder, _ = answers
    for name, sign in (("values", lambda values: values), ("components", abs)):  # of a component it is by chance
        stores = [Store(folder / f"{name}-{device}") for device in ("cpu", "cuda")]
        for site in stores[0].sites:
            on_cpu, on_gpu = (sign(store.array(site)) for store in stores)
            np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("file", ROWS)
def test_an_evaluation_waits_for_the_gpu_by_batches_and_not_by_rows(answers, file):
    waits = {}
    for rows in (1, 4):
        on_gpu, on_cpu = answers[1][file, rows]
        assert on_gpu["code"] == on_cpu["code"] == 0, on_gpu["error"]
        _assert_equal(on_gpu, on_cpu)
        waits[rows] = sum(count for place, count in on_gpu["waits"].items() if f" in {file}:" in place)

    assert 0 < waits[4] <= waits[1] / 3


def _assert_equal(on_gpu, on_cpu):
    for said, expected in zip(_values(on_gpu), _values(on_cpu), strict=True):
        assert said == (pytest.approx(expected, rel=1e-3, abs=1e-5) if isinstance(expected, float) else expected)


def _values(answer):
    """All that the JSON says, in its order: one document, or one a line."""
    left, text = [], answer["said"].strip()
    while text:
        document, end = json.JSONDecoder().raw_decode(text)
        left.append(document)
        text = text[end:].strip()
    assert left
    while left:
        first = left.pop(0)
        if isinstance(first, dict):
            left = [*first.keys(), *first.values(), *left]
        elif isinstance(first, list):
            left = [*first, *left]
        else:
            yield first
