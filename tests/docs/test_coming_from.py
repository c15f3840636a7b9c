"""Pages for those who know another framework: their keys are there, their files are valid, their commands work."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from doc_pages import DOCS, ROOT, commands, files
from forge_core.cli import main

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("coming-from/*.md") if path.stem != "index")
OTHERS = {
    r"--nproc 8": "needs eight ranks; `forge validate` looks at the same job",
    r"qwen|Qwen": "tests/test_doc_commands.py has the page on published models",
}
"""Commands that are not typed here, by pattern, with the reason."""


SHORT = "model.moe."


def rows(page: str) -> list[list[str]]:
    """The cells of the tables of a page that have ``theirs`` and ``Forge`` for heads."""
    found: list[list[str]] = []
    inside = False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| theirs | Forge |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            found.append(cells)
    return found


def keys(cell: str) -> list[tuple[str, str | None]]:
    """Each key in a cell, and the value that stands behind it."""
    return [
        (key, value or None)
        for key, value in re.findall(r'`([a-z_]+(?:\.[a-z_0-9]+)+)(?: = "?([^"`]+)"?)?`', cell)
        if key.split(".")[0] in schema()["properties"] and not key.endswith((".py", ".bin"))
    ]


@cache
def schema() -> dict:
    """What ``forge config --schema`` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["config", "--schema"]) == 0
    return json.loads(said.getvalue())


def places(part: dict, chosen: str | None) -> Iterator[dict]:
    """What a part of the schema may be; of a choice of components, those of the name that is chosen, or all."""
    if "$ref" in part:
        yield from places(schema()["$defs"][part["$ref"].removeprefix("#/$defs/")], chosen)
        return
    yield part
    for way in ("anyOf", "oneOf"):
        for one in part.get(way, ()):
            yield from places(one, chosen)
    for one in part.get("allOf", ()):
        name = one["if"]["properties"]["name"].get("const")
        if chosen is None or name == chosen:
            yield from places(one["then"], chosen)
    if "items" in part:
        yield from places(part["items"], chosen)


def finds(key: str, value: str | None, chosen: dict[str, str]) -> bool:
    """Whether a file may have the key, with the value, where components have been ``chosen`` by their place."""
    if key.startswith(SHORT):  # the schema takes anything there; the keys are those of the layer
        key, chosen = key.replace(SHORT, "model.feed_forward."), {**chosen, "model.feed_forward": "moe"}
        chosen["model.feed_forward.router"] = chosen.get("model.moe.router", "sigmoid_topk")
    here, path = [schema()], ""
    for part in key.split("."):
        name = chosen.get(path) if part != "name" else None
        reached = [one for place in here for one in places(place, name)]
        here = [one["properties"][part] for one in reached if part in one.get("properties", {})]
        path = f"{path}.{part}".strip(".")
        if not here:
            return False
    if value is None or not key.endswith(".name"):
        return True
    return any(value in one.get("enum", ()) for place in here for one in places(place, None))


@pytest.mark.parametrize("page", PAGES)
def test_the_keys_of_forge_in_the_tables_are_there(page):
    wrong = []
    for cells in rows(page):
        for cell in cells[1:]:
            named = [(key, value) for key, value in keys(cells[1]) if value and key.endswith(".name")]
            chosen = {key.removesuffix(".name"): value for key, value in named}
            wrong += [key for key, value in keys(cell) if not finds(key, value, chosen)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_the_keys_of_forge_in_the_text_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("| "))
    assert [key for key, value in keys(prose) if not finds(key, value, {})] == []


