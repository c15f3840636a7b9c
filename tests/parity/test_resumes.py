"""Every optimizer goes on from a checkpoint, on every data and over every change of layout, as the run that wrote it.

All of them in one launch, by night. By day each optimizer goes on in one process, every second one over a change too,
and each change is one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from parity_matrix.cells import BF16, EXACT, FOUR_MICROBATCHES, HALF, QUARTER, TP2, TRAININGS
from parity_matrix.launch import Launcher, Work
from parity_matrix.probe import digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # of which the launch is nearly all

SAVED, STEPS = 2, 4
OPTIMIZERS = {
    "adamw": ["optimizer={name='adamw', lr=3e-3}"],
    "lion": ["optimizer={name='lion', lr=3e-4}"],
    "sgd": ["optimizer={name='sgd', lr=0.1, nesterov=true}"],
    "muon": TRAININGS["muon"],
    "grouped": [
        (
            'optimizer={name="grouped", groups=[{roles=["matrix"], optimizer={name="adafactor", lr=3e-3}}, '
            '{roles=["embedding"], optimizer={name="adamw", lr=3e-3}}, {optimizer={name="sgd", lr=0.1}}]}'
        )
    ],
    "schedule_free_adamw": TRAININGS["schedule free"],
    "adafactor": ["optimizer={name='adafactor', lr=3e-3, beta1=0.5, scale_parameter=true}"],
    "adamw_8bit": ["optimizer={name='adamw_8bit', lr=3e-3, min_elements=0}"],
    "rounded": ["train.precision=bf16_pure", "optimizer={name='adamw', lr=3e-3, stochastic_rounding=true}"],
    "split": ["train.precision=bf16_pure", "optimizer={name='adamw', lr=3e-3, rounding='split'}"],
}
TOLERANCES = {  # of gradient norms; of losses a tenth, and not below that of all others
    "lion": 2e-4,  # what is rounded off decides on a sign now and then
    "adamw_8bit": 2e-4,  # and on a code
    "rounded": BF16,
    "split": BF16,
}
DATA = {
    "plain": [],
    "packed": TRAININGS["packed"],
    "mixture": TRAININGS["mixture"],
    "stream": ["data={name='huggingface_streaming', path='corpus', streams=4, shuffle_buffer=5}"],
}
LAYOUTS = {
    "1": (1, []),
    "fsdp2": (2, [HALF]),
    "fsdp4": (4, [QUARTER]),
    "tp2": (2, [TP2]),
    "pp2": (2, ["parallel.pp=2", *FOUR_MICROBATCHES]),
}
CHANGES = [("1", "1"), ("1", "fsdp2"), ("fsdp2", "1"), ("fsdp2", "fsdp4"), ("fsdp2", "tp2"), ("tp2", "pp2")]
GRID = [(*pair, *change) for pair in product(OPTIMIZERS, DATA) for change in CHANGES]
"""An optimizer, data, and the layouts before the change and after it."""


def by_day() -> Iterator[tuple[str, str, str, str]]:
    """The cells of the day: optimizers and data take turns."""
    for number, optimizer in enumerate(OPTIMIZERS):
        yield optimizer, [*DATA][number % len(DATA)], *CHANGES[0]
        if number % 2:
            change = 1 + number // 2
            yield optimizer, [*DATA][(number + change) % len(DATA)], *CHANGES[change]


BY_DAY = {*by_day()}
assert {*GRID} > BY_DAY


def straight(optimizer, data, layout) -> Work:
    ranks, settings = LAYOUTS[layout]
    given = [*OPTIMIZERS[optimizer], *DATA[data], *settings, f"train.steps={STEPS}", f"checkpoint.interval={SAVED}"]
    small = ["model.n_layers=2", "data.workers=0", "eval.interval=0", "scheduler.warmup_steps=1"]
    return Work(f"{optimizer}-{data}-{layout}", ranks, [*given, *small])


def resumed(optimizer, data, before, after) -> Work:
    whole, here = straight(optimizer, data, before), straight(optimizer, data, after)
    name, settings = f"{whole.name}-to-{after}", [*here.settings, "checkpoint.interval=0"]
    return Work(name, here.ranks, settings, resumes=whole.name, resumes_at=SAVED)


@pytest.fixture(scope="module")
def launcher(request, tmp_path_factory) -> Launcher:
    """With the runs that the selected tests compare."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("resumes")
    launcher = Launcher(folder)
    texts = [file.read_text() for file in sorted((folder / "short").iterdir())]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "corpus"))
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    cells = [(one["optimizer"], one["data"], one["before"], one["after"]) for one in chosen]
    writers = {work.name: work for work in (straight(*cell[:3]) for cell in cells)}
    launcher.launch([*writers.values(), *(resumed(*cell) for cell in cells)])
    return launcher


@pytest.mark.parametrize(
    ("optimizer", "data", "before", "after"),
    [pytest.param(*cell, marks=[] if cell in BY_DAY else [pytest.mark.nightly]) for cell in GRID],
)
def test_it_goes_on_as_the_run_that_wrote_the_checkpoint(launcher, optimizer, data, before, after):
    whole, rest = straight(optimizer, data, before).name, resumed(optimizer, data, before, after).name
    lines, expected = launcher.metrics(rest), launcher.metrics(whole)[SAVED:]

    assert held(launcher, rest, "start") == saved(launcher, whole)
    assert [(line["step"], line["tokens"], line["lr"]) for line in lines] == [
        (line["step"], line["tokens"], line["lr"]) for line in expected
    ]
    assert len(lines) == STEPS - SAVED
    tolerance = TOLERANCES.get(optimizer, EXACT)
    for line, other in zip(lines, expected, strict=True):
        if before == after:
            assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])
        assert math.isclose(line["loss"], other["loss"], rel_tol=max(EXACT, tolerance / 10)), line
        assert math.isclose(line["grad_norm"], other["grad_norm"], rel_tol=tolerance), line
    if before == after:
        assert held(launcher, rest, "end") == held(launcher, whole, "end")


def held(launcher, name, moment) -> dict[str, str]:
    """Digests of all tensors of a run, which the ranks that hold one agree about."""
    digests: dict[str, str] = {}
    for rank in launcher.seen(name):
        for key, value in getattr(rank, moment).items():
            assert digests.setdefault(key, value) == value, key
    return digests


def saved(launcher, name) -> dict[str, str]:
    """Digests of the tensors of the checkpoint that is resumed."""
    checkpoint = open_checkpoint(launcher.run_dir(name) / f"checkpoints/step_{SAVED:08d}")
    entries = checkpoint.saved_tensors()
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    checkpoint.load(tensors)
    return {key: digest(tensor) for key, tensor in tensors.items() if not key.startswith("evaluation.")}
