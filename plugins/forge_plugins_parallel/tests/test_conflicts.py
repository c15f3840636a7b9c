"""Every need and every conflict that a pass declares is found by validation, all of a job at once."""

import re

import pytest

from forge_core.api import PassComponent
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_testing.package import PluginConformance

JOB = """
[run]
device = "cpu"

[model]
name = "transformer"
dim = 2048
n_layers = 4
n_heads = 4

[data]
name = "text_files"
path = "corpus"

[train]
steps = 10
seq_len = 32
grad_accumulation = 4
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3
"""
PASSES = "parallel.passes"
AC, COMPILE, CP, FP8, FSDP, PIPELINE, TP = (
    f"{PASSES}.{name}"
    for name in (
        "activation_checkpointing",
        "compile",
        "context_parallel",
        "fp8",
        "fsdp",
        "pipeline",
        "tensor_parallel",
    )
)
ZERO_BUBBLE = ["parallel.pp=2", f"{PIPELINE}.schedule=ZBVZeroBubble"]
GATHERED = [f"{FP8}={{all_gather = true, emulate = true}}"]
OFFLOADED = ["run.device=cuda", f"{FSDP}.cpu_offload=true"]
ASYNC = ["run.device=cuda", "parallel.tp=2", f"{TP}.async_tp=true"]

CASES = {
    ("activation_checkpointing", "run.device"): (
        ["run.device=cpu", f"{AC}.mode=offload"],
        'activation_checkpointing.mode: "offload" cannot be combined with run.device = "cpu"',
        "activation_checkpointing.mode=full",
    ),
    ("pipeline", "fsdp"): (
        [*ZERO_BUBBLE, f"{FSDP}.reshard_after_forward=always"],
        "cannot be combined with reshard_after_forward = \"always\" of 'fsdp'",
        "fsdp.reshard_after_forward=never",
    ),
    ("activation_checkpointing", "parallel.pp"): (
        ["parallel.pp=2", f'{AC}={{mode = "auto", memory_gib = 1.0}}'],
        'activation_checkpointing.mode: "auto" cannot be combined with parallel.pp = 2',
        'activation_checkpointing={mode = "full"}',
    ),
    ("activation_checkpointing", "compile"): (
        [f'{AC}={{mode = "budget", budget = 0.5}}'],
        "activation_checkpointing.mode: \"budget\" needs the pass 'compile': it is torch.compile",
        "compile=true",
    ),
    ("compile", "fsdp"): (
        [f"{COMPILE}.whole_model=true", f"{FSDP}=true"],
        "compile.whole_model: true cannot be combined with 'fsdp'",
        "compile.whole_model=false",
    ),
    ("compile", "activation_checkpointing"): (
        ["run.device=cuda", f"{COMPILE}.whole_model=true", f"{AC}.mode=offload"],
        "compile.whole_model: true cannot be combined with mode = \"offload\" of 'activation_checkpointing'",
        "compile.whole_model=false",
    ),
    ("context_parallel", "run.device"): (
        ["parallel.cp=2", f"{CP}.method=ring", "run.device=mps"],
        'context_parallel.method: "ring" cannot be combined with run.device = "mps"',
        "context_parallel.method=gather",
    ),
    ("fp8", "fsdp"): (GATHERED, "fp8.all_gather: true needs the pass 'fsdp'", "fsdp=true"),
    ("fp8", "parallel.tp"): (
        [*GATHERED, f"{FSDP}=true", "parallel.tp=2"],
        "fp8.all_gather: true cannot be combined with parallel.tp = 2",
        "fp8.all_gather=false",
    ),
    ("fp8", "train.precision"): (
        [f"{FP8}=true"],
        'fp8.emulate: false cannot be combined with train.precision = "fp32"',
        "fp8={emulate = true}",
    ),
    ("fsdp", "parallel.pp"): (
        ["parallel.pp=2", f"{FSDP}.keep_gathered=true"],
        "fsdp.keep_gathered: true cannot be combined with parallel.pp = 2",
        "fsdp.keep_gathered=false",
    ),
    ("fsdp", "run.device"): (
        [*OFFLOADED, "run.device=cpu"],
        'fsdp.cpu_offload: true cannot be combined with run.device = "cpu"',
        "fsdp.cpu_offload=false",
    ),
    ("fsdp", "activation_checkpointing"): (
        [*OFFLOADED, f'{AC}={{mode = "auto", memory_gib = 1.0}}'],
        "fsdp.cpu_offload: true cannot be combined with mode = \"auto\" of 'activation_checkpointing'",
        "fsdp.cpu_offload=false",
    ),
    ("fsdp", "fp8"): (
        [*OFFLOADED, *GATHERED],
        "fsdp.cpu_offload: true cannot be combined with all_gather = true of 'fp8'",
        "fsdp.cpu_offload=false",
    ),
    ("tensor_parallel", "compile"): (
        ASYNC,
        "tensor_parallel.async_tp: true needs the pass 'compile'",
        "compile=true",
    ),
    ("tensor_parallel", "run.device"): (
        [*ASYNC, f"{COMPILE}=true", "run.device=cpu"],
        'tensor_parallel.async_tp: true cannot be combined with run.device = "cpu"',
        "tensor_parallel.async_tp=false",
    ),
    ("tensor_parallel", "fp8"): (
        [*ASYNC, f"{COMPILE}=true", f"{FP8}.emulate=true"],
        "tensor_parallel.async_tp: true cannot be combined with 'fp8'",
        "tensor_parallel.async_tp=false",
    ),
}
"""What is declared: settings, what is said of them, and a further setting under ``[parallel.passes]`` that mends it."""


