"""Plugins are equal: a package from outside the tree works as ours do, from wheels alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]

PACKAGE = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-recipes"
version = "2.1.0"
dependencies = ["forge-core>=0.1"]

[project.entry-points."forge.v1"]
acme-recipes = "acme_recipes.plugin"
""",
    "src/acme_recipes/__init__.py": "",
    "src/acme_recipes/plugin.py": '''
"""Free of torch."""

from forge_core.api import Component, hookimpl


@hookimpl
def forge_optimizers():
    yield Component(
        name="signum",
        summary="the sign of the momentum",
        factory="acme_recipes.signum:Signum",
        config="acme_recipes.config:SignumConfig",
    )


@hookimpl
def forge_schedulers():
    yield Component(
        name="inverse_sqrt",
        summary="linear warm-up, then one over the square root of the step",
        factory="acme_recipes.inverse_sqrt:inverse_sqrt",
        config="acme_recipes.config:InverseSqrtConfig",
    )


@hookimpl
def forge_losses():
    yield Component(
        name="z_loss",
        summary="cross-entropy that also keeps the normaliser near one",
        factory="acme_recipes.z_loss:ZLoss",
        config="acme_recipes.config:ZLossConfig",
    )
''',
    "src/acme_recipes/config.py": '''
import attrs
from attrs.validators import ge, gt


@attrs.frozen(kw_only=True)
class SignumConfig:
    """Keys of ``signum``."""

    lr: float = attrs.field(validator=gt(0))
    """Base learning rate."""
    momentum: float = attrs.field(default=0.9, validator=ge(0))
    """Decay of the momentum a step."""


@attrs.frozen(kw_only=True)
class InverseSqrtConfig:
    """Keys of ``inverse_sqrt``."""

    warmup_steps: int = attrs.field(default=2, validator=gt(0))
    """Steps of linear warm-up."""


@attrs.frozen(kw_only=True)
class ZLossConfig:
    """Keys of ``z_loss``."""

    coefficient: float = attrs.field(default=1e-4, validator=ge(0))
    """Of the squared logarithm of the normaliser."""
''',
    "src/acme_recipes/signum.py": """
import torch


class Signum(torch.optim.Optimizer):
    def __init__(self, config, /, *, parameters):
        super().__init__([one.parameter for one in parameters], {"lr": config.lr, "momentum": config.momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(momentum.sign(), alpha=-group["lr"])
""",
    "src/acme_recipes/inverse_sqrt.py": """
def inverse_sqrt(config, /, *, total_steps):
    warmup = config.warmup_steps
    return lambda step: min(step / warmup, (warmup / step) ** 0.5)
""",
    "src/acme_recipes/z_loss.py": '''
import torch.nn.functional as F
from forge_core.contracts.loss import IGNORED, LossSum


class ZLoss:
    """Chowdhery et al., "PaLM", section 5."""

    def __init__(self, config, /):
        self.coefficient = config.coefficient

    def __call__(self, hidden, head, targets):
        logits, targets = head(hidden).float().flatten(0, -2), targets.flatten()
        valid = targets != IGNORED
        z = logits.logsumexp(-1).square() * valid
        entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return LossSum(entropy + self.coefficient * z.sum(), valid.sum())
''',
    "tests/test_recipes.py": """
from forge_core.testing.loss import LossConformance
from forge_core.testing.optimizer import OptimizerConformance
from forge_core.testing.plugin import PluginConformance
from forge_core.testing.scheduler import SchedulerConformance


class TestPlugin(PluginConformance):
    dist = "acme-recipes"


class TestSignum(OptimizerConformance):
    component = "acme-recipes:signum"
    config = {"lr": 0.01}


class TestInverseSqrt(SchedulerConformance):
    component = "acme-recipes:inverse_sqrt"


class TestZLoss(LossConformance):
    component = "acme-recipes:z_loss"
""",
}

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

[optimizer]
name = "signum"
lr = 1e-3

[scheduler]
name = "inverse_sqrt"

[loss]
name = "acme-recipes:z_loss"

