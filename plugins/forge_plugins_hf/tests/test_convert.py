"""``forge convert``: models of transformers become checkpoints and back, and compute the same."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_hf import model_folder
from forge_plugins_hf.config_json import ReadKeys
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.model_folder import table_of
from forge_plugins_hf.shards import Described, Shards, write_shards
from forge_plugins_hf.weight_source import HuggingFaceFolder
from forge_plugins_inference.prompt import prompt_ids
from forge_plugins_weights.loading import load_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
LINEAR = {"factor": 4.0, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", **LINEAR, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
OLD = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
BF16 = ["--dtype", "bf16"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rope_theta=5000.0),
    "tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(
        **SHAPE, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "llama with biases": lambda: transformers.LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="gelu",
        rope_parameters={"rope_type": "linear", **LINEAR},
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SHAPE, sliding_window=5, head_dim=16, rope_parameters={**LLAMA3, "rope_theta": 500.0}
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    "qwen2 with windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "exaone4": lambda: transformers.Exaone4Config(**SHAPE, sliding_window=5, sliding_window_pattern=2),
    "ministral": lambda: transformers.MinistralConfig(**SHAPE, sliding_window=5, head_dim=16),
    "arcee": lambda: transformers.ArceeConfig(**SHAPE),
    "seed_oss": lambda: transformers.SeedOssConfig(**SHAPE, head_dim=16),
    "gemma1": lambda: transformers.GemmaConfig(**SHAPE, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE, sliding_window=5),
    "stablelm": lambda: transformers.StableLmConfig(**SHAPE, use_qkv_bias=True),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE, no_rope_layer_interval=2, pad_token_id=0),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE,
        embedding_multiplier=3.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        rope_parameters=YARN,
    ),
    "phi3": lambda: transformers.Phi3Config(
        **SHAPE, sliding_window=5, partial_rotary_factor=0.5, pad_token_id=0, original_max_position_embeddings=64
    ),
    "phi3 longrope": lambda: transformers.Phi3Config(
        **SHAPE,
        pad_token_id=0,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [3.0, 9.0],
        },
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, rope_parameters=YARN
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        **GEMMA,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", **LINEAR},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1, bos_token_id=1, resid_pdrop=0.0
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**OLD, rotary_pct=0.5),
    "gpt_neox one after the other": lambda: transformers.GPTNeoXConfig(**OLD, use_parallel_residual=False),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, **EXPERTS, sliding_window=5),
    "olmoe": lambda: transformers.OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, **EXPERTS, head_dim=16, sliding_window=5),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SHAPE, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16, use_qk_norm=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
}


def made(kind, folder, **saving):
    """A model with random weights in a folder as downloaded."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():  # norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saving)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return model.eval()


def logits(model):
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def loaded(path):
    return load_model(open_checkpoint(path), discover, torch.device("cpu"), None)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_goes_there_and_back_and_computes_the_same(kind, tmp_path, capfd):
    model = made(kind, tmp_path / "hf", max_shard_size="20KB")  # several files

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    assert f"\nforge generate {tmp_path}/ours/checkpoint; to train it further" in capfd.readouterr().out
    ours = loaded(tmp_path / "ours" / "checkpoint")
    torch.testing.assert_close(logits(ours.model.eval()), logits(model), atol=1e-5, rtol=1e-5)
    assert ours.tokenizer.end_of_document == 1
    assert ours.tokenizer.encode("w5 w7").tolist() == [5, 7]

    source = str(tmp_path / "ours" / "checkpoint")
    assert main(["convert", source, "--to", "huggingface", "--out", str(tmp_path / "back")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), logits(model), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(one, back.state_dict()[name]) for name, one in model.state_dict().items())
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "back")("w5 w7")["input_ids"] == [5, 7]
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"

    again = ["convert", str(tmp_path / "back"), "--to", "forge", "--config-only", "--out", str(tmp_path / "again")]
    assert main(again) == 0
    first, second = (tomllib.loads((tmp_path / one / "train.toml").read_text()) for one in ("ours", "again"))
    for table in (first, second):
        table["model"].pop("head_dim", None)  # may be left out
    assert rounded(second["model"]) == rounded(first["model"])


