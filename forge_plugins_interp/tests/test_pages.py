"""The Python of the pages runs as it stands there, in the folder of a reader."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from forge_core.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "page",
    [
        "docs/look-into-a-model.md",
        "docs/interventions.md",
        "docs/stores.md",
        "docs/compare-representations.md",
        "docs/neural-recordings.md",
        "docs/sparse-autoencoders.md",
        "forge_plugins_interp/README.md",
    ],
)
def test_python_of_a_page_runs(run, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(run)
    ids = [f"s{number}" for number in range(12)]
    lines = (f"{name},word {number}\n" for number, name in enumerate(ids))
    (tmp_path / "sentences.csv").write_text("stimulus_id,text\n" + "".join(lines))
    np.savez(
        tmp_path / "recordings.npz", stimulus_id=ids[::-1], values=np.random.default_rng(0).normal(size=(12, 2, 3))
    )
    extract = ["extract", "runs/demo", "--sites", "blocks.*.resid_post"]
    assert main([*extract, "--samples", "8", "--out", "acts"]) == 0
    principal = ["--features", "8", "--directions", "principal"]
    assert main([*extract[:3], "blocks.1.mlp_post", "--samples", "8", *principal, "--out", "components"]) == 0
    assert main([*extract, "--stimuli", "sentences.csv", "--reduce", "last", "--out", "sentences"]) == 0
    of_page = (ROOT / page).read_text(encoding="utf-8")
    checkpoints = sorted((tmp_path / "runs/demo/checkpoints").glob("step_*")) if '"sweep"' in of_page else ()
    for checkpoint in checkpoints:
        of_it = ["extract", str(checkpoint), *extract[2:], "--samples", "8", "--out", f"sweep/{checkpoint.name}"]
        assert main(of_it) == 0
    if "load_dictionary" in of_page:
        small = ["model.width=32", "model.latents=24", "model.k=3", "train.steps=4", "train.seq_len=8"]
        data = ["data.path=acts", "data.site=blocks.1.resid_post", "evaluations=[]"]
        assert main(["run", str(ROOT / "configs/sae_demo.toml"), *small, *data]) == 0
    text = of_page.replace("blocks.2.", "blocks.1.")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)

    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)

    assert blocks
