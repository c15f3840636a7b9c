"""A run begins with a downloaded model's folder itself, in any layout."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_plugins_hf.config_json import ReadKeys
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.shards import Shards
from forge_plugins_hf.weight_source import FolderWeights
from parity_matrix.launch import Launcher, Work

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
    "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "phi3": transformers.Phi3Config(**SHAPE),  # whose queries, keys and values are one tensor
}
SETTINGS = [
    *("train.steps=2", "train.seq_len=16", "train.precision=fp32", "train.batch_size=2", "run.device=cpu"),
    *("data.name=text_files", "data.path=a.txt", "data.tokenizer=bytes", "optimizer.lr=1e-3", "eval.interval=0"),
    *("checkpoint.powers_of_two_until=1", "metrics.interval=1", "model.vocab_size=257"),
]


def downloaded(kind, folder):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(folder, max_shard_size="40KB")


def tensors(checkpoint):
    entries = checkpoint.saved_tensors()
    found = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in entries.items() if "model." in key}
    checkpoint.load(found)
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} and {n * n}. " for n in range(600)))
    return tmp_path


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_what_a_converted_checkpoint_begins_with(kind, folder, capfd):
    downloaded(kind, folder / "hf")
    assert main(["convert", "hf", "--to", "forge", "--out", "ours"]) == 0
    assert main(["convert", "hf", "--to", "forge", "--out", "config", "--config-only"]) == 0
    assert [path.name for path in (folder / "config").iterdir()] == ["train.toml"]
    capfd.readouterr()

    assert main(["run", "config/train.toml", *SETTINGS]) == 0

    begun = tensors(open_checkpoint(folder / "runs/config/checkpoints/step_00000000"))
    expected = tensors(open_checkpoint(folder / "ours/checkpoint"))
    assert begun.keys() == expected.keys()
    assert all(torch.equal(begun[key], one) for key, one in expected.items())
    accounts = json.loads((folder / "runs/config/loaded.json").read_text())
    assert (accounts["fresh"], accounts["without_a_place"]) == ([], [])
    assert "differs from [model]" not in capfd.readouterr().out


@pytest.mark.slow
def test_every_layout_begins_with_the_same_weights(tmp_path):
    (tmp_path / "layouts").mkdir()
    launcher = Launcher(tmp_path / "layouts")
    downloaded("phi3", tmp_path / "hf")
    shape = ["model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.qk_norm=false"]
    shape += ['model.feed_forward={name="mlp", hidden_dim=48}', "model.norm_eps=1e-5"]
    load = [f"checkpoint.load.path={tmp_path / 'hf'}", "train.steps=3", "eval.interval=0"]
    half = "train.batch_size=2"
    works = [
        Work("alone", 1, [*shape, *load]),
        Work("tp2-fsdp2", 4, [*shape, *load, half, "parallel.tp=2"]),
        Work("pp2", 2, [*shape, *load, "train.batch_size=1", "train.grad_accumulation=4", "parallel.pp=2"]),
    ]
    launcher.launch(works)
    expected = launcher.metrics("alone")
    for work in works[1:]:
        for line, reference in zip(launcher.metrics(work.name), expected, strict=True):
            assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


FUSED = {
    **MODELS,
    "gpt2": transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": transformers.GPTNeoXConfig(
        **{key: value for key, value in SHAPE.items() if key not in ("num_key_value_heads", "pad_token_id")}
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=32, head_dim=8),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SHAPE,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}


class Counting(Shards):
    n_bytes = 0

    def read(self, name, part=None):
        tensor = super().read(name, part)
        self.n_bytes += tensor.nbytes
        return tensor


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("kind", FUSED)
def test_ranks_read_each_byte_about_once(kind, dimension, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FUSED[kind])
    model.save_pretrained(tmp_path)
    shards = Counting(tmp_path)
    config = ReadKeys(json.loads((tmp_path / "config.json").read_text()))
    layout = layout_of_architecture(type(model).__name__, discover())
    ours = ComponentBuilder(discover()).resolve("model", layout.model_table(config))
    recipes = layout.to_forge(ours.config, shards.names)
    weights = FolderWeights(shards, recipes)

    total = asked = 0
    for name, shape in weights.shapes().items():
        if not recipes[name].reads:  # what a run keeps of the last step is in no file
            continue
        whole = recipes[name].make(*(shards.read(one) for one in recipes[name].reads))
        cut, before = min(dimension, len(shape) - 1), shards.n_bytes
        for rank, part in enumerate(whole.tensor_split(4, dim=cut)):
            first = sum(one.shape[cut] for one in whole.tensor_split(4, dim=cut)[:rank])
            where = [slice(0, size) for size in shape]
            where[cut] = slice(first, first + part.shape[cut])
            assert torch.equal(weights.read(name, where), part), (name, where)
        total, asked = total + whole.nbytes, asked + shards.n_bytes - before

    assert total <= asked <= 1.1 * total


def changed(path, **keys):
    table = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(table | keys))


def test_what_differs_is_said_and_what_cannot_fit_is_refused(folder, capfd):
    downloaded("qwen2", folder / "hf")
    assert main(["convert", "hf", "--to", "forge", "--out", "config", "--config-only"]) == 0
    run = ["run", "config/train.toml", *SETTINGS]

    assert main([*run, "model.rope_theta=500.0"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "differs from [model]: rope_parameters" in said
    assert "rope_theta = 10000.0 there, 500.0 here" in said
    assert main([*run, "run.name=b", "model.dim=64"]) == 2
    printed = capfd.readouterr()
    assert "does not fit this model: model." in printed.err
    assert "; give the run its [model]" in printed.err
    said = " ".join(printed.out.split())
    assert "hidden_size = 32 there, 64 here" in said
    assert f"forge convert {folder / 'hf'} --to forge --out OUT --config-only writes the [model] of the folder" in said
    assert main([*run, "run.name=c", 'model.feed_forward={name="mlp", hidden_dim=48, activation="relu2"}']) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "differs from [model]: Qwen2ForCausalLM has another feed_forward of layer 0" in said
    assert "in the checkpoint, but not in this run: 2 tensors (model.blocks.0.feed_forward.gate.weight" in said
    changed(folder / "hf", rope_scaling={"rope_type": "dynamic"}, rope_parameters=None)
    assert main([*run, "run.name=d"]) == 2
    assert 'hf/config.json: Qwen2ForCausalLM with rope_type = "dynamic" is not supported' in capfd.readouterr().err
    changed(folder / "hf", rope_parameters={"rope_type": "default"}, rope_scaling=None)
    (folder / "hf/model.safetensors.index.json").unlink()
    there = transformers.AutoModelForCausalLM.from_config(MODELS["qwen2"]).state_dict()
    save_file({**there, "lm_head.weight": there["lm_head.weight"] + 1}, folder / "hf/model.safetensors")
    assert main([*run, "run.name=f"]) == 2
    assert "tie_word_embeddings = true, and lm_head.weight is not equal to" in capfd.readouterr().err
    changed(folder / "hf", architectures=["Qwen2ForCausualLM"])
    assert main([*run, "run.name=e"]) == 2
    assert "Did you mean Qwen2ForCausalLM?" in capfd.readouterr().err
    assert not (folder / "runs" / "e").exists()


def test_a_shard_that_is_missing_is_named(folder, capfd):
    downloaded("qwen2", folder / "hf")
    assert main(["convert", "hf", "--to", "forge", "--out", "config", "--config-only"]) == 0
    shards = sorted((folder / "hf").glob("*.safetensors"))
    whole = load_file(shards[0])
    name = next(iter(whole))
    save_file({key: one for key, one in whole.items() if key != name}, shards[0])

    assert main(["run", "config/train.toml", *SETTINGS]) == 2
    assert f"do not agree about {name}" in capfd.readouterr().err