@pytest.mark.parametrize(
    ("key", "value", "chosen", "there"),
    [
        ("train.steps", None, {}, True),
        ("train.max_steps", None, {}, False),
        ("optimizer.momentum", None, {}, True),
        ("optimizer.momentum", None, {"optimizer": "adamw"}, False),
        ("optimizer.name", "muon", {}, True),
        ("optimizer.name", "moun", {}, False),
        ("parallel.passes.fp8.exclude", None, {}, True),
        ("parallel.passes.fp9", None, {}, False),
        ("callbacks.start", None, {"callbacks": "profile"}, True),
        ("checkpoint.load.path", None, {}, True),
    ],
)
def test_a_key_is_looked_up_in_the_schema(key, value, chosen, there):
    assert finds(key, value, chosen) is there


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_to_type_what_differs_and_what_is_missing(page):
    heads = re.findall(r"^## (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.M)

    assert heads[:2] == ["What to type first", "What is different in meaning"]
    assert heads[-1] == "What Forge does not have"
    assert len(rows(page)) > 25


def test_the_table_of_the_reference_system_has_every_key_of_it():
    """Of KempnerForge 0.1, section by section."""
    page = "docs/coming-from/kempnerforge.md"
    theirs = {key for cells in rows(page) for key in re.findall(r"`([a-z_.]+)`", cells[0])}

    listed = {f"{section}.{key}" for section, names in KEMPNER_FORGE.items() for key in names.split()}
    assert listed - theirs == set()


KEMPNER_FORGE = {
    "model": """dim n_layers n_heads n_kv_heads vocab_size ffn_dim_multiplier ffn_hidden_dim norm_type norm_eps
        activation max_seq_len rope_theta tie_embeddings qk_norm init_std model_type sdpa_backend num_experts moe_top_k
        moe_frequency moe_router moe_shared_experts moe_aux_loss_weight moe_capacity_factor
        moe_sequence_aux_loss_weight moe_gradient_scale moe_bias_schedule moe_packed_experts
        moe_expert_ffn_multiplier moe_router_z_loss_weight""",
    "train": """batch_size seq_len max_steps grad_accum_steps grad_clip_norm seed data_seed compile_model
        mixed_precision activation_checkpointing loss_fn z_loss_weight ce_chunk_size shutdown_timeout_sec
        nccl_health_check_interval""",
    "optimizer": """name lr weight_decay betas eps fused muon_momentum muon_ns_steps muon_adam_lr
        schedule_free_warmup_steps""",
    "scheduler": "name warmup_steps decay_steps min_lr_ratio stable_steps wsd_decay_type rex_alpha",
    "data": """dataset_path file_pattern tokenizer_path num_workers pin_memory prefetch_factor hf_dataset_name
        hf_dataset_config hf_dataset_split hf_dataset_text_field hf_dataset_image_field hf_dataset_prompt_field
        hf_image_size hf_streaming pack_sequences datasets mix_temperature phases anneal_start_step anneal_weights""",
    "eval": "enabled interval steps dataset_path file_pattern hf_dataset_name hf_dataset_config hf_dataset_split",
    "distributed": "dp_shard dp_replicate tp pp pp_schedule cp ep nccl_timeout_sec backend",
    "checkpoint": """dir interval dyn_ckpt_window async_mode keep_last_n load_path export_dtype exclude_from_loading
        ignore_freeze_mismatch""",
    "metrics": """log_interval enable_wandb enable_tensorboard wandb_project wandb_run_name wandb_run_id
        tensorboard_dir""",
    "profiling": "enable start_step end_step trace_dir",
    "vision_encoder": "type path feature_dim num_tokens",
    "adapter": "type hidden_dim activation pool_window pool_heads",
    "vlm": """arch max_text_len freeze freeze_schedule module_patterns cross_attention_every_n_layers
        cross_attention_n_heads cross_attention_n_kv_heads mot_modalities mot_image_n_heads mot_image_n_kv_heads
        mot_warm_start_from_text mot_warm_start_path moma_modalities moma_experts_per_modality moma_capacity_factor
        moma_gumbel_noise""",
    "video": """data_root dataset_type dataset_name sampling_policy split max_samples max_frames min_frames fps
        frame_size prompt""",
}
"""Its configuration keys, of ``shared/reference/features.md``."""


def test_the_arguments_of_the_trainer_are_those_of_transformers():
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    table = [cells for cells in rows("docs/coming-from/huggingface-trainer.md") if "." not in cells[0]]
    named = {key for cells in table for key in re.findall(r"`([a-z_0-9]+)`", cells[0])}
    assert len(named) > 40
    assert named - known == {"compute_metrics", "compute_loss"}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader, with a text of theirs."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "shakespeare").mkdir()
    for number in range(24):
        words = " ".join(str(one * one % 997) for one in range(number, number + 900))
        (tmp_path / "corpus" / f"{number}.txt").write_text(words)
    (tmp_path / "shakespeare/input.txt").write_text("ROMEO: but soft. " * 300)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.mark.nightly  # by day, README has such commands
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_types_first_works(page, reader, capfd):
    for name, text in files(page).items():
        (reader / name).write_text(text, encoding="utf-8")
    for command, _ in commands(page):
        if any(re.search(pattern, command) for pattern in OTHERS):
            continue
        assert main(shlex.split(command)[1:]) == 0, f"{command}\n{capfd.readouterr()}"