@pytest.mark.parametrize("has_template", [True, False])
def test_documents_begin_with_the_token_that_transformers_puts_before_a_text(tmp_path, has_template):
    folder = tmp_path / "hf"
    made("llama", folder)
    if has_template:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        single = processors.TemplateProcessing(single="w2 $A", special_tokens=[("w2", 2)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), single])
        tokenizer.save(str(folder / "tokenizer.json"))
    expected = transformers.AutoTokenizer.from_pretrained(folder)("w5 w7")["input_ids"]

    assert main(["convert", str(folder), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    ours = loaded(tmp_path / "ours" / "checkpoint").tokenizer
    assert prompt_ids(ours, "w5 w7") == expected == ([2, 5, 7] if has_template else [5, 7])
    table = tomllib.loads((tmp_path / "ours" / "train.toml").read_text())["data"]["tokenizer"]
    assert table.get("begin_of_document") == ("w2" if has_template else None)

    source = str(tmp_path / "ours" / "checkpoint")
    assert main(["convert", source, "--to", "huggingface", "--out", str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["bos_token_id"] == (2 if has_template else None)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("w5 w7")["input_ids"] == expected


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_the_ids_of_special_tokens_come_back_from_a_checkpoint_and_from_a_run_that_began_with_it(
    has_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made("llama", tmp_path / "hf")
    given = {"bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0}
    changed(tmp_path / "hf", **given)
    if not has_tokenizer:
        (tmp_path / "hf" / "tokenizer_config.json").unlink()
        (tmp_path / "hf" / "tokenizer.json").rename("other.json")

    def written(source, out):
        assert main(["convert", source, "--to", "huggingface", "--out", out]) == 0
        table = json.loads((tmp_path / out / "config.json").read_text())
        return {key: table[key] for key in given}

    back = given | ({"bos_token_id": None} if has_tokenizer else {})  # its template puts nothing before a text
    assert main(["convert", "hf", "--to", "forge", "--out", "ours"]) == 0
    assert written("ours/checkpoint", "back") == back

    (tmp_path / "text").write_text(" ".join(f"w{n * n % 64}" for n in range(400)))
    data = ["data.path=text"] if has_tokenizer else ["data={name='synthetic', vocab_size=64}"]
    settings = ["train.steps=1", "train.seq_len=16", "train.precision=fp32", "run.device=cpu", *data]
    assert main(["run", "ours/train.toml", *settings]) == 0
    assert written("runs/ours", "trained") == back
    if not has_tokenizer:
        other = "{name='tokenizer_file', path='other.json', end_of_document='w3'}"  # by whose ids tokens are others
        settings[-1] = f"data={{name='text_files', path='text', tokenizer={other}}}"
        assert main(["run", "ours/train.toml", *settings, "run.name=other"]) == 0
        assert written("runs/other", "of_other") == dict.fromkeys(given) | {"eos_token_id": 3}


def rounded(value):
    """A number, or numbers in tables, without its last digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return round(value, 9) if isinstance(value, float) else value


def made_for_images(folder, *, named="as saved", tied=True):
    """A model for text and images."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**SHAPE, **GEMMA, "num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        vision_config={**vision, "image_size": 8, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=63,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if named == "in memory":
        state = {name: one for name, one in model.state_dict().items() if not (tied and name == "lm_head.weight")}
        save_file(state, folder / "model.safetensors")
    return model


LEFT_OUT = ("vision_tower.*", "multi_modal_projector.*")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "ministral", "olmo3"])
def test_a_model_without_windows_is_written_so_that_transformers_takes_it(kind, tmp_path, monkeypatch):
    given = MODELS[kind]().to_dict()
    full = {"layer_types": ["full_attention"] * given["num_hidden_layers"]}
    monkeypatch.setitem(MODELS, kind, lambda: type(config).from_dict(given | full))
    config = transformers.AutoConfig.for_model(given["model_type"])
    model, name = made(kind, tmp_path / "hf"), str(tmp_path / "ours")
    there = ["--to", "huggingface", "--architecture", type(model).__name__, "--out", str(tmp_path / "back")]

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", name]) == 0
    assert main(["convert", f"{name}/checkpoint", *there]) == 0

    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), logits(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("named", "prefix"), [("as saved", ""), ("in memory", "model.")])
def test_the_text_part_of_a_model_for_images_computes_the_same(named, prefix, tied, tmp_path, capfd):
    folder, ours, text = (str(tmp_path / name) for name in ("hf", "ours", "text"))
    model = made_for_images(tmp_path / "hf", named=named, tied=tied)
    options = [part for pattern in LEFT_OUT for part in ("--leave-out", prefix + pattern)]
    n_vision = len(model.model.vision_tower.state_dict())

    assert main(["convert", folder, "--to", "forge", "--out", ours, *options]) == 0
    said = capfd.readouterr()
    assert f"{n_vision} tensors are left out by --leave-out '{prefix}vision_tower.*'" in said.err
    assert f"2 tensors are left out by --leave-out '{prefix}multi_modal_projector.*'" in said.err
    found = loaded(tmp_path / "ours/checkpoint").model.eval()
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=1e-5)

    assert main(["convert", f"{ours}/checkpoint", "--to", "huggingface", "--out", text]) == 0
    said = capfd.readouterr()
    assert "came from a Gemma3ForConditionalGeneration, and are written as a Gemma3ForCausalLM" in said.err
    back = transformers.AutoModelForCausalLM.from_pretrained(text).eval()
    assert type(back) is transformers.Gemma3ForCausalLM
    of_text = {name.replace("language_model.", ""): one for name, one in model.state_dict().items()}
    assert all(torch.equal(one, of_text[name]) for name, one in back.state_dict().items())
    torch.testing.assert_close(logits(back), logits(model), atol=1e-6, rtol=1e-6)


def test_parts_that_our_model_has_not_are_left_out_by_name_only(tmp_path, capfd):
    folder = tmp_path / "hf"
    n_vision = len(made_for_images(folder).model.vision_tower.state_dict())
    options = "--leave-out 'vision_tower.*' --leave-out 'multi_modal_projector.*'"
    sentence = (
        f"{folder} has {n_vision + 2} tensors of parts that our model has not: vision_tower.* ({n_vision}), "
        f"multi_modal_projector.* (2). forge convert {folder} --to forge --out OUT {options} converts the others"
    )

    assert sentence in refused(folder, capfd)
    assert sentence in refused(folder, capfd, "--config-only")
    installed = discover()
    config = ReadKeys(json.loads((folder / "config.json").read_text()))
    layout = layout_of_architecture("Gemma3ForConditionalGeneration", installed)
    ours = ComponentBuilder(installed).resolve("model", table_of(layout, config, folder, print))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        HuggingFaceFolder(None).open(folder, ours, installed, print)

    one, both = ["--leave-out", LEFT_OUT[0]], [part for pattern in LEFT_OUT for part in ("--leave-out", pattern)]
    assert "has 2 tensors of parts that our model has not: multi_modal_projector.* (2)" in refused(folder, capfd, *one)
    idle = refused(folder, capfd, *both, "--leave-out", "vision_tower.e*")
    assert f"--leave-out 'vision_tower.e*' fits no tensor of {folder} that is still there" in idle
    needed = refused(folder, capfd, *both, "--leave-out", "*.layers.2.mlp.*")
    assert "missing: language_model.model.layers.2.mlp.down_proj.weight" in needed
    said = refused(folder, capfd, *both, "--config-only")
    assert "--leave-out has no effect with --config-only: a run that reads SOURCE itself needs all of it" in said
    changed(folder, text_config={**config["text_config"], "hidden_size": "x"})
    assert "the key that was read last is text_config.hidden_size = 'x'" in refused(folder, capfd)
    changed(folder, text_config={**config["text_config"], "query_norm": "l2"})
    assert 'not supported by our model of this architecture: text_config.query_norm = "l2"' in refused(folder, capfd)


def test_code_of_a_known_architecture_is_not_run_and_its_weights_are_taken(tmp_path, capfd):
    made("qwen3", tmp_path / "hf")
    changed(tmp_path / "hf", auto_map={"AutoModelForCausalLM": "own.py"})
    (tmp_path / "hf/own.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0

    said = capfd.readouterr().err
    assert "auto_map names code that the model brings with it, which is never run; our own Qwen3ForCausalLM" in said
    assert not (tmp_path / "has_run").exists()


def test_every_architecture_that_is_known_is_converted_here_and_in_the_table_of_the_readme():
    installed = discover()
    build = ComponentBuilder(installed)
    layouts = [
        build(build.resolve("weight_layout", one.qualified_name)) for one in installed.components("weight_layout")
    ]
    known = {name for layout in layouts for name in layout.architectures}
    known = {name for name in known if not name.endswith("ForConditionalGeneration")}  # tested where they are

    assert {MODEL_FOR_CAUSAL_LM_MAPPING[type(config())].__name__ for config in MODELS.values()} == known
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", readme.partition("| architecture |")[2])) == known


def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path, capfd):
    made("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    said = capfd.readouterr().out
    assert "it has no tokenizer; to train it further" in said
    assert "forge generate" not in said
    source = str(tmp_path / "ours" / "checkpoint")
    assert main(["convert", source, "--to", "huggingface", "--out", str(tmp_path / "back")]) == 0
    assert capfd.readouterr().out.endswith("/checkpoint, without a tokenizer.json, as the run has none\n")


@pytest.mark.parametrize(("there", "back"), [(BF16, []), ([], BF16)])
def test_biases_that_choose_experts_stay_fp32_in_a_model_in_bf16_as_in_transformers(there, back, tmp_path):
    model = made("deepseek_v3", tmp_path / "hf")
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_(2, 3)
    model.save_pretrained(tmp_path / "hf")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "theirs")

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours"), *there]) == 0
    source = str(tmp_path / "ours/checkpoint")
    assert main(["convert", source, "--to", "huggingface", "--out", str(tmp_path / "back"), *back]) == 0

    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    for name in expected:
        if name.endswith("mlp.gate.weight"):  # published files have it in bf16; transformers 5.24 makes it fp32
            expected[name] = expected[name].bfloat16()
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in expected.items()}
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_checkpoint_in_bf16_is_one_of_a_job_whose_parameters_are(tmp_path, capfd):
    model = made("llama", tmp_path / "hf")

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours"), *BF16]) == 0

    ours = loaded(tmp_path / "ours/checkpoint")
    assert ours.model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(ours.model.embed.weight, model.state_dict()["model.embed_tokens.weight"].bfloat16())
    job = tomllib.loads((tmp_path / "ours/train.toml").read_text())
    assert job["train"]["precision"] == ours.job.train.precision == "bf16_pure"
    shutil.rmtree(tmp_path / "ours")
    assert "--dtype fp16: no checkpoint has parameters in fp16" in refused(tmp_path / "hf", capfd, "--dtype", "fp16")


def test_weights_that_fp16_does_not_have_are_refused(tmp_path, capfd):
    model = made("llama", tmp_path / "hf")
    with torch.no_grad():
        model.lm_head.weight[3, 2] = -7e4
    model.save_pretrained(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    back = ["convert", str(tmp_path / "ours/checkpoint"), "--to", "huggingface", "--out", str(tmp_path / "back")]

    assert main([*back, "--dtype", "fp16"]) == 2

    assert "lm_head.weight has values beyond 65,504, the largest of fp16; write" in capfd.readouterr().err
    assert not [*tmp_path.glob("*back*")]
    assert main([*back, "--dtype", "bf16"]) == 0


@pytest.mark.slow
def test_a_converted_model_is_sampled_from_and_trained_further(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = made("qwen3", tmp_path / "hf")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(" ".join(f"w{n * n % 64}" for n in range(4000)))
    assert main(["convert", "hf", "--to", "forge", "--out", "ours"]) == 0

    assert main(["generate", "ours/checkpoint", "--prompt", "w3 w4", "--max-new-tokens", "4"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("w3 w4")
    settings = ["data.path=text", "data.pattern=*.txt", "train.steps=2", "train.seq_len=16", "train.precision=fp32"]
    assert main(["run", "ours/train.toml", *settings, "run.device=cpu", "optimizer.lr=1e-3"]) == 0
    assert json.loads((tmp_path / "runs/ours/loaded.json").read_text())["fresh"] == []
    assert main(["convert", "runs/ours", "--to", "huggingface", "--out", "trained", "--dtype", "bf16"]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained("trained")
    assert trained.dtype == torch.bfloat16
    moved = trained.state_dict()["model.layers.0.self_attn.q_proj.weight"].float()
    before = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert 1e-4 < (moved - before).abs().max() < 1e-2


def refused(folder, capfd, *options):
    out = folder.parent / "out"
    code = main(["convert", str(folder), "--to", "forge", "--out", str(out), *options])
    said = capfd.readouterr().err
    assert code == 2, said
    assert not out.exists()
    return said


def changed(folder, **keys):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | keys))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"architectures": ["LlamaForCausualLM"]}, "Did you mean LlamaForCausalLM?"),
        ({"architectures": []}, "architectures must be an array of one name, got []"),
        ({"attn_logit_softcapping": 50.0}, "not supported by our model of this architecture: attn_logit_softcapping"),
        ({"attention_bias": True}, "missing: model.layers.0.self_attn.k_proj.bias"),
        ({"auto_map": {"AutoModel": "own.py"}, "architectures": ["OwnForCausalLM"]}, "which is never run"),
        ({"hidden_size": 64}, "weights have other shapes than config.json says: model.embed_tokens.weight (64, 32)"),
        ({"num_hidden_layers": 3}, "hf/config.json and the tensors in its folder do not agree: these are not the"),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1."),
        ({"vocab_size": 63}, "tokenizer.json has ids up to 63"),
        (
            {"rope_parameters": "x"},
            "config.json has a value that LlamaForCausalLM cannot have; the key that",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_key(keys, sentence, tmp_path, capfd):
    made("llama", tmp_path / "hf")
    changed(tmp_path / "hf", **keys)

    assert sentence in refused(tmp_path / "hf", capfd)


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "gpt_neox"])
def test_a_head_is_not_lost_where_the_configuration_says_that_it_is_the_embedding(kind, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(model_folder, "_ROWS", 24)  # the last of three pieces is shorter
    made(kind, tmp_path / "hf")
    changed(tmp_path / "hf", tie_word_embeddings=True)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    embedding, head = ("gpt_neox.embed_in", "embed_out") if kind == "gpt_neox" else ("model.embed_tokens", "lm_head")

    said = refused(tmp_path / "hf", capfd)
    assert f"config.json: tie_word_embeddings = true, and {head}.weight is not equal to {embedding}.weight" in said

    tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"].clone()
    tensors[f"{head}.weight"][-1, -1] += 1
    save_file(tensors, file)
    assert "is not equal" in refused(tmp_path / "hf", capfd)
    tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"].clone()
    save_file(tensors, file)
    convert = ["convert", str(tmp_path / "hf"), "--to", "forge", "--config-only", "--out"]
    assert main([*convert, str(tmp_path / "ours")]) == 0
    del tensors[f"{head}.weight"]
    save_file(tensors, file)
    assert main([*convert, str(tmp_path / "without")]) == 0
    changed(tmp_path / "hf", tie_word_embeddings=False)
    said = refused(tmp_path / "hf", capfd)
    assert "config.json and the tensors in its folder do not agree: these are not the weights" in said
    assert "missing: lm_head.weight; tie_word_embeddings is false, set it to true if" in said


def test_a_tokenizer_in_another_format_is_refused_and_the_command_that_is_named_makes_ours(tmp_path, capfd):
    folder = tmp_path / "hf"
    made("llama", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    assert "has a tokenizer in tokenizer.model alone" in refused(folder, capfd)
    (folder / "tokenizer.model").unlink()
    words = ["<|endoftext|>", "w", "x", "wx"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nw x\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))

    said = refused(folder, capfd)
    assert "has a tokenizer in vocab.json alone" in said
    command = re.search(r"AutoTokenizer\S+", said)[0].rstrip(";")
    eval(command, {"AutoTokenizer": transformers.AutoTokenizer})

    assert main(["convert", str(folder), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    assert loaded(tmp_path / "ours" / "checkpoint").tokenizer.encode("wx").tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "keys", "sentence"),
    [
        ("olmoe", {"use_sliding_window": True}, "OlmoeForCausalLM with use_sliding_window = True is not supported"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "dynamic"}},
            'MistralForCausalLM with rope_type = "dynamic" is not',
        ),
        ("gpt2", {"scale_attn_weights": False}, "GPT2LMHeadModel with scale_attn_weights = false is not supported"),
        ("mixtral", {"attention_bias": True}, "MixtralForCausalLM with attention_bias = true is not supported"),
        ("mixtral", {"attn_logit_softcapping": 5.0}, "not supported by our model of this architecture: attn_logit"),
        ("qwen3", {"is_causal": False}, "not supported by our model of this architecture: is_causal = false"),
        (
            "mistral",
            {"rope_scaling": {**LLAMA3, "factor": 4.0}},
            "rope_parameters has factor = 8.0, and 4.0 is beside it",
        ),
        ("mistral", {"rope_scaling": {"type": "linear"}}, "rope_parameters has rope_type = 'llama3', and 'linear' is"),
        ("mistral", {"rope_scaling": LLAMA3, "rope_theta": 9.0}, "rope_parameters has rope_theta = 500.0, and 9.0 is"),
        ("glm4_moe", {"mlp_bias": True}, "Glm4MoeForCausalLM with mlp_bias = True is not supported; only False is"),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "Glm4MoeForCausalLM with yarn and partial_rotary_factor = 0.5 has another attention than ours, unless",
        ),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": LLAMA3}},
            "Gemma3ForCausalLM with rope_scaling is not supported; rope_type of default and linear are",
        ),
        ("qwen3", {"num_attention_heads": 3}, "model.n_kv_heads: must divide n_heads = 3, got 2"),
    ],
)
def test_what_a_layout_has_not_is_refused_with_the_file(kind, keys, sentence, tmp_path, capfd):
    made(kind, tmp_path / "hf")
    changed(tmp_path / "hf", **keys)

    said = refused(tmp_path / "hf", capfd)
    assert f"{tmp_path / 'hf' / 'config.json'}" in said.splitlines()[-1]
    assert f": {sentence}" in said
    assert ".toml" not in said


