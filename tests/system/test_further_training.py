"""A model goes to Hugging Face and back, is trained further on conversations through a kill, and given away again."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import open_checkpoint
from forge_core.registry.discovery import discover
from forge_plugins_weights.loading import load_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = b"def read(path):\n"


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    """Types commands in a folder with the repository's configurations; gives back what they printed."""
    folder = tmp_path_factory.mktemp("further")
    shutil.copytree(ROOT / "configs", folder / "configs")

    def run(*words, program=("-m", "forge_core")):
        done = fork_server.run(
            [sys.executable, *program, *words], cwd=folder, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = folder
    return run


def logits_of_run(folder, name):
    checkpoint = open_checkpoint(folder / "runs" / name / "checkpoints/latest")
    model = load_model(checkpoint, discover, torch.device("cpu"), torch.float32).model.eval()
    with torch.no_grad():
        return model(torch.tensor([list(PROMPT)]))


def logits_of_transformers(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(torch.tensor([list(PROMPT)])).logits


def kill_after(forge, n_lines, *words):
    """Start a run, and kill all its ranks once its metrics have so many lines."""
    process = subprocess.Popen([sys.executable, "-m", "forge_core", *words], cwd=forge.folder)
    file = forge.folder / "runs/finetune_demo/metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < n_lines:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()


def bits_of(forge, run):
    tasks = ["--tasks", "docstring_text", "--include-path", "configs/chat/tasks", "--limit", "40"]
    values = json.loads(forge("eval", f"runs/{run}", "--evaluation", "lm_eval", *tasks, "--json"))
    (bits,) = (value for name, value in values.items() if "bits_per_byte" in name)
    return bits


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_demo_is_given_away_taught_and_given_away_again(forge):
    folder = forge.folder
    forge("run", "configs/demo.toml", "train.steps=120", "train.batch_size=8")
    forge("convert", "runs/demo", "--to", "huggingface", "--out", "demo-hf")
    given = logits_of_transformers(folder / "demo-hf")
    assert torch.allclose(given, logits_of_run(folder, "demo"), atol=1e-4)

    forge("chats.jsonl", "questions.jsonl", program=("configs/chat/docstring_chats.py",))
    further = ["run", "configs/finetune_demo.toml", "train.steps=80", "train.batch_size=4", "checkpoint.interval=20"]
    further += ["metrics.interval=10", "--nproc", "2"]
    kill_after(forge, 5, *further)
    forge(*further)

    events = [json.loads(line) for line in (folder / "runs/finetune_demo/events.jsonl").read_text().splitlines()]
    starts = [event["step"] for event in events if event["event"] in ("started", "resumed")]
    assert starts[0] == 0
    assert starts[-1] >= 20
    before, after = bits_of(forge, "demo"), bits_of(forge, "finetune_demo")
    assert after < 0.9 * before

    forge("convert", "runs/finetune_demo", "--to", "huggingface", "--out", "tuned-hf")
    taught = logits_of_transformers(folder / "tuned-hf")
    assert torch.allclose(taught, logits_of_run(folder, "finetune_demo"), atol=1e-4)
    assert not torch.allclose(taught, given, atol=0.1)
    assert forge("generate", "runs/finetune_demo", "--prompt", "<|user|>", "--max-new-tokens", "8")
