"""A downloaded model is trained with adapters; they are folded into its weights, or given away alone."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from forge_core.checkpoint.store import find_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_weights.loading import load_model

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
MODELS = {
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "phi3": transformers.Phi3Config(**SHAPE),  # whose queries, keys and values are one tensor
}
SETTINGS = [
    *("train.steps=3", "train.seq_len=16", "train.precision=fp32", "train.batch_size=2", "run.device=cpu"),
    *("data.name=text_files", "data.path=a.txt", "data.tokenizer=bytes", "optimizer.lr=1e-2", "eval.interval=0"),
]


@pytest.fixture
def tuned(tmp_path, monkeypatch, capfd):
    """Trains a model of a kind further, with adapters or without."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} and {n * n}. " for n in range(600)))

    def tuned(kind, *overrides):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained("hf")
        assert main(["convert", "hf", "--to", "forge", "--out", "config", "--config-only"]) == 0
        assert main(["run", "config/train.toml", *SETTINGS, *overrides]) == 0
        capfd.readouterr()

    return tuned


@torch.no_grad()
def logits_of(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model(torch.arange(20)[None]).logits


@torch.no_grad()
def our_logits():
    checkpoint = find_checkpoint(Path("runs/config"), print, lambda _: None)
    return load_model(checkpoint, lambda _: discover(), torch.device("cpu"), None).model(torch.arange(20)[None])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_adapters_compute_the_same_folded_in_and_given_away_alone(tuned, capfd):
    tuned("qwen2", "parallel.passes.lora={rank=3, alpha=9.0, include=['*.attention.*', 'blocks.1.*']}")
    expected, base = our_logits(), logits_of("hf")
    assert (expected - base).abs().max() > 1e-2

    assert main(["convert", "runs/config", "--to", "huggingface", "--out", "folded"]) == 0
    torch.testing.assert_close(logits_of("folded"), expected, rtol=1e-5, atol=1e-5)
    assert load_file("folded/model.safetensors").keys() == load_file("hf/model.safetensors").keys()

    assert main(["convert", "runs/config", "--to", "peft", "--out", "adapters"]) == 0
    assert "wrote adapters: adapters of 11 layers, from runs/config/checkpoints/step_00000003" in capfd.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, "adapters")
    torch.testing.assert_close(model(torch.arange(20)[None]).logits.detach(), expected, rtol=1e-5, atol=1e-5)
    assert {path.name for path in Path("adapters").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    said = json.loads(Path("adapters/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (3, 9.0, str(Path("hf").resolve()))


def test_adapters_without_a_place_of_their_own_are_refused(tuned, capfd):
    tuned("phi3", "parallel.passes.lora.rank=2")

    assert main(["convert", "runs/config", "--to", "peft", "--out", "adapters"]) == 2

    said = capfd.readouterr().err
    assert "model.layers.0.self_attn.qkv_proj.weight of Phi3ForCausalLM is made of blocks.0.attention.q.weight" in said
    assert "--to huggingface" in said
    assert main(["convert", "runs/config", "--to", "huggingface", "--out", "folded"]) == 0
    assert json.loads(Path("folded/config.json").read_text())["architectures"] == ["Phi3ForCausalLM"]
    torch.testing.assert_close(logits_of("folded"), our_logits(), rtol=1e-5, atol=1e-5)


def test_a_run_without_adapters_has_none_to_give(tuned, capfd):
    tuned("qwen2")

    assert main(["convert", "runs/config", "--to", "peft", "--out", "adapters"]) == 2
    assert "has no adapters; it was trained without the pass lora" in capfd.readouterr().err
    assert main(["convert", "runs/config", "--to", "peft", "--out", "adapters", "--dtype", "bf16"]) == 2
    assert "--dtype has no effect with --to peft" in capfd.readouterr().err
