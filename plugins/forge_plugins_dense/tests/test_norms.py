"""The choice of a norm: ours by name, and one of another package."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.config.problems import ConfigProblems
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.job import plain
from forge_core.registry.discovery import discover
from forge_plugins_dense.attention import Attention
from forge_plugins_dense.huggingface import hf_config
from forge_plugins_dense.norm import ZeroCenteredRMSNorm, make_norm, norm_roles
from forge_plugins_dense.norm_config import as_norm
from forge_plugins_dense.weight_layouts import GraniteLayout
from parity_matrix.launch import Launcher, Work
from parity_matrix.logits import logits_and_gradients

PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "forge_norms.md"
OURS = ("rmsnorm", "layernorm", "zero_centered_rmsnorm")
TABLE = {"name": "transformer", "dim": 32, "n_layers": 2, "n_heads": 4}
JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 2
n_heads = 2
max_seq_len = 16
qk_norm = true

[model.norm]
name = "dyt"
alpha = 0.75

[data]
name = "synthetic"
vocab_size = 50

[optimizer]
name = "adamw"
lr = 0.05

[train]
steps = 12
seq_len = 16
batch_size = 4
precision = "fp32"

[run]
device = "cpu"

[plugins]
files = ["dyt.py"]
"""


class Doubled(torch.nn.Module):
    """Neither a norm of ours nor one with methods of its own."""

    def __init__(self, _: None, *, dim: int, eps: float) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.empty(dim))
        self.scale = torch.nn.Parameter(torch.empty(dim))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden * self.scale + self.bias


DOUBLED = ComponentRef(kind="norm", name="doubled", provider="acme", factory=f"{__name__}:Doubled", config=None)


