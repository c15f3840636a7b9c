"""A downloaded model is tuned on pairs from beginning to end, as by a loop over the model of transformers."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers

from forge_core.cli import main

BETA, EPSILON, STEPS, BATCH, END = 0.5, 0.1, 12, 3, 256
PAIRS = [
    {"prompt": f"{n} + {n * 3 % 7} = ", "chosen": f"{n + n * 3 % 7}", "rejected": ["many", "0", "I see"][n % 3]}
    for n in range(10, 10 + STEPS * BATCH)
]
TOML = f"""
extends = "begun/train.toml"

[data]
name = "preference_pairs"
path = "pairs.jsonl"
reference = "reference.npz"
shuffle = false

[loss]
name = "dpo"
beta = {BETA}
label_smoothing = {EPSILON}

[train]
steps = {STEPS}
seq_len = 32
batch_size = {BATCH}
precision = "fp32"
clip_norm = 1.0

[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.5
weight_decay = 0.0

[scheduler]
name = "constant"

[metrics]
interval = 1

[run]
name = "tuned"
device = "cpu"

[checkpoint.load]
path = "hf"
"""


@pytest.fixture
def tuned(tmp_path, monkeypatch, capfd):
    """A folder of Hugging Face's with a model, which has been tuned, and the metrics of the steps."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("hf")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    assert main(["convert", "hf", "--to", "forge", "--out", "begun"]) == 0
    (tmp_path / "dpo.toml").write_text(TOML)
    command = ["eval", "begun/checkpoint", "--evaluation", "preference_reference", "--job", "dpo.toml"]
    assert main([*command, "train.seq_len=32", "train.precision=fp32"]) == 0, capfd.readouterr().err
    assert main(["run", "dpo.toml"]) == 0, capfd.readouterr().err
    lines = (tmp_path / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def log_probability(model, prompt, answer):
    """Of an answer and the end of document, token by token."""
    prompt, answer = [*prompt.encode()], [*answer.encode(), END]
    ids = torch.tensor([prompt + answer])
    logs = model(ids[:, :-1]).logits.float().log_softmax(-1)
    return logs[0, len(prompt) - 1 :].gather(1, torch.tensor(answer)[:, None]).sum()


def test_twelve_steps_are_those_of_a_loop_over_their_model(tuned):
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    losses, norms, margins = [], [], []
    for step in range(STEPS):
        of_pairs = []
        for pair in PAIRS[step * BATCH : (step + 1) * BATCH]:
            ratios = []
            for side in ("chosen", "rejected"):
                with torch.no_grad():
                    before = log_probability(reference, pair["prompt"], pair[side])
                ratios.append(log_probability(model, pair["prompt"], pair[side]) - before)
            of_pairs.append(ratios[0] - ratios[1])
        scaled = BETA * torch.stack(of_pairs)
        loss = (-(1 - EPSILON) * F.logsigmoid(scaled) - EPSILON * F.logsigmoid(-scaled)).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
        margins.append(float(scaled.detach().mean()))

    assert [line["loss"] for line in tuned] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in tuned] == pytest.approx(norms, rel=1e-4)
    assert [line["auxiliary/reward_margin"] for line in tuned] == pytest.approx(margins, rel=1e-4, abs=1e-5)
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses[-1] < losses[0] - 0.05
