"""An encoder, a connector, a fusion and an image processor of another package, from wheels: trained by ``forge run`` in
every layout as in one process.

The package is ``acme-vision``, which docs/write-an-encoder.md shows.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import selected_cells

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MODEL = (
    'model={name="vision_language",dim=32,n_layers=4,n_heads=8,n_kv_heads=4,max_seq_len=64,init_std=0.05,'
    'encoder={name="acme-vision:patch_mixer",size=16,dim=16},connector="acme-vision:row_pool",'
    'fusion={name="acme-vision:gated_prefix",from_layer=1,gate=0.5}}'
)
DATA = (
    'data={name="image_text",path="pictures/data.json",format="llava",token_grid=[2,1],one_token_an_image=true,'
    'validation=0.1,processor={name="acme-vision:halves",size=16},prompt_template="{prompt}{answer}"}'
)
STEPS = 3
TRAINING = [MODEL, DATA, f"train.steps={STEPS}", f"eval.interval={STEPS}"]
HALF = "train.batch_size=2"
CELLS = {  # the ranks and the layout; a step always has four sequences
    "tp2-fsdp2": (4, ["parallel.tp=2", HALF]),
    "pp2": (2, ["parallel.pp=2", "train.batch_size=1", "train.grad_accumulation=4"]),
    "cp2": (2, ["parallel.cp=2"]),
}


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, installed, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """The runs of all selected tests share one launch of four ranks, of the environment that has nothing but wheels."""
    launcher = Launcher(tmp_path_factory.mktemp("vision"), python=installed.python)
    works = [Work(name, CELLS[name][0], [*TRAINING, *CELLS[name][1]]) for name in selected_cells(request)]
    launcher.launch([Work("alone", 1, TRAINING), *works])
    return launcher


@pytest.mark.timeout(1500)  # of which the launch is nearly all
@pytest.mark.parametrize("cell", CELLS)
def test_steps_are_those_of_one_process(launcher: Launcher, cell: str) -> None:
    lines, references = launcher.metrics(cell), launcher.metrics("alone")

    assert [line["step"] for line in references] == [*range(1, STEPS + 1), STEPS]  # and an evaluation
    for line, reference in zip(lines, references, strict=True):
        for key in reference.keys() & {"loss", "grad_norm", "eval/loss", "tokens"}:
            assert line[key] == pytest.approx(reference[key], rel=1e-5), (line["step"], key)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", CELLS)
def test_every_parameter_gets_the_gradient_of_one_process(launcher: Launcher, cell: str) -> None:
    (alone,) = launcher.seen("alone")
    gradients = {name: gradient for seen in launcher.seen(cell) for name, gradient in seen.gradients.items()}

    assert {"vision.encoder.patches.weight", "blocks.1.gate.bias"} <= alone.gradients.keys()
    assert gradients.keys() == alone.gradients.keys()
    for name, expected in alone.gradients.items():
        assert ((gradients[name] - expected).norm() / expected.norm()).item() < 1e-4, name


def test_it_imports_public_modules_alone() -> None:
    page = (HERE.parents[1] / "docs" / "hooks" / "public-modules.md").read_text(encoding="utf-8")
    public = set(re.findall(r"^\| `(forge_[\w.]+)(?:\.\*)?` \|", page, re.M))

    for file in (HERE / "acme-vision" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forge_"):
                assert {node.module, str(node.module).rpartition(".")[0]} & public, f"{file.name}: {node.module}"
