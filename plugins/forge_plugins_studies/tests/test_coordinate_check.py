"""``forge coordinate-check``: training moves activations as far at every size, or it does not and is told so."""

import math
from types import SimpleNamespace

import pytest

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_studies.config import PLACES, CoordinatesConfig
from forge_plugins_studies.coordinate_check import Size, exponents
from forge_plugins_studies.coordinates import Coordinates
from forge_testing.json_output import json_of

JOB = """
[run]
device = "cpu"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
feed_forward = { name = "mlp", hidden_dim = 128 }
[data]
name = "text_files"
path = "text"
pattern = "*.txt"
tokenizer = "bytes"
[train]
steps = 100
seq_len = 64
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "cosine"
warmup_steps = 50
[checkpoint]
interval = 10
keep_last = 2
"""
COMPLETE_P = "parametrization={name='complete_p', base={dim=32, n_layers=2}}"


@pytest.fixture
def job(tmp_path, monkeypatch, forked_runs):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text").mkdir()
    words = [f"{n} sheep, {n * n} legs and {'a dog' if n % 7 else 'no dog'}.\n" for n in range(600)]
    (tmp_path / "text" / "sheep.txt").write_text("".join(words))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


@pytest.mark.slow
def test_under_complete_p_activations_change_alike_at_every_width_and_depth(job, capfd):
    grid = ["--widths", "32,128", "--depths", "2,8", "--parallel", "2"]

    sizes = [Size(**size) for size in json_of("coordinate-check", str(job), *grid, COMPLETE_P)]
    assert [(size.dim, size.n_layers) for size in sizes] == [(32, 2), (32, 8), (128, 2), (128, 8)]
    for place in PLACES:
        assert all(len(size.steps) == 5 and size.steps[0][f"change/{place}"] == 0 for size in sizes)
        for power in exponents(sizes, [size.steps[-1][f"change/{place}"] for size in sizes], ["dim", "n_layers"]):
            assert abs(power) < 0.3, place
    assert sorted(path.name for path in job.parent.iterdir()) == ["job.toml", "text"]


@pytest.mark.slow
def test_without_a_parametrization_they_grow_with_the_width_and_a_page_shows_it(job, capfd):
    page = job.parent / "page.html"

    assert (
        main(
            ["coordinate-check", str(job), "--widths", "32,128", "--parallel", "2", "--seeds", "1", "--out", str(page)]
        )
        == 0
    )

    said, _ = capfd.readouterr()
    assert "~ width^" in said
    assert "not flat after 4 updates: middle_block as width^" in said
    assert "logits as width^" in said
    shown = page.read_text()
    assert "<h2>Coordinates</h2>" in shown
    assert all(f"change of {place}" in shown for place in PLACES)
    assert "logits after 4 updates, n_layers 2, dim 128: " in shown


def test_exponents_of_planted_powers_are_found():
    sizes = [Size(dim=dim, n_layers=layers, steps=()) for dim in (32, 64, 128) for layers in (2, 8)]
    values = [3 * size.dim**0.5 * size.n_layers**-1.0 for size in sizes]

    assert exponents(sizes, values, ["dim", "n_layers"]) == pytest.approx([0.5, -1.0])
    assert math.isnan(exponents(sizes, [0.0, *values[1:]], ["dim", "n_layers"])[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --widths, --depths, or both"),
        (["--widths", "64"], "--widths 64: expected two or more numbers above 0"),
        (["--depths", "2,two"], "--depths 2,two: expected two or more numbers above 0"),
        (["--widths", "30,64"], "model.n_heads: must divide dim = 30"),
        (["--widths", "32,64", "model.dmi=3"], "model.dmi: unknown key; did you mean 'dim'?"),
        (["--widths", "32,64", "--out", "nowhere/page.html"], "--out nowhere/page.html: there is no folder"),
    ],
)
def test_a_grid_that_is_none_is_refused_before_anything_is_started(job, arguments, sentence, capfd):
    assert main(["coordinate-check", str(job), *arguments]) == 2
    assert sentence in capfd.readouterr().err


def test_the_callback_measures_on_one_process_alone():
    with pytest.raises(ConfigError, match="measures a model on one process"):
        Coordinates(CoordinatesConfig()).run_start(SimpleNamespace(world_size=2, parts=[None]))
