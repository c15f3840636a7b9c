"""Downloaded models with their real weights: each folder in the one that ``FORGE_REAL_MODELS`` names.

Without the variable, a small one with random weights stands in for them.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_weights.loading import load_model

TEXT = Path(os.__file__).read_text()[:2000]
"""Python source that every machine has."""
REAL = [one.parent for one in sorted(Path(os.environ.get("FORGE_REAL_MODELS", os.devnull)).glob("*/config.json"))]


@pytest.fixture(params=REAL or [None], ids=lambda folder: folder.name if folder else "stand-in")
def folder(request, tmp_path):
    return request.param or stand_in(tmp_path / "stand-in")


def stand_in(folder):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(**shape, num_key_value_heads=2, vocab_size=400, eos_token_id=0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def test_a_downloaded_model_computes_the_same_here_and_goes_back_bit_for_bit(folder, tmp_path):
    out, back = tmp_path / "ours", tmp_path / "back"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kept = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype

    assert main(["convert", str(folder), "--to", "forge", "--out", str(out)]) == 0
    ours = load_model(open_checkpoint(out / "checkpoint"), discover, torch.device("cpu"), None)
    tokens = ours.tokenizer.encode(TEXT) if ours.tokenizer else [*TEXT.encode()]
    tokens = torch.as_tensor(tokens)[None, :256].long()
    expected, found = theirs(tokens).logits, ours.model.eval()(tokens)

    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(found[..., : expected.shape[-1]].argmax(-1), expected.argmax(-1))
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[kept]
    options = ["--to", "huggingface", "--out", str(back), "--dtype", dtype]
    assert main(["convert", str(out / "checkpoint"), *options]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.state_dict().items())
