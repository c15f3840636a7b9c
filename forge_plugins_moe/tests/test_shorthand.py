"""A dense configuration turned sparse, with what is installed: the job it becomes, and what is said about mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ConfigError
from forge_core.job import dump_job, load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover

DENSE = """\
[model]
name = "transformer"
dim = 64
n_layers = 2
n_heads = 4

[model.feed_forward]
name = "mlp"
hidden_dim = 96

[data]
name = "text_files"
path = "corpus"

[train]
steps = 10
seq_len = 64
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3
"""
TABLE = """
[model.moe]
shared_experts = 1

[model.moe.router]
name = "sigmoid_topk"
top_k = 4
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return discover()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalog: Catalog) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def load(*settings: str, text: str = DENSE, catalog: Catalog = catalog, **more: Any) -> Any:
        Path("job.toml").write_text(text)
        return load_job(Path("job.toml"), settings, catalog=catalog, **more)

    return load


@pytest.fixture
def complaint(load: Callable[..., Any]) -> Callable[..., str]:
    def complaint(*settings: str, **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*settings, **more)
        return str(caught.value)

    return complaint


def test_one_setting_makes_a_dense_configuration_sparse(load):
    layer = load("--model.num_experts=8").model.config.feed_forward

    assert layer.qualified_name == "forge-plugins-moe:moe"
    assert layer.config.n_experts == 8
    assert layer.config.dense.config.hidden_dim == 96
    assert layer.config.router.name == "softmax_topk"


def test_a_table_says_the_rest(load):
    layer = load("--model.num_experts=8", text=DENSE + TABLE).model.config.feed_forward.config

    assert layer.shared_experts == 1
    assert layer.router.name == "sigmoid_topk"
    assert layer.router.config.top_k == 4


def test_it_is_the_job_that_the_long_form_is(load):
    long = 'model.feed_forward={name="moe",n_experts=8,router="hash",dense={name="mlp",hidden_dim=96}}'

    assert load("--model.num_experts=8", "--model.moe.router=hash") == load(long)


def test_the_resolved_job_has_the_long_form_and_can_be_turned_dense_again(load):
    sparse = dump_job(load("--model.num_experts=8", text=DENSE + TABLE))

    assert "num_experts" not in sparse
    assert "model.moe" not in sparse
    assert load(text=sparse) == load("--model.num_experts=8", text=DENSE + TABLE)
    assert load("--model.num_experts=0", text=sparse) == load()
    assert load("--model.num_experts=16", text=sparse).model.config.feed_forward.config.n_experts == 16


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        (["num_experts=64", "moe.router.experts_per_token=0.5"], "of 64 tokens (train.seq_len)"),
        (["num_experts=64", "moe.router.experts_per_token=1"], None),
        (
            ["num_experts=64", "moe.router={name='expert_choice', scope='batch', experts_per_token=0.2}"],
            "of 256 tokens (train.seq_len, train.batch_size and parallel.cp)",
        ),
        (["num_experts=64", "moe.router={name='expert_choice', scope='batch', experts_per_token=0.25}"], None),
    ],
)
def test_experts_that_take_no_token_of_a_sequence_are_refused(load, complaint, settings, taken):
    settings = ["train.batch_size=4", "model.moe.router.name=expert_choice", *(f"model.{one}" for one in settings)]

    if taken is None:
        load(*settings)
    else:
        said = complaint(*settings)
        assert "router.experts_per_token" in said
        assert f"{taken}, each of the 64 experts takes" in said


def test_no_experts_are_the_dense_job(load):
    assert load("--model.num_experts=0", text=DENSE + TABLE) == load()


def test_a_file_that_extends_a_dense_one_and_the_command_line_are_layers_as_always(load, tmp_path: Path):
    (tmp_path / "dense.toml").write_text(DENSE)

    job = load("--model.moe.router.top_k=3", "--model.num_experts=6", text=f'extends = "dense.toml"\n{TABLE}')

    assert job.model.config.feed_forward.config.n_experts == 6
    assert job.model.config.feed_forward.config.router.config.top_k == 3


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("--model.num_experts=-8", "model.num_experts: must be at least 0, got -8"),
        ("--model.num_experts=eight", 'model.num_experts: expected an integer, got the string "eight"'),
        ("--model.num_experts=false", "model.num_experts: expected an integer, got false"),
        ("--model.moe=8", "model.moe: expected a table, got the integer 8"),
        ("--model.moe.rooter=hash", "model.moe.rooter: unknown key; did you mean 'router'?"),
        (
            "--model.moe.router=hsah",
            "model.moe.router: no installed plugin provides a router named 'hsah'. Did you mean",
        ),
        ("--model.moe.shared_gate=true", "model.moe.shared_gate: has no effect without shared_experts"),
        ("--model.moe.layers=[7]", "model.moe.layers: leaves none of the 2 layers sparse"),
        ("--model.moe.first_dense=2", "model.moe.first_dense: leaves none of the 2 layers sparse"),
        ("--model.moe.every=3", "model.moe.every: leaves none of the 2 layers sparse"),
    ],
)
def test_a_problem_has_the_key_that_was_written(complaint, setting: str, sentence: str):
    settings = [setting] if "num_experts" in setting else ["--model.num_experts=8", setting]

    assert any(line.startswith(f"{setting}: {sentence}") for line in complaint(*settings).splitlines())


