"""``configs/scaling``: each trains its model for 20 tokens a parameter, and says so."""

import math
from pathlib import Path

import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.build import build_on_meta

FOLDER = Path(__file__).parents[2] / "configs" / "scaling"
SIZES = sorted(file.stem for file in FOLDER.glob("*.toml") if file.stem != "base")


@pytest.mark.parametrize("size", SIZES)
def test_a_model_is_trained_for_twenty_tokens_a_parameter(size):
    file = FOLDER / f"{size}.toml"
    job = load_job(file, catalog=discover(), world_size=8)
    model = build_on_meta(job, 32_000, ComponentBuilder(discover()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    a_step = job.train.global_batch_size * job.train.seq_len

    assert job.train.steps == math.ceil(20 * parameters / a_step)
    said = f"# {parameters:,} parameters, {job.train.steps * a_step:,} tokens: {job.train.steps:,} steps of {a_step:,}."
    assert file.read_text().splitlines()[0] == said
    assert job.run.name == f"scaling-{size}"


def test_the_sizes_are_those_that_the_shared_file_names():
    (loop,) = [line for line in (FOLDER / "base.toml").read_text().splitlines() if "for size in" in line]

    assert sorted(loop.partition(" in ")[2].partition(";")[0].split()) == SIZES
