"""The notebooks run, and show what they are kept with."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import fork_server
from doc_pages import DOCS

SHORTER = {
    "first_run.ipynb": {"steps = 600": "steps = 120"},
    "layout.ipynb": {"n_layers = 16": "n_layers = 2"},
    "model.ipynb": {},
    "attention.ipynb": {"steps = 400": "steps = 40", "interval = 400": "interval = 40"},
    "checkpoints.ipynb": {},
    "optimizers.ipynb": {"steps = 120": "steps = 60"},
    "interpretability.ipynb": {
        "steps = 400": "steps = 240",
        "steps = 250": "steps = 20",
        '"--samples", "300"': '"--samples", "60"',
        "range(300)": "range(60)",
        "[:20_000]": "[:2_000]",
    },
    "image_attention.ipynb": {"steps = 400": "steps = 40", '"2048"': '"256"'},
    "routing.ipynb": {},
}
"""Less training than in the notebooks as they are published."""
BY_DAY = ("first_run.ipynb", "routing.ipynb")
"""One that runs commands, and one that calls plugins. What the others call has tests of its own; they run by night."""
NOTEBOOKS = [
    pytest.param(path, id=path.name, marks=() if path.name in BY_DAY else pytest.mark.nightly)
    for path in sorted(DOCS.glob("notebooks/*.ipynb"))
]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_run(tmp_path, notebook):
    """In a copy; the outputs that a notebook is kept with are of the same kinds."""
    folder = Path(shutil.copytree(notebook.parent, tmp_path / "notebooks"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = notebook.read_text(encoding="utf-8")
    for long, short in SHORTER[notebook.name].items():
        long, short = (json.dumps(one)[1:-1] for one in (long, short))
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    (folder / notebook.name).write_text(text, encoding="utf-8")

    done = fork_server.run(
        [sys.executable, "execute.py", notebook.name], cwd=folder, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    kept, executed = (shown(path) for path in (notebook, folder / notebook.name))
    assert any("image/svg+xml" in kinds for kinds in executed)
    assert kept == executed


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "notebooks"))
    return importlib.import_module("drawing")


def test_bars_are_as_high_as_their_parts_and_lines_go_where_values_are(drawing):
    bars = drawing.stacked_bars({"a": {"x": 1.0, "y": 3.0}}, title="", y="", limit=("full", 8.0))._repr_svg_()
    low, high = (float(one) for one in re.findall(r'height="([\d.]+)" fill="#', bars))
    at = float(re.search(r"M60 ([\d.]+)h", bars)[1])

    assert high == pytest.approx(3 * low, abs=0.2)
    assert drawing.TOP + drawing.HEIGHT - at == pytest.approx(8 * low, abs=0.5)

    line = drawing.lines({"a": {1.0: 0.0, 10.0: 1.0, 100.0: 4.0}}, title="", x="", y="", log=True)._repr_svg_()
    assert re.search(r'points="([^"]*)"', line)[1] == "60.0,210.0 320.0,165.0 580.0,30.0"


def test_more_lines_than_colors_are_refused(drawing):
    with pytest.raises(ValueError, match="8 names, and there are 7 colors"):
        drawing.lines({str(name): {0.0: 0.0, 1.0: 1.0} for name in range(8)}, title="", x="", y="")


def shown(notebook: Path) -> list[list[str]]:
    """What each cell shows, in kinds."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [[kind for output in cell.get("outputs", []) for kind in output.get("data", ["text"])] for cell in cells]