def test_a_negative_number_is_one_problem_whatever_else_is_said_of_experts(complaint):
    said = complaint("--model.num_experts=-8", text=DENSE + TABLE).splitlines()

    assert said[0] == "--model.num_experts=-8: model.num_experts: must be at least 0, got -8"
    assert not any("model.moe" in line or "feed_forward" in line for line in said)


def test_a_problem_in_a_file_has_its_line(complaint):
    text = DENSE.replace("hidden_dim = 96", "hidden_dims = 96") + TABLE.replace("top_k", "topk")

    assert complaint("--model.num_experts=8", text=text).splitlines()[:2] == [
        "job.toml:9: model.feed_forward.hidden_dims: unknown key; did you mean 'hidden_dim'?",
        "job.toml:29: model.moe.router.topk: unknown key; did you mean 'top_k'?",
    ]


def test_experts_that_cannot_be_shared_out_are_refused_by_the_key_that_was_written(complaint):
    said = complaint("--model.num_experts=6", "--parallel.ep=4", world_size=4)

    assert "--model.num_experts=6: model.num_experts: 6 experts cannot be shared out evenly to parallel.ep = 4" in said


def test_a_sparse_layer_is_described_once(complaint):
    sparse = 'model.feed_forward={name="moe",n_experts=8}'

    said = complaint(sparse, "--model.moe.router=hash")
    beside = complaint("--model.num_experts=8", "--model.moe.dense=mlp")

    assert "--model.moe.router=hash: model.moe: feed_forward is 'moe' already" in " ".join(said.split())
    assert "model.moe: has dense, and feed_forward is that layer too; give one of the two" in beside


def test_experts_have_to_be_counted(complaint):
    assert "model.moe.n_experts: is required (an integer)" in complaint(text=DENSE + TABLE)


def test_without_this_package_it_says_what_to_install(complaint, catalog):
    without = Catalog([plugin for plugin in catalog.plugins if plugin.distribution != "forge-plugins-moe"])

    said = complaint("--model.num_experts=8", catalog=without)

    assert said.startswith("--model.num_experts=8: model.num_experts: ")
    assert "pip install forge-plugins-moe" in said


PASS = "parallel.passes.expert_parallel"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["parallel.ep=4", f"{PASS}.dispatcher={{name='hierarchical', ranks_per_node=3}}"],
            "ranks_per_node: with 3 ranks a node, the 4 ranks of parallel.ep are not shared out evenly to 2 nodes",
        ),
        (
            ["parallel.ep=2", "parallel.tp=2", f"{PASS}.dispatcher={{name='hierarchical', ranks_per_node=4}}"],
            None,
        ),
        (
            ["parallel.ep=4", f"{PASS}.overlap=true"],
            "overlap: the layers have no shared experts that could be computed",
        ),
        (
            [f"{PASS}.overlap=true"],
            "there is nothing to share experts with, as parallel.ep = 1; raise it or take the pass",
        ),
        (["parallel.ep=4", f"{PASS}.overlap=true", f"{PASS}.chunks=2"], None),
        (["parallel.ep=4", f"{PASS}.overlap=true", "model.moe.shared_experts=1"], None),
        (
            ["parallel.tp=2", "model.moe.shared_experts=1", "model.moe.shared_hidden_dim=33"],
            "the 33 features of all shared experts cannot be shared out evenly to parallel.tp = 2",
        ),
        (["parallel.tp=2", "model.moe.shared_experts=2", "model.moe.shared_hidden_dim=33"], None),
        (["parallel.tp=2", "model.moe.width_factor=0.51"], "hidden_dim: 49 features cannot be shared out evenly to"),
        (["model.moe.layers=[0,0]"], "layers: names the layer 0 twice"),
    ],
)
def test_what_is_known_before_anything_is_built_is_refused_before(load, complaint, settings, sentence):
    settings = ["model.num_experts=8", *settings]

    if sentence is None:
        load(*settings, world_size=4)
    else:
        assert sentence in complaint(*settings, world_size=4)
