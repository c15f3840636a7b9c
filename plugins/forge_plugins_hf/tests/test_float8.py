"""Weights in float8 with factors for blocks, as DeepSeek-V3 is published."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_hf.config_json import ReadKeys
from forge_plugins_hf.float8_shards import Float8Shards
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.quantisation import Float8Blocks
from forge_plugins_hf.weight_source import FolderWeights
from forge_plugins_weights.loading import load_model
from parity_matrix.launch import Launcher, Work

QUANTISED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [16, 16],
}
SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEEPSEEK = transformers.DeepseekV3Config(
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
)
QWEN = transformers.Qwen3Config(**SHAPE, head_dim=16)


def in_float8(weight, high, wide):
    """A matrix as float8 numbers, and its factors."""
    rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
    factors = torch.empty(rows, columns)
    numbers = torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            factors[i, j] = weight[block].abs().max() / 448
            numbers[block] = weight[block] / factors[i, j]
    return numbers.to(torch.float8_e4m3fn), factors


def published(config, folder, **quantised):
    """A model with random weights in a folder, those of linear layers in float8; and its tensors, multiplied out."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="40KB")
    exact = {}
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        for name, weight in list(state.items()):
            exact[name] = weight
            if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                numbers, factors = in_float8(weight, 16, 16)
                state |= {name: numbers, f"{name}_scale_inv": factors}
                each = factors.double().repeat_interleave(16, 0).repeat_interleave(16, 1)
                exact[name] = (numbers.double() * each[: weight.shape[0], : weight.shape[1]]).float()
        save_file(state, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    where = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"quantization_config": QUANTISED | quantised}))
    return exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_the_part_of_the_product_in_float64(dtype, tmp_path):
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    numbers, factors = in_float8(weight, 16, 8)
    save_file({"w": numbers, "w_scale_inv": factors, "b": weight[0]}, tmp_path / "model.safetensors")
    shards = Float8Shards(tmp_path, Float8Blocks(16, 8), dtype)
    each = factors.double().repeat_interleave(16, 0).repeat_interleave(8, 1)[:37, :50]
    expected = (numbers.double() * each).float().to(dtype)

    assert shards.names == ["b", "w"]
    assert torch.equal(shards.read("w"), expected)
    for rows in ((0, 37), (0, 16), (5, 6), (15, 33), (32, 37)):
        for columns in ((0, 50), (7, 9), (8, 16), (49, 50)):
            part = slice(*rows), slice(*columns)
            assert torch.equal(shards.read("w", part), expected[part])
    assert torch.equal(shards.read("w", [slice(5, 20)]), expected[5:20])
    assert torch.equal(shards.read("b", [slice(3, 9)]), weight[0, 3:9])


@torch.no_grad()
@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek_v3", "qwen3"])
def test_a_published_folder_is_converted_and_computes_what_transformers_computes(config, tmp_path, capfd):
    exact = published(config, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).eval()

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0

    assert "what is written of them, here and for Hugging Face, has no quantization_config" in capfd.readouterr().err
    ours = load_model(open_checkpoint(tmp_path / "ours/checkpoint"), discover, torch.device("cpu"), None)
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.model.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)

    source = str(tmp_path / "ours/checkpoint")
    for dtype, kept in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        back = tmp_path / dtype
        assert main(["convert", source, "--to", "huggingface", "--out", str(back), "--dtype", dtype]) == 0
        assert "quantization_config" not in json.loads((back / "config.json").read_text())
        found = load_file(back / "model.safetensors")
        assert found.keys() == exact.keys()
        assert all(torch.equal(one, exact[name].to(one.dtype)) for name, one in found.items())
        assert found["model.layers.0.mlp.up_proj.weight"].dtype == kept


def test_a_checkpoint_in_bf16_has_the_products_rounded_once(tmp_path):
    exact = published(QWEN, tmp_path / "hf")
    out = tmp_path / "ours"

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(out), "--dtype", "bf16"]) == 0

    found = {"model.blocks.0.feed_forward.up.weight": torch.empty(48, 32, dtype=torch.bfloat16)}
    open_checkpoint(out / "checkpoint").load(found)
    assert torch.equal(*found.values(), exact["model.layers.0.mlp.up_proj.weight"].bfloat16())


