"""Encoders whose layers are cut over ranks: which modules, how much a rank has, and the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_runs import CONFIG
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.build import build_on_meta
from parity_matrix.cells import TRAININGS
from parity_matrix.launch import Launcher, Work

SMALL = "num_hidden_layers=2, num_attention_heads=2, hidden_size=16, patch_size=8"
CONV_VIT = '{name="conv_vit", size=[16, 16], patch=8, dim=16, n_layers=2, n_heads=2}'
SIGLIP = f'{{name="siglip", architecture={{{SMALL}, image_size=16, intermediate_size=48}}}}'
ENCODERS = {
    "conv_vit": CONV_VIT,
    "siglip": SIGLIP,
    "clip": f'{{name="clip", architecture={{{SMALL}, image_size=16, intermediate_size=48}}}}',
    "dinov2": f'{{name="dinov2", architecture={{{SMALL}, image_size=16, mlp_ratio=2}}}}',
    "dinov2-gated": f'{{name="dinov2", architecture={{{SMALL}, image_size=16, use_swiglu_ffn=true}}}}',
    "siglip2_naflex": f'{{name="siglip2_naflex", architecture={{{SMALL}, num_patches=4, intermediate_size=48}}}}',
    "concatenated": f'{{name="concatenated", parts=[{{encoder={SIGLIP}}}, {{encoder={CONV_VIT}}}]}}',
}
CUT = ["model.cut_encoder=true", "parallel.tp=2"]


def job_of(folder, *settings):
    (folder / "job.toml").write_text(CONFIG.format(folder=folder))
    shared = ["data.processor.size=16", "data.token_grid=[2, 2]"]
    return load_job(folder / "job.toml", [*shared, *settings], catalog=discover, world_size=2)


@pytest.fixture
def cut(tmp_path):
    """Builds a model on meta, as rank 0 of two along ``tp`` has it."""

    def cut(*settings):
        job = job_of(tmp_path, *settings)
        build = ComponentBuilder(discover())
        model = build_on_meta(job, 31, build)
        context = PassContext(build_mesh(job, torch.device("cpu")), job, torch.device("cpu"))
        build(job.parallel.passes["tensor_parallel"]).apply(model, context)
        return model

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield cut
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_rank_has_half_of_each_matrix_of_the_layers(cut, name):
    encoder = cut(f"model.encoder={ENCODERS[name]}", *CUT).vision.encoder

    units = [encoder.get_submodule(unit) for unit in encoder.units()]
    matrices = [module.weight for unit in units for module in unit.modules() if isinstance(module, nn.Linear)]
    assert len(matrices) >= 12
    for weight in matrices:
        assert isinstance(weight, DTensor)
        assert weight.to_local().numel() * 2 == weight.numel()


def test_an_encoder_is_whole_unless_it_is_to_be_cut(cut):
    encoder = cut(f"model.encoder={ENCODERS['conv_vit']}", "parallel.tp=2").vision.encoder

    assert not any(isinstance(one, DTensor) for one in encoder.parameters())


@pytest.mark.parametrize(
    ("encoder", "sentence"),
    [
        ('{name="conv_vit", n_heads=1}', "the 1 heads of conv_vit cannot be shared out over parallel.tp = 2"),
        (ENCODERS["siglip"].replace("heads=2", "heads=1"), "the 1 heads of siglip cannot be shared out"),
        ('{name="mllama", architecture={}}', "the layers of mllama cannot be cut; set cut_encoder = false"),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(tmp_path, encoder, sentence):
    with pytest.raises(ConfigError, match=sentence):
        job_of(tmp_path, f"model.encoder={encoder}", *CUT)


LAYOUTS = {"tp2": (2, CUT), "tp2-fsdp2": (4, [*CUT, "train.batch_size=2"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        pytest.param(["siglip"], {"tp2": LAYOUTS["tp2"]}, id="by-day"),
        pytest.param(ENCODERS, LAYOUTS, id="all", marks=pytest.mark.nightly),
    ],
)
def test_cut_encoders_compute_what_whole_ones_do(tmp_path_factory, names, layouts):
    launcher = Launcher(tmp_path_factory.mktemp("cut"))
    works = []
    for name in names:
        keys = [f"model.encoder={ENCODERS[name]}", "model.connector.name=linear", "train.steps=4", "eval.interval=4"]
        shared = [*TRAININGS["joint"], *keys]
        works.append(Work(f"{name}-one", 1, shared))
        works += [Work(f"{name}-{layout}", ranks, [*shared, *keys]) for layout, (ranks, keys) in layouts.items()]

    launcher.launch(works)

    for name in names:
        expected = measured(launcher, f"{name}-one")
        assert len(expected) == 9
        for layout in layouts:
            assert measured(launcher, f"{name}-{layout}") == pytest.approx(expected, rel=1e-5), (name, layout)


def measured(launcher, run):
    lines = launcher.metrics(run)
    return {
        (line["step"], key): line[key] for line in lines for key in ("loss", "grad_norm", "eval/loss") if key in line
    }
