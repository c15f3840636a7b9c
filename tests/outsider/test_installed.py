"""Plugins are equal: a package from outside the tree works as ours do, from wheels alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFIG = """
[train]
steps = 4
seq_len = 32
batch_size = 4
precision = "fp32"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2

[data]
name = "text_files"
path = "corpus"
validation = 0.5

[optimizer]
name = "signum"
lr = 1e-3

[scheduler]
name = "acme-recipes:inverse_sqrt"

[loss]
name = "acme-recipes:z_loss"

[[callbacks]]
name = "polyak"

[eval]
interval = 4
batches = 2

[metrics]
interval = 1
"""


def metrics(run: Path) -> list[dict[str, float]]:
    """Of steps, and the losses of evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "eval/loss"}
    return [{key: value for key, value in line.items() if key in keys or key.startswith("polyak/")} for line in lines]


def test_our_wheels_are_small(installed) -> None:
    wheels = [*(installed.folder / "wheels").glob("forge_*.whl")]

    assert len(wheels) == len(installed.ours) + 1
    assert sum(wheel.stat().st_size for wheel in wheels) <= 2_000_000


def test_the_pages_of_the_documentation_come_with_a_wheel(installed) -> None:
    assert "# Slurm\n" in installed.forge("docs", "slurm", cwd=installed.folder)


def test_every_command_of_ours_comes_with_a_wheel(installed, tmp_path) -> None:
    """Its module is in the wheel, too: what ``.gitignore`` names is not."""
    listed = json.loads(installed.forge("plugins", "--json", cwd=tmp_path))["plugins"]
    commands = [command["run"] for plugin in listed for command in plugin["commands"]]
    assert len(commands) > 25

    imports = "; ".join(f"import {run.partition(':')[0]}" for run in commands)
    installed.succeed("-c", imports, cwd=tmp_path)


def test_they_run_from_wheels_and_not_from_the_tree(installed) -> None:
    program = "import forge_core, forge_plugins_dense, acme_jay; print(*forge_core.__path__, acme_jay.__file__)"

    printed = installed.succeed("-c", program, cwd=installed.folder)

    assert all(path.startswith(str(installed.folder / "venv")) for path in printed.split())


def test_they_are_listed_beside_ours(installed) -> None:
    listed = json.loads(installed.forge("plugins", "--json", cwd=installed.folder))
    table = installed.forge("plugins", cwd=installed.folder)

    plugins = {plugin["distribution"]: plugin for plugin in listed["plugins"]}
    outsiders = {path.parent.name for path in installed.folder.glob("*/pyproject.toml")}
    assert set(plugins) == outsiders | installed.ours
    assert {plugin["status"] for plugin in plugins.values()} == {"ok"}
    assert plugins["acme-recipes"]["version"] == "2.1.0"
    (line,) = [line for line in table.splitlines() if line.startswith("acme-recipes")]
    assert "optimizer:signum" in line


def test_another_package_can_be_started(installed, tmp_path: Path) -> None:
    """The wheel of the core holds the templates of ``forge new``."""
    installed.forge("new", "router", "noisy-gate", cwd=tmp_path)

    assert (tmp_path / "noisy-gate" / "src" / "noisy_gate" / "router.py").exists()


def test_they_pass_the_kit(installed) -> None:
    """And their own tests: what ``forge new`` has written, and the examples, too."""
    packages = sorted(installed.folder.glob("*/tests"))

    printed = installed.tested(*packages)

    assert all(f"{tests.parent.name}/tests/" in printed for tests in packages)
    assert len(packages) == 9


def test_a_recipe_trains_by_name_and_resumes_exactly(installed, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(2):
        text = "".join(f"{n} times {n} is {n * n}.\n" for n in range(number, 800, 2))
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    (tmp_path / "config.toml").write_text(CONFIG)

    installed.forge("validate", "config.toml", cwd=tmp_path)
    installed.trained("run", "config.toml", cwd=tmp_path)
    assert [line["step"] for line in metrics(tmp_path / "runs" / "config")] == [1, 2, 3, 4, 4]
    installed.trained("run", "config.toml", "--train.steps=8", cwd=tmp_path)
    installed.trained("run", "config.toml", "--train.steps=8", "--run.name=straight", cwd=tmp_path)

    resumed, straight = metrics(tmp_path / "runs" / "config"), metrics(tmp_path / "runs" / "straight")
    assert resumed == straight
    steps, evaluations = ([line for line in straight if key in line] for key in ("loss", "eval/loss"))
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["step"] for line in evaluations] == [4, 8]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.05
    assert steps[-1]["polyak/away/head.weight"] > 0
    resolved = (tmp_path / "runs" / "config" / "job.toml").read_text()
    assert 'name = "acme-recipes:signum"' in resolved
    environment = json.loads((tmp_path / "runs" / "config" / "environment.json").read_text())
    assert "acme-recipes" in json.dumps(environment)
    installed.forge("report", "runs", "--out", "report.html", cwd=tmp_path)
    (section,) = re.findall(r'<section id="finals">.*?</section>', (tmp_path / "report.html").read_text(), re.S)
    assert f"<td>{steps[-1]['loss']}</td>" in section
