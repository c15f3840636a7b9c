"""A router as ``forge new`` writes it, installed from a wheel, is trained in every layout as in one process."""

from __future__ import annotations

import pytest

from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import by_day_or_night, selected_cells

pytestmark = pytest.mark.slow

STEPS = 3
TRAINING = [
    *(f"train.steps={STEPS}", f"eval.interval={STEPS}"),
    "model.n_layers=2",
    "model.num_experts=4",
    "model.moe.hidden_dim=32",
    'model.moe.router={name="acme-gate:acme_gate",top_k=2,balance=0.1}',
    "train.batch_size=1",
    "train.grad_accumulation=4",
]
FULL = "parallel.passes.activation_checkpointing=true"
COMPILE = "parallel.passes.compile=true"
EP2, TP2, PP2 = "parallel.ep=2", "parallel.tp=2", "parallel.pp=2"
TWO, ONE = "train.grad_accumulation=2", "train.grad_accumulation=1"

CELLS = {  # the ranks and the layout; a step always has four sequences
    "fsdp2": (2, [TWO]),
    "ep2-full": (2, [EP2, TWO, FULL]),
    "tp2": (2, [TP2]),
    "pp2": (2, [PP2]),
    "ep2-fsdp2-full": (4, [EP2, ONE, FULL]),
    "compile": (1, [COMPILE]),
    "ep2-fsdp2-compile": (4, [EP2, ONE, COMPILE]),
    "pp2-ep2": (4, [PP2, EP2, TWO]),
}


BY_NIGHT = CELLS.keys() - {"ep2-full", "tp2", "pp2"}
"""By day, each way to share out a model once: two ranks with experts of their own share the rest by FSDP."""
every_cell = pytest.mark.parametrize("cell", by_day_or_night(CELLS, BY_NIGHT))


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, installed, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """The runs of all selected tests share one launch, of the environment that has nothing but wheels."""
    chosen = selected_cells(request)
    launcher = Launcher(tmp_path_factory.mktemp("gate"), python=installed.python)
    works = [Work(name, ranks, [*TRAINING, *layout]) for name, (ranks, layout) in CELLS.items() if name in chosen]
    launcher.launch([Work("alone", 1, TRAINING), *works])
    return launcher


@pytest.mark.timeout(1500)  # of which the launch is nearly all
@every_cell
def test_steps_are_those_of_one_process(launcher: Launcher, cell: str) -> None:
    ranks, _ = CELLS[cell]

    lines, references = launcher.metrics(cell), launcher.metrics("alone")

    assert [line["step"] for line in references] == [*range(1, STEPS + 1), STEPS]  # and an evaluation
    assert references[0]["auxiliary/load_balance"] > 0
    for line, reference in zip(lines, references, strict=True):
        for key in reference.keys() & {"loss", "grad_norm", "eval/loss", "tokens", "auxiliary/load_balance"}:
            assert line[key] == pytest.approx(reference[key], rel=1e-5), (line["step"], key)
    norms = [seen.gradient_norms for seen in launcher.seen(cell)]
    assert norms == [norms[0]] * ranks


@every_cell
def test_every_expert_gets_the_gradient_of_one_process(launcher: Launcher, cell: str) -> None:
    (alone,) = launcher.seen("alone")
    gradients = {name: gradient for seen in launcher.seen(cell) for name, gradient in seen.gradients.items()}

    assert gradients.keys() == alone.gradients.keys()
    for name, expected in alone.gradients.items():
        error = ((gradients[name] - expected).norm() / expected.norm()).item()
        assert error < 1e-4, (name, error)


@every_cell
def test_what_the_router_counted_is_equal(launcher: Launcher, cell: str) -> None:
    """The last step's load over all ranks, in the checkpoint, down to the last token."""
    saved, expected = (
        {key: value for key, value in launcher.saved(name).items() if key.endswith("router.fraction")}
        for name in (cell, "alone")
    )

    assert len(expected) == 2  # one for each block
    assert saved.keys() == expected.keys()
    assert all((saved[key] == expected[key]).all() for key in expected)