@pytest.mark.slow
def test_every_layout_begins_with_the_same_weights(tmp_path):
    (tmp_path / "layouts").mkdir()
    launcher = Launcher(tmp_path / "layouts")
    published(DEEPSEEK, tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    shape = [
        *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.qk_norm=false", "model.norm_eps=1e-6"),
        "model.n_kv_heads=4",
        "model.latent_attention={kv_rank=16, q_rank=16, plain_dim=8, rotary_dim=16, value_dim=8}",
        "model.feed_forward.name=moe",
        *("model.feed_forward.n_experts=4", "model.feed_forward.hidden_dim=32", "model.feed_forward.shared_experts=1"),
        *("model.feed_forward.first_dense=1", 'model.feed_forward.dense={name="mlp", hidden_dim=48}'),
        'model.feed_forward.router={name="sigmoid_topk", top_k=2, normalize=true, route_scale=2.5, bias_rate=0.0}',
    ]
    given = [*shape, "train.steps=3", "eval.interval=0"]
    load = [*given, f"checkpoint.load.path={tmp_path / 'hf'}"]
    half = "train.batch_size=2"
    works = [
        Work("converted", 1, [*given, f"checkpoint.load.path={tmp_path / 'ours/checkpoint'}"]),
        Work("alone", 1, load),
        Work("tp2-ep2", 4, [*load, half, "parallel.tp=2", "parallel.ep=2"]),
        Work("pp2", 2, [*load, "train.batch_size=1", "train.grad_accumulation=4", "parallel.pp=2"]),
    ]
    launcher.launch(works)
    expected = launcher.metrics("converted")
    for work in works[1:]:
        for line, reference in zip(launcher.metrics(work.name), expected, strict=True):
            assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


class Recording(Float8Shards):
    asked: list

    def read(self, name, part=None):
        self.asked.append((name, None if part is None else [(one.start, one.stop) for one in part]))
        return super().read(name, part)


def test_a_rank_reads_its_part_of_a_matrix_and_its_experts_alone(tmp_path):
    exact = published(DEEPSEEK, tmp_path / "hf")
    shards = Recording(tmp_path / "hf", Float8Blocks(16, 16), torch.float32)
    config = ReadKeys(json.loads((tmp_path / "hf/config.json").read_text()))
    layout = layout_of_architecture("DeepseekV3ForCausalLM", discover())
    model = ComponentBuilder(discover()).resolve("model", layout.model_table(config))
    weights = FolderWeights(shards, layout.to_forge(model.config, shards.names))

    shards.asked = []
    stack = weights.read("blocks.1.feed_forward.experts.up", [slice(1, 3), slice(16, 32), slice(0, 32)])
    matrix = weights.read("blocks.0.feed_forward.up.weight", [slice(20, 48), slice(0, 32)])

    experts = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in (1, 2)]
    part = [(16, 32), (0, 32)]
    assert torch.equal(stack, torch.stack([exact[name][16:] for name in experts]))
    assert torch.equal(matrix, exact["model.layers.0.mlp.up_proj.weight"][20:])
    asked = [(name, given) for name, given in shards.asked if not name.endswith("_scale_inv")]
    assert [one for one in asked if one[0] in experts] == [(name, part) for name in experts]
    assert {name for name, _ in asked} == {*experts, "model.layers.0.mlp.up_proj.weight"}


def refused(folder, capfd):
    assert main(["convert", str(folder), "--to", "forge", "--out", str(folder.parent / "out")]) == 2
    assert not (folder.parent / "out").exists()
    return capfd.readouterr().err


def test_stored_in_another_way_is_refused_with_its_name(tmp_path, capfd):
    published(QWEN, tmp_path / "hf")
    table = json.loads((tmp_path / "hf/config.json").read_text())
    for change, sentence in [
        ({"quant_method": "awq"}, "quantization_config with quant_method = 'awq' is not supported"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported; 'fp8' with blocks is."),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes' is not supported"),
        ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4' is not supported"),
        ({"bits": 4, "group_size": 64}, "quantization_config with no quant_method is not supported"),
        (QUANTISED | {"fmt": "e5m2"}, "quantization_config.fmt = 'e5m2' is not supported; 'e4m3' is"),
        (QUANTISED | {"activation_scheme": "static"}, "activation_scheme = 'static' is not supported; 'dynamic' is"),
        (QUANTISED | {"expert_dtype": "fp4"}, "quantization_config.expert_dtype = 'fp4' is not supported"),
        (QUANTISED | {"weight_block_size": None}, "weight_block_size must be two numbers above 0"),
        (QUANTISED | {"weight_block_size": [16]}, "such as [128, 128], got [16]"),
        (QUANTISED | {"weight_block_size": [32, 16]}, "has the shape (3, 2), and"),
        ({}, "in float8, and config.json has no quantization_config"),
    ]:
        (tmp_path / "hf/config.json").write_text(json.dumps(table | {"quantization_config": change}))
        assert sentence in refused(tmp_path / "hf", capfd), change


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "w is in float8, and w_scale_inv is missing"),
        (
            {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(1, 1)},
            r"w_scale_inv has the shape \(1, 1\), and w has 2 × 1 blocks",
        ),
        ({"w": torch.zeros(4, 4).to(torch.float8_e5m2)}, "w is in F8_E5M2, and F8_E4M3 is read"),
        ({"w": torch.zeros(2, 2, 4).to(torch.float8_e4m3fn)}, "matrices alone are read in float8"),
    ],
)
def test_factors_that_do_not_fit_are_named(state, sentence, tmp_path):
    save_file(state, tmp_path / "model.safetensors")

    with pytest.raises(ConfigError, match=sentence):
        Float8Shards(tmp_path, Float8Blocks(2, 4), torch.float32)


def test_factors_without_a_weight_in_float8_are_left_over(tmp_path, capfd):
    published(QWEN, tmp_path / "hf")
    file = next(file for file in (tmp_path / "hf").glob("*.safetensors") if "lm_head.weight" in load_file(file))
    state = load_file(file)
    save_file(state | {"lm_head.weight_scale_inv": torch.ones(17, 2)}, file, metadata={"format": "pt"})
    index = tmp_path / "hf/model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] | {"lm_head.weight_scale_inv": file.name}
    index.write_text(json.dumps({"weight_map": where}))

    assert "unexpected: lm_head.weight_scale_inv" in refused(tmp_path / "hf", capfd)
