"""The dispatcher of the page about their hook, from a package that is not ours."""

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

import fork_server
from parity_matrix.launch import Launcher, Work

PAGE = Path(__file__).parents[2] / "docs/hooks/forge_dispatchers.md"
SPARSE = 'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, router={name="softmax_topk"}}'
EP2 = [SPARSE, "train.batch_size=2", "train.steps=3", "parallel.ep=2"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The page's files in a folder, installed as an installer would leave them."""
    folder = tmp_path_factory.mktemp("acme-dispatch")
    block = r"^```{code-block} python\n:caption: (\S+)\n(.*?)^```$"
    for path, text in re.findall(block, PAGE.read_text(), re.M | re.S):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    information = folder / "src" / "acme_dispatch-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-dispatch\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[forge.v1]\nacme-dispatch = acme_dispatch.plugin\n")
    return folder


@pytest.fixture
def installed(package, monkeypatch):
    path = [str(package / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.slow
def test_it_passes_the_kit(package, installed):
    done = fork_server.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")],
        capture_output=True,
        text=True,
        cwd=package,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout


@pytest.mark.slow
def test_a_run_uses_it_by_name_and_is_the_same(installed, tmp_path):
    launcher = Launcher(tmp_path)
    everywhere = [*EP2, "parallel.passes.expert_parallel.dispatcher=everywhere"]
    overlapping = [*everywhere, *(f"parallel.passes.expert_parallel.{key}" for key in ("overlap=true", "chunks=2"))]

    said = launcher.launch(
        [
            Work("ours", 2, EP2),
            Work("theirs", 2, everywhere),
            Work("refused", 2, overlapping, refused=True),
        ],
        timeout=900,
    )

    assert not launcher.failures, "\n".join(launcher.failures.values())
    for ours, theirs in zip(launcher.metrics("ours"), launcher.metrics("theirs"), strict=True):
        for key in {"loss", "grad_norm", "eval/loss"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    job = tomllib.loads((launcher.run_dir("theirs") / "job.toml").read_text())
    (chosen,) = (one["dispatcher"]["name"] for name, one in job["parallel"]["passes"].items() if "expert" in name)
    assert chosen == "acme-dispatch:everywhere"
    assert "overlap: the dispatcher 'everywhere' cannot do anything while rows travel" in said
