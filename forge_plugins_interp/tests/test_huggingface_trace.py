"""``forge trace --huggingface``: a model of transformers and ours part where they do, and nowhere else."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fork_server
from forge_core.cli import main
from forge_plugins_interp.trace_comparison import read_trace

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "olmo2": transformers.Olmo2Config(**{name: value for name, value in SHAPE.items() if name != "head_dim"}),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, sliding_window=8, query_pre_attn_scalar=8),
    "gemma2": transformers.Gemma2Config(**SHAPE),
    "gpt2": transformers.GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
SETTINGS = [
    *("train.steps=2", "train.seq_len=16", "train.precision=fp32", "train.batch_size=2", "train.grad_accumulation=2"),
    *("data.name=text_files", "data.path=text", "data.tokenizer=bytes", "run.device=cpu", "model.vocab_size=257"),
    "eval.interval=0",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", fork_server.run)  # which ``forge trace`` starts a run with
    (tmp_path / "text").mkdir()
    for file in range(20):
        (tmp_path / "text" / f"{file}.txt").write_text("".join(f"{n} and {n * n}. " for n in range(file, file + 9)))
    return tmp_path


def downloaded(kind, folder):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(folder)
    return folder


def both(kind, folder, *more):
    """The traces ``ours`` and ``hf`` of one step with the same weights."""
    downloaded(kind, folder / "model")
    assert main(["convert", "model", "--to", "forge", "--out", "config", "--config-only"]) == 0
    assert main(["trace", "config/train.toml", "--steps", "1", "--out", "ours", *SETTINGS, *more]) == 0
    assert main(["trace", "config/train.toml", "--huggingface", "model", "--out", "hf", *SETTINGS, *more]) == 0


def names(trace, kind="site"):
    return {line["name"] for line in read_trace(trace) if line["kind"] == kind}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", []), ("llama", ["data.document_mask=true"]), ("qwen3", ["data.packing=best_fit"])],
    ids=["llama", "documents", "qwen3 with padding"],
)
def test_the_same_weights_give_the_same_values_and_gradients(kind, more, folder, capsys):
    both(kind, folder, *more)
    capsys.readouterr()

    assert main(["trace", "--compare", "ours", "hf", "--tolerance", "1e-4"]) == 0

    said = capsys.readouterr().out
    assert "compared 42 of kind site;" in said
    assert "compared 42 of kind site_gradient;" in said
    assert "only ours has 6 of kind site: blocks.0.q_rot, blocks.0.k_rot" in said
    assert re.search(r"only ours has \d+ of kind gradient: .* and \d+ more", said)
    assert names(folder / "hf") == names(folder / "hf", "site_gradient")
    assert {line["step"] for line in read_trace(folder / "hf")} == {1}


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("olmo2", {"embed": True, "blocks.1.mlp_in": False}),
        ("mistral", {"embed": True, "blocks.1.mlp_in": True}),
        ("gemma3", {"embed": False, "blocks.1.mlp_in": False}),
    ],
)
def test_sites_that_a_family_has_elsewhere_are_left_out(kind, has, folder):
    both(kind, folder)

    assert main(["trace", "--compare", "ours", "hf", "--tolerance", "1e-4"]) == 0
    assert {name: name in names(folder / "hf") for name in has} == has


def change_weight(folder, name):
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 5] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_theta(folder):
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (lambda folder: change_weight(folder, "model.layers.1.self_attn.v_proj.weight"), "blocks.1.v"),
        (lambda folder: change_weight(folder, "model.layers.2.mlp.up_proj.weight"), "blocks.2.mlp_post"),
        (change_theta, "blocks.0.z"),
    ],
    ids=["v of layer 1", "up of layer 2", "theta"],
)
def test_the_first_site_of_a_fault_is_named(change, site, folder, capsys):
    downloaded("llama", folder / "model")
    trace = ["trace", "config/train.toml", "--huggingface", "model", *SETTINGS]
    assert main(["convert", "model", "--to", "forge", "--out", "config", "--config-only"]) == 0
    assert main(["trace", "config/train.toml", "--steps", "1", "--out", "ours", *SETTINGS]) == 0
    change(folder / "model")
    assert main([*trace, "--out", "hf"]) == 0
    capsys.readouterr()

    assert main(["trace", "--compare", "ours", "hf", "--tolerance", "1e-4"]) == 1

    assert f"they part at step 1: site {site} differs by" in capsys.readouterr().out


def test_a_later_step_has_its_own_batches(folder, capsys):
    """The weights of a run after its first step, on the batches of its second."""
    downloaded("llama", folder / "model")
    assert main(["convert", "model", "--to", "forge", "--out", "config", "--config-only"]) == 0
    assert main(["trace", "config/train.toml", "--steps", "1..2", "--out", "ours", *SETTINGS]) == 0
    assert main(["run", "config/train.toml", "checkpoint.interval=1", *SETTINGS]) == 0
    step_1 = "runs/config/checkpoints/step_00000001"
    assert main(["convert", step_1, "--to", "huggingface", "--out", "after"]) == 0
    capsys.readouterr()

    trace = ["trace", "config/train.toml", "--huggingface", "after", "--steps", "2", "--out", "hf", *SETTINGS]
    assert main(trace) == 0

    logged = [json.loads(line) for line in (folder / "runs/config/metrics.jsonl").read_text().splitlines()]
    (loss,) = (line["loss"] for line in logged if line["step"] == 2 and "loss" in line)
    assert float(re.search(r"at step 2, loss ([\d.]+)", capsys.readouterr().out)[1]) == pytest.approx(loss, abs=2e-6)
    assert main(["trace", "--compare", "ours", "hf", "--tolerance", "1e-4"]) == 0


def test_some_sites_alone_can_be_traced(folder):
    downloaded("llama", folder / "model")
    assert main(["convert", "model", "--to", "forge", "--out", "config", "--config-only"]) == 0
    trace = ["trace", "config/train.toml", "--huggingface", "model", "--out", "hf", *SETTINGS]

    assert main([*trace, "--sites", "blocks.*.z,model.layers.1.mlp"]) == 0

    assert names(folder / "hf") == {"blocks.0.z", "blocks.1.z", "blocks.2.z", "blocks.1.mlp_out"}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("llama", ["--huggingface", "nowhere"], "--huggingface nowhere: the folder has no config.json"),
        ("llama", ["--huggingface", "model", "--nproc", "2"], "--huggingface runs on one process"),
        ("llama", ["--huggingface", "model", "--steps", "1..2"], "traces one step, as it updates nothing; give one"),
        ("llama", ["--huggingface", "model", "--sites", "blocks.0.resid"], "did you mean 'blocks.0.resid_p"),
        ("gemma2", ["--huggingface", "model"], "config.json has final_logit_softcapping = 30.0"),
        ("gpt2", ["--huggingface", "model"], "a GPT2LMHeadModel has no module model.embed_tokens"),
        ("mistral", ["--huggingface", "model", "data.document_mask=true"], "has layers that see a window"),
    ],
)
def test_bad_input_is_a_sentence(kind, arguments, message, folder, capsys):
    downloaded(kind, folder / "model")
    (folder / "job.toml").write_text('[model]\nname="transformer"\ndim=32\nn_layers=3\nn_heads=4\nmax_seq_len=64\n')

    settings = [*SETTINGS, "optimizer.name=adamw", "optimizer.lr=1e-3"]
    assert main(["trace", "job.toml", "--out", "hf", *arguments, *settings]) == 2

    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "hf").exists()


def test_a_model_that_lacks_weights_or_words_is_refused(folder, capsys):
    downloaded("llama", folder / "model")
    (folder / "job.toml").write_text('[model]\nname="transformer"\ndim=32\nn_layers=3\nn_heads=4\nmax_seq_len=64\n')
    trace = ["trace", "job.toml", "--out", "hf", "--huggingface", "model", *SETTINGS]
    trace += ["optimizer.name=adamw", "optimizer.lr=1e-3"]
    weights = load_file("model/model.safetensors")
    left = {name: one for name, one in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(left, "model/model.safetensors", metadata={"format": "pt"})

    assert main(trace) == 2
    assert "has no weights of model.layers.1.mlp.up_proj.weight" in " ".join(capsys.readouterr().err.split())

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, "vocab_size": 200})).save_pretrained("model")
    assert main(trace) == 2
    assert "the model has a vocabulary of 200, and the data one of 257" in " ".join(capsys.readouterr().err.split())


def test_transformers_is_an_extra(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (folder / "job.toml").write_text('[model]\nname="transformer"\ndim=32\nn_layers=3\nn_heads=4\nmax_seq_len=64\n')
    settings = [*SETTINGS, "optimizer.name=adamw", "optimizer.lr=1e-3"]

    assert main(["trace", "job.toml", "--out", "hf", "--huggingface", "model", *settings]) == 2

    assert "pip install 'forge-plugins-interp[huggingface]'" in " ".join(capsys.readouterr().err.split())
