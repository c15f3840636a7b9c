"""What cannot be computed at modules that a pass has changed is refused by name, before the model runs; all else of
the same model can be read."""

from __future__ import annotations

import os
import sys

import pytest

import fork_server
from forge_core.cli import main
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job

PLUGIN = """
from forge_core.api import PassComponent, hookimpl

FORGE_API = "1.3"


@hookimpl
def forge_parallel_passes():
    for name, factory in {"mum": "Mum", "frank": "Frank", "sly": "Sly"}.items():
        yield PassComponent(
            name=name,
            summary="attention by a kernel of ours",
            factory=f"acme_kernels.kernel:{factory}",
            config="acme_kernels.kernel:Config",
            phase="swap",
        )
    yield PassComponent(
        name="mute",
        summary="deals values to ranks, and does not say how",
        factory="acme_kernels.kernel:Mute",
        config="acme_kernels.kernel:Config",
        phase="shard",
    )
"""
KERNEL = """
from pathlib import Path

import attrs
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.observation import Ends


@attrs.frozen(kw_only=True)
class Config:
    said: str


class Blocks:
    '''Which keys are seen, in a form that the kernel alone can read.'''


class Kernel(nn.Module):
    softcap = None

    def __init__(self, said):
        super().__init__()
        self.said = Path(said)

    def forward(self, q, k, v, mask, causal, *_, **__):
        self.said.write_text("the model has run")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Mum:
    '''Says nothing about what it hides.'''

    def __init__(self, config, /, **_):
        self.said = config.said

    def apply(self, model, context):
        for block in model.blocks.values():
            block.attention.core = Kernel(self.said)
        return model, [f"blocks.{layer}.attention.core" for layer in model.blocks]


class Mute(Mum):
    '''Says nothing about how values lie.'''


class Frank(Mum):
    '''Says so.'''

    def layout(self, model):
        hidden = Ends(hidden="acme's kernel has a mask that it alone can read")
        return {f"blocks.{layer}.attention.core": hidden for layer in model.blocks}


class Sly(Mum):
    '''Leaves our kernels, and gives them masks of its own.'''

    def apply(self, model, context):
        for block in model.blocks.values():
            core, attend = block.attention.core, Kernel(self.said).forward
            core.register_forward_pre_hook(lambda _, args: (*args[:3], Blocks(), False))
            core.forward = attend
        return model, ["blocks"]
"""


@pytest.fixture
def forge(tmp_path):
    """Runs a forge command where ``acme-kernels`` is installed."""
    package, facts = tmp_path / "site" / "acme_kernels", tmp_path / "site" / "acme_kernels-1.0.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    for name, text in {"__init__": "", "plugin": PLUGIN, "kernel": KERNEL}.items():
        (package / f"{name}.py").write_text(text)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[forge.v1]\nacme-kernels = acme_kernels.plugin\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package.parent)}

    def forge(*arguments):
        command = [sys.executable, "-m", "forge_core", *map(str, arguments)]
        return fork_server.run(command, env=environment, capture_output=True, text=True, timeout=200)

    return forge


@pytest.mark.parametrize(
    ("name", "runs", "message"),
    [
        (
            "mum",
            False,
            "the pass mum has put a module of its own there, and has no layout that says what can be computed",
        ),
        ("frank", False, "acme's kernel has a mask that it alone can read"),
        (
            "sly",
            True,
            "the mask that AttentionCore is given cannot be read: it is a Blocks, and must be a tensor of torch.bool",
        ),
    ],
)
def test_the_pattern_of_a_kernel_whose_mask_cannot_be_read_is_refused(run, forge, tmp_path, name, runs, message):
    said, out = tmp_path / "said", tmp_path / "acts"
    kernel = f"parallel.passes.'acme-kernels:{name}'={{said={str(said)!r}}}"
    extract = ["extract", run, "--samples", "2", "--out", out, kernel, "--sites"]

    refused = forge(*extract, "blocks.*.attn_pattern")
    assert refused.returncode == 2, refused.stderr
    (sentence,) = [line for line in refused.stderr.splitlines() if line.startswith("error")]
    assert f"site blocks.0.attn_pattern: {message}" in " ".join(refused.stderr.split())
    assert sentence.startswith("error: site blocks.0.attn_pattern:")
    assert not out.exists()
    assert said.exists() == runs

    read = forge(*extract, "blocks.*.z,blocks.*.resid_post")
    assert read.returncode == 0, read.stderr


def test_a_pass_that_does_not_say_how_values_lie_is_refused_by_name(run, forge, tmp_path):
    said, out = tmp_path / "said", tmp_path / "acts"
    mute = f"parallel.passes.'acme-kernels:mute'={{said={str(said)!r}}}"

    refused = forge("extract", run, "--sites", "blocks.*.resid_post", "--out", out, mute)

    assert refused.returncode == 2
    sentence = "error: parallel.passes.mute: this pass shares out values and has no layout"
    assert sentence in refused.stderr
    assert not out.exists()
    assert not said.exists()


def test_what_heads_write_is_refused_of_a_layer_with_an_adapter(run, tmp_path, capsys):
    """It is computed by the weight of the layer, in which the adapter is not."""
    settings = ['run.name="adapted"', f'run.dir="{tmp_path}"', "parallel.passes.lora={rank=2, include=['blocks.1.*']}"]
    train_again(run.parent.parent / "job.toml", settings)
    extract = ["extract", str(tmp_path / "adapted"), "--samples", "2", "--out", str(tmp_path / "acts"), "--sites"]
    capsys.readouterr()

    assert main([*extract, "blocks.*.attn_head_out"]) == 2
    assert "site blocks.1.attn_head_out: an adapter adds to the weight of its layer" in capsys.readouterr().err
    assert not (tmp_path / "acts").exists()
    assert main([*extract, "blocks.0.attn_head_out,blocks.1.attn_out"]) == 0


def test_a_ring_hides_nothing_but_what_needs_whole_keys(run, forge, tmp_path):
    job = tmp_path / "job.toml"
    text = (run.parent.parent / "job.toml").read_text()
    job.write_text(text.replace("attention_softcap = 5.0", ""))  # which no kernel of a ring has
    train_again(job, [f'run.dir="{tmp_path}"'])
    ring = ["--nproc", "2", "parallel.cp=2", "parallel.passes.context_parallel.method=ring"]
    extract = ["extract", tmp_path / "tiny", "--samples", "2", "--out", tmp_path / "acts", *ring, "--sites"]

    refused = forge(*extract, "blocks.*.attn_pattern")
    assert refused.returncode == 2
    assert "site blocks.0.attn_pattern: in a ring no rank has the keys of whole sequences" in refused.stderr
    assert not (tmp_path / "acts").exists()
    read = forge(*extract, "blocks.*.z,blocks.*.resid_post")
    assert read.returncode == 0, read.stderr


def train_again(job, settings):
    catalog = discover()
    run_job(load_job(job, settings, catalog=catalog, world_size=1), catalog)