[metrics]
interval = 1
"""


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``forge`` command of a fresh environment that has wheels of ours and of the outsider, and no source tree."""
    folder = tmp_path_factory.mktemp("outsider")
    package, wheels = folder / "acme-recipes", folder / "wheels"
    for path, text in PACKAGE.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text.lstrip("\n"))
    for source in (package, *OURS):
        succeed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, source, cwd=folder)
    succeed(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    see_third_parties(folder / "venv", folder / "third_parties")
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    succeed(*pip, "install", "-q", "--no-deps", "--no-index", *sorted(wheels.glob("*.whl")), cwd=folder)
    return folder / "venv" / "bin" / "forge"


def see_third_parties(environment: Path, links: Path) -> None:
    """Let the environment import what is installed here, torch above all, without Forge and what points at its tree."""
    links.mkdir()
    for site in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in site.iterdir():
            ours = entry.name.startswith(("forge", "_editable_impl_forge", "__editable__"))
            if not ours and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "third_parties.pth").write_text(str(links))


def succeed(*command: str | Path, cwd: Path) -> str:
    """Run a command away from the source tree, and return what it printed."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    run = subprocess.run(command, cwd=cwd, env={**kept, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, f"{command} exits with {run.returncode}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")} for line in lines]


@pytest.mark.slow
def test_it_runs_from_wheels_and_not_from_the_tree(forge: Path) -> None:
    program = "import forge_core, forge_plugins_dense, acme_recipes; print(*forge_core.__path__, acme_recipes.__file__)"

    printed = succeed(forge.with_name("python"), "-c", program, cwd=forge.parent)

    assert all(path.startswith(str(forge.parents[1])) for path in printed.split())


@pytest.mark.slow
def test_it_is_listed_beside_ours(forge: Path) -> None:
    listed = json.loads(succeed(forge, "plugins", "--json", cwd=forge.parent))
    table = succeed(forge, "plugins", cwd=forge.parent)

    plugins = {plugin["distribution"]: plugin for plugin in listed["plugins"]}
    assert plugins["acme-recipes"]["status"] == "ok"
    assert plugins["acme-recipes"]["version"] == "2.1.0"
    assert set(plugins) == {"acme-recipes", *(path.name.replace("_", "-") for path in OURS[1:])}
    (line,) = [line for line in table.splitlines() if line.startswith("acme-recipes")]
    assert "optimizer:signum" in line


@pytest.mark.slow
def test_another_package_can_be_started(forge: Path, tmp_path: Path) -> None:
    """The wheel of the core holds the templates of ``forge new``."""
    succeed(forge, "new", "router", "noisy-gate", cwd=tmp_path)

    assert (tmp_path / "noisy-gate" / "src" / "noisy_gate" / "router.py").exists()


@pytest.mark.slow
def test_it_passes_the_kit(forge: Path) -> None:
    package = forge.parents[2] / "acme-recipes"

    succeed(forge.with_name("python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=package)


@pytest.mark.slow
def test_it_trains_by_name_and_resumes_exactly(forge: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    (tmp_path / "config.toml").write_text(CONFIG)

    succeed(forge, "validate", "config.toml", cwd=tmp_path)
    succeed(forge, "run", "config.toml", cwd=tmp_path)
    assert [line["step"] for line in metrics(tmp_path / "runs" / "config")] == [1, 2, 3, 4]
    succeed(forge, "run", "config.toml", "--train.steps=8", cwd=tmp_path)
    succeed(forge, "run", "config.toml", "--train.steps=8", "--run.name=straight", cwd=tmp_path)

    resumed, straight = metrics(tmp_path / "runs" / "config"), metrics(tmp_path / "runs" / "straight")
    assert resumed == straight
    assert [line["step"] for line in straight] == list(range(1, 9))
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.05
    resolved = (tmp_path / "runs" / "config" / "job.toml").read_text()
    assert 'name = "acme-recipes:signum"' in resolved
    installed = json.loads((tmp_path / "runs" / "config" / "environment.json").read_text())
    assert "acme-recipes" in json.dumps(installed)
