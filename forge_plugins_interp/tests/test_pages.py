"""The Python of the pages runs as it stands there, in the folder of a reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_core.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["docs/look-into-a-model.md", "forge_plugins_interp/README.md"])
def test_python_of_a_page_runs(run, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(run)
    for store in ("acts", "sentences"):
        assert main(["extract", "runs/demo", "--sites", "blocks.*.resid_post", "--samples", "8", "--out", store]) == 0
    text = (ROOT / page).read_text(encoding="utf-8").replace("blocks.2.", "blocks.1.")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)

    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)

    assert len(blocks) >= 2