class TestPlugin(PluginConformance):
    dist = "forge-plugins-parallel"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("conflicts") / "job.toml"
    path.write_text(JOB)
    catalog = discover()

    def find(overrides):
        try:
            load_job(path, overrides, catalog=catalog)
        except ConfigError as error:
            return str(error).splitlines()
        return []

    return find


@pytest.mark.parametrize("declared", CASES, ids=" and ".join)
def test_what_is_declared_is_refused_and_nothing_else_is(problems, declared):
    overrides, sentence, mended = CASES[declared]

    (line,) = problems(overrides)

    assert f"parallel.passes.{declared[0]}." in line
    assert sentence in line
    assert problems([*overrides, f"{PASSES}.{mended}"]) == []


def test_every_declaration_has_a_case():
    installed = discover().components("parallel_pass")
    passes = [one.component for one in installed if one.plugin.distribution == TestPlugin.dist]
    declared = {
        (one.name, other.other)
        for one in passes
        if isinstance(one, PassComponent)
        for other in (*one.conflicts, *(need for need in one.needs if need.when))
    }

    assert declared == set(CASES)


@pytest.mark.parametrize("settings", [["parallel.tp=2", "parallel.pp=2"], ["parallel.pp=2", "parallel.tp=2"]])
def test_the_degree_is_blamed_for_which_a_pass_is_there(problems, settings):
    (line,) = problems([*settings, "train.grad_accumulation=1"])

    assert line.startswith("parallel.pp=2: parallel.passes.pipeline: train.grad_accumulation = 1 gives")


def test_conflicts_are_told_together_with_everything_else(problems):
    overrides = [*CASES["pipeline", "fsdp"][0], *CASES["compile", "fsdp"][0]]

    said = "\n".join(problems([*overrides, "parallel.tp=3"]))

    assert "pipeline.schedule" in said
    assert "compile.whole_model" in said
    assert "4 heads cannot be shared out evenly to parallel.tp = 3 ranks" in said


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("reduce-overhead", 'records CUDA graphs, .*; take "default"'),
        ("max-autotune", 'records CUDA graphs, .*; take "max-autotune-no-cudagraphs"'),
        ("fastest", "must be one of default, max-autotune-no-cudagraphs; got 'fastest'"),
    ],
)
def test_a_mode_of_compile_that_cannot_train_is_refused_with_one_that_can(problems, mode, sentence):
    (line,) = problems([f"{COMPILE}.mode={mode}"])

    assert re.search(rf"compile\.mode: .*{sentence}", line), line


def test_degrees_that_do_not_fit_hide_no_conflict(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)

    with pytest.raises(ConfigError) as raised:
        load_job(path, [*CASES["compile", "fsdp"][0], "parallel.tp=2"], catalog=discover(), world_size=3)

    assert "3 ranks cannot be divided by the degrees" in str(raised.value)
    assert "compile.whole_model: true cannot be combined with 'fsdp'" in str(raised.value)


PACKED = {
    "chat": '{name = "chat", path = "chats.jsonl"}',
    "prompt_completion": '{name = "prompt_completion", path = "pairs.jsonl"}',
    "preference_pairs": '{name = "preference_pairs", path = "pairs.jsonl", reference = "reference.npz"}',
    "image_text": '{name = "image_text", path = "images.jsonl", token_grid = [2, 2], packing = true}',
    "text_files": '{name = "text_files", path = "corpus", document_mask = true}',
}
"""Data whose samples have documents that are kept apart."""
IN_A_RING = ["parallel.cp=2", f"{CP}.method=ring", "eval.interval=0"]


def mixed(table):
    return f'{{name = "mixture", sources = [{{name = "one", weight = 1.0, source = {table}}}]}}'


@pytest.mark.parametrize("name", PACKED)
def test_a_ring_is_refused_for_data_with_documents_before_it_runs(problems, name):
    others = ["loss.name=dpo"] if name == "preference_pairs" else []
    for settings in (
        [f"data={PACKED[name]}"],
        [f"data={mixed(PACKED[name])}"],
        [f"eval.data={PACKED[name]}", "eval.interval=1"],
        [f'evaluations=[{{name = "perplexity", interval = 1, data = {PACKED[name]}}}]'],
    ):
        said = [line for line in problems([*IN_A_RING, *others, *settings]) if "cannot keep the documents" in line]

        assert [line.partition(": ")[0] for line in said] == [f"{CP}.method=ring"], settings
        assert not any("documents" in line for line in problems([*settings, *others, "parallel.cp=2", f"{CP}={{}}"]))


@pytest.mark.parametrize(
    "table", [PACKED["image_text"].replace("true", "false"), PACKED["text_files"].replace("true", "false")]
)
def test_a_ring_takes_data_without_documents(problems, table):
    assert problems([*IN_A_RING, f"data={table}"]) == []
    assert problems([*IN_A_RING, f"data={mixed(table)}"]) == []
