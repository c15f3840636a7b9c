"""``configs/train``: whole runs with a layout each, of as many GPUs as their first line says."""

import json
import re
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.job import load_job
from forge_core.registry.discovery import discover

FOLDER = Path(__file__).parents[2] / "configs" / "train"
FILES = sorted(file for file in FOLDER.glob("*.toml") if file.stem != "base")
AXES = {
    "llama_8b": {"dp_shard": 8},
    "llama_8b_fp8": {"dp_shard": 8},
    "llama_8b_long": {"dp_shard": 2, "cp": 8},
    "llama_70b": {"dp_shard": 32, "tp": 2},
    "llama_70b_pp": {"pp": 4, "dp_shard": 4, "tp": 4},
    "mixtral_8x7b": {"dp_shard": 32, "ep": 8},
}
each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def world_size_of(file: Path) -> int:
    (found,) = re.findall(r"on (\d+) GPUs", file.read_text(encoding="utf-8").splitlines()[0])
    return int(found)


@each
def test_a_run_is_valid_for_as_many_gpus_as_it_says(file, capsys):
    assert main(["validate", str(file), "--world-size", str(world_size_of(file))]) == 0, capsys.readouterr().err
    job = load_job(file, catalog=discover(), world_size=world_size_of(file))

    asked = {axis: getattr(job.parallel, axis) for axis in ("pp", "tp", "cp", "ep")}
    assert asked == {axis: AXES[file.stem].get(axis, 1) for axis in asked}
    assert job.run.name == file.stem


@each
def test_the_second_line_starts_it_on_so_many(file):
    command = file.read_text(encoding="utf-8").splitlines()[1]

    assert f"configs/train/{file.name}" in command
    numbers = [int(number) for number in re.findall(r"--(?:nproc|nodes|gpus-per-node) (\d+)", command)]
    assert world_size_of(file) == numbers[0] * (numbers[1] if len(numbers) > 1 else 1)


@pytest.mark.nightly  # tests/plan has such layouts by day, of small models
@each
def test_a_run_fits_into_gpus_of_eighty_gigabytes(file, capsys):
    assert main(["plan", str(file), "--world-size", str(world_size_of(file)), "--gpu", "h100", "--json"]) == 0

    plan = json.loads(capsys.readouterr().out)
    degrees = plan["mesh"] | {"ep": plan["ep"]}
    assert {axis: degree for axis, degree in degrees.items() if degree > 1} == AXES[file.stem]
    assert plan["fits"]