def test_files_that_are_missing_cut_off_or_pickled_are_named(tmp_path, capfd):
    folder = tmp_path / "hf"
    made("llama", folder, max_shard_size="20KB")
    files = sorted(folder.glob("model-*.safetensors"))
    whole = files[0].read_bytes()

    files[0].write_bytes(whole[:-100])
    assert f"{files[0]} cannot be read" in refused(folder, capfd)
    files[0].unlink()
    assert f"{files[0]} is not there; the model's download is not complete" in refused(folder, capfd)
    shutil.copy(files[1], files[0])
    assert "do not agree about" in refused(folder, capfd)
    for file in (*folder.glob("*.safetensors*"),):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "has pickled weights, which can run code" in refused(folder, capfd)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00002.bin")  # without its index
    assert "has pickled weights, which can run code" in refused(folder, capfd)
    shutil.rmtree(folder)
    assert "cannot read" in refused(folder, capfd)


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte_is_written(tmp_path, capfd, monkeypatch):
    made("llama", tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    n_bytes = sum(one.nbytes for one in load_file(tmp_path / "hf" / "model.safetensors").values())
    capfd.readouterr()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2000}))

    for source, direction in (("hf", "forge"), ("ours/checkpoint", "huggingface")):
        assert main(["convert", str(tmp_path / source), "--to", direction, "--out", str(tmp_path / "new" / "out")]) == 2
        said = capfd.readouterr().err
        assert "has 2.0 KiB free, and the " in said
        assert f"needs {n_bytes / 1024:.1f} KiB; make room" in said
        assert {path.name for path in tmp_path.iterdir()} == {"hf", "ours"}