def page_text() -> str:
    """The module of the page, as a plugin file."""
    (text,) = re.findall(
        r":caption: src/dynamic_tanh/norm.py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
    return "from forge_core.api import component\n" + text.replace(
        "class DyT", '@component("norm", name="dyt", summary="of the page")\nclass DyT'
    )


@pytest.fixture(scope="module")
def resolve():
    build = ComponentBuilder(discover())

    def resolved(**keys: Any) -> Any:
        return build.resolve("model", TABLE | keys).config

    return resolved


@pytest.mark.parametrize("name", OURS)
def test_a_name_is_short_for_the_component(resolve, tiny_config, name):
    config = resolve(norm=name)

    assert config.norm == as_norm(name) == tiny_config(norm=name).norm
    assert resolve(**{key: one for key, one in plain(config).items() if key != "name"}) == config
    assert plain(config)["norm"] == {"name": f"forge-plugins-dense:{name}"}


def test_without_a_norm_it_is_rmsnorm(resolve):
    assert resolve() == resolve(norm="rmsnorm")


def test_a_wrong_norm_is_told(resolve, tiny_config):
    with pytest.raises(ConfigProblems, match=r"named 'rmsnrom'\. Did you mean 'rmsnorm'\?"):
        resolve(norm="rmsnrom")
    with pytest.raises(ConfigProblems, match="unknown key"):
        resolve(norm={"name": "rmsnorm", "eps": 1e-6})
    with pytest.raises(ValueError, match="'rmsnrom' is none of rmsnorm, layernorm, zero_centered_rmsnorm"):
        tiny_config(norm="rmsnrom")


def test_norms_of_heads_are_of_the_kind_of_the_model(tiny_config, build):
    built = {
        name: Attention(tiny_config(norm=norm, qk_norm=True), tiny_config().layer(0), build).q_norm
        for name, norm in (*((name, name) for name in OURS), ("doubled", DOUBLED))
    }

    found = {name: type(norm) for name, norm in built.items()}
    rms = torch.nn.RMSNorm
    assert found == {"rmsnorm": rms, "layernorm": rms, "zero_centered_rmsnorm": ZeroCenteredRMSNorm, "doubled": Doubled}
    assert built["doubled"].scale.shape == (8,)


def test_a_norm_over_all_heads_is_no_norm_of_another_package(tiny_config):
    tiny_config(norm="layernorm", qk_norm=True, qk_norm_over="all")
    with pytest.raises(ValueError, match='"all" is an RMSNorm, and norm = "doubled" is another; choose "head"'):
        tiny_config(norm=DOUBLED, qk_norm=True, qk_norm_over="all")


def test_a_norm_without_methods_has_the_usual_values_and_roles(tiny_model, tokens):
    model = tiny_model(norm=DOUBLED)
    norm = model.blocks["1"].feed_forward_norm

    assert (norm.scale == 1).all()
    assert (norm.bias == 0).all()
    assert norm_roles(norm, "a.") == {"a.scale": "norm", "a.bias": "bias"}
    assert model.parameter_roles().keys() == {name for name, _ in model.named_parameters()}
    assert model(tokens).isfinite().all()


def test_a_layer_without_the_builder_refuses_norms_of_other_packages(tiny_config):
    with pytest.raises(ConfigError, match='norm = "acme:doubled": this layer was made without the builder'):
        make_norm(DOUBLED, 8, 1e-5)
    assert Attention(tiny_config(qk_norm=True), tiny_config().layer(0)).q_norm is not None


def test_a_norm_of_another_package_has_no_form_elsewhere(tiny_config):
    with pytest.raises(
        ConfigError, match='only norm = "rmsnorm" has a Hugging Face form, and this model has "doubled"'
    ):
        hf_config(tiny_config(norm=DOUBLED), vocab_size=50)
    with pytest.raises(ConfigError, match="GraniteForCausalLM has another norm"):
        GraniteLayout(None).config_json(tiny_config(norm=DOUBLED), 50)


@pytest.fixture
def dyt_job(tmp_path, monkeypatch):
    (tmp_path / "dyt.py").write_text(page_text(), encoding="utf-8")
    (tmp_path / "decoder.toml").write_text(JOB, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def curve(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_decoder_trains_with_the_norm_of_the_page(dyt_job):
    assert main(["run", "decoder.toml", "run.name=one", "train.steps=6", "scheduler.name=constant"]) == 0
    assert main(["run", "decoder.toml", "run.name=one", "scheduler.name=constant"]) == 0  # from the checkpoint

    run = dyt_job / "runs" / "one"
    losses = curve(run)
    assert losses[-1] < losses[0] - 0.1
    saved = tomllib.loads((run / "job.toml").read_text(encoding="utf-8"))["model"]["norm"]
    assert saved == {"name": "file:dyt.py:dyt", "alpha": 0.75}


@pytest.mark.nightly  # by day, norms of ours have these roles in tests/parity, and this one passes its kit
def test_its_gradients_on_two_ranks_are_those_of_one_process(tmp_path):
    """Tensor parallelism, where each rank has a part of the positions, and of the heads whose norm it is."""
    (tmp_path / "dyt.py").write_text(page_text(), encoding="utf-8")
    settings = [f"plugins.files=['{tmp_path / 'dyt.py'}']", "model.norm.name=dyt", "model.qk_norm=true"]
    settings += ["model.norm_placement=both", 'callbacks=[{name="logits_probe"}]', "train.steps=1"]
    settings += ["scheduler.warmup_steps=0", "eval.interval=0"]
    launcher = Launcher(tmp_path)
    launcher.launch([Work("alone", 1, settings), Work("tp2", 2, [*settings, "parallel.tp=2"])])
    assert launcher.failures == {}

    expected, found = (logits_and_gradients(launcher.run_dir(name)) for name in ("alone", "tp2"))

    assert found.keys() == expected.keys()
    assert sum("alpha" in name for name in found) > 10
    for name, tensor in found.items():
        assert (tensor - expected[name]).norm() < 1e-5 * expected[name].norm(), name
