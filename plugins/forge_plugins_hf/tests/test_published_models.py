"""Shapes of ``configs/model`` that somebody has published: what ``forge convert`` makes of ``config.json``."""

import fnmatch
import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_hf.config_json import ReadKeys
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.model_folder import table_of
from parity_matrix.selection import by_day_or_night

ROOT = Path(__file__).parents[3]
PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text())
"""By the name of the shape: the number of parameters, and ``config.json`` as published, without names of code."""
OUR_OWN = {
    *("vlm_debug", "vlm_video", "vlm_7b", "vlm_7b_cross_attention", "vlm_7b_mixture_of_transformers", "vlm_7b_moma"),
    *("debug_20m", "debug_moe", "llama_7b", "llama_13b", "llama_29b", "llama_70b", "moe_4b", "moe_small"),
    *("moonlight_16b", "transformer_125m", "transformer_350m"),
}
"""Shapes that differ from what was published: in the context, or in how experts are balanced."""
JOB = """
[data]
name = "text_files"
path = "."
[train]
steps = 1
seq_len = 512
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def job_of(tmp_path):
    """The file of a job with a shape."""

    def write(name):
        path = tmp_path / "job.toml"
        path.write_text(f'extends = "{ROOT}/configs/model/{name}.toml"\n{JOB}')
        return path

    return write


def n_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_what_convert_makes_of_the_published_configuration(name, job_of):
    catalog, published = discover(), PUBLISHED[name]["config"]
    layout = layout_of_architecture(published["architectures"][0], catalog)
    said = []
    table = table_of(layout, ReadKeys(published), Path(name), said.append)
    converted = ComponentBuilder(catalog).resolve("model", table)

    job = load_job(job_of(name), catalog=catalog)

    vocab_size = table["vocab_size"]
    assert job.model.config.vocab_size == vocab_size
    assert layout.config_json(job.model.config, vocab_size) == layout.config_json(converted.config, vocab_size)
    assert said == []


ONE_OF_EACH = {model["config"]["architectures"][0]: name for name, model in PUBLISHED.items()}
"""The sizes of a family differ in numbers alone, which the test above reads; the others are built by night."""


@pytest.mark.parametrize("name", by_day_or_night(PUBLISHED, PUBLISHED.keys() - {*ONE_OF_EACH.values()}))
def test_a_shape_has_the_published_number_of_parameters(name, job_of):
    catalog, published = discover(), PUBLISHED[name]["config"]
    job = load_job(job_of(name), catalog=catalog)
    keys = {key: value for key, value in published.items() if key not in ("architectures", "model_type", "torch_dtype")}
    theirs = transformers.AutoConfig.for_model(published["model_type"], **keys)

    with torch.device("meta"):
        ours = ComponentBuilder(catalog)(job.model, vocab_size=job.model.config.vocab_size)
        reference = getattr(transformers, published["architectures"][0])(theirs)
    foreign = layout_of_architecture(published["architectures"][0], catalog).foreign
    apart = {one for pattern in foreign for one in fnmatch.filter(dict(reference.named_parameters()), pattern)}
    left = sum(one.numel() for key, one in reference.named_parameters() if key not in apart)

    assert n_parameters(ours) == left == PUBLISHED[name]["parameters"]
    first_line = (ROOT / f"configs/model/{name}.toml").read_text().partition("\n")[0]
    assert f"({n_parameters(ours):,})" in first_line


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *OUR_OWN}))
def test_a_run_may_have_each_shape(name, job_of):
    assert main(["validate", str(job_of(name))]) == 0


def test_each_file_is_compared_with_what_was_published_or_is_our_own():
    assert {path.stem for path in (ROOT / "configs/model").glob("*.toml")} == {*PUBLISHED, *OUR_OWN}


def test_the_documentation_lists_all_of_them():
    page = (ROOT / "docs/published-models.md").read_text()

    listed = re.findall(r"^\| `(\w+)` \| (.+) \| ([\d,]+) \|$", page, re.M)
    assert [one for one, _, _ in listed] == [*PUBLISHED]
    assert {one: int(count.replace(",", "")) for one, _, count in listed} == {
        name: model["parameters"] for name, model in PUBLISHED.items()
    }
    assert [model for _, model, _ in listed] == [model["model"] for model in PUBLISHED.values()]