def test_a_model_that_has_no_form_there_is_refused_with_the_reason(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("abc " * 200)
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "transformer"\ndim = 16\nn_layers = 1\nn_heads = 2\n'
        'norm = "layernorm"\nnorm_placement = "both"\n'
        '[data]\nname = "text_files"\npath = "a.txt"\ntokenizer = "bytes"\n'
        "[train]\nsteps = 1\nseq_len = 16\nprecision = 'fp32'\n"
        '[optimizer]\nname = "adamw"\nlr = 1e-3\n[run]\nname = "r"\ndevice = "cpu"\n'
    )
    assert main(["run", "job.toml"]) == 0

    assert main(["convert", "runs/r", "--to", "huggingface", "--out", "out"]) == 2
    assert 'only norm = "rmsnorm" has a Hugging Face form' in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", "runs/r", "--to", "huggingface", "--out", "runs"]) == 2
    assert "runs exists already" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_as_the_library_writes_them(dtype, tmp_path):
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "c": torch.randn(2, 2, 2).to(dtype)}
    described = [Described(name, one.shape, dtype) for name, one in tensors.items()]

    write_shards(tmp_path, described, tensors.__getitem__, most_bytes=40)

    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) == (3 if dtype == torch.float32 else 2)
    found = {name: one for file in names for name, one in load_file(tmp_path / file).items()}
    assert all(torch.equal(found[name], one) for name, one in tensors.items())
    assert all(torch.equal(Shards(tmp_path).read(name), one) for name, one in tensors.items())
