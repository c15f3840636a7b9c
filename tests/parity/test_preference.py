"""Preference tuning in every layout is that of one process, and a run that goes on has the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_plugins_data.preference_reference import write_reference
from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import by_day_or_night, selected_cells

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXACT = 1e-5
"""Relative, of losses; in fp32 only the order of sums differs, of which some are a hundred times the loss."""
TRAINING = [
    'data={name="preference_pairs", path="pairs.jsonl", reference="reference.npz", validation=0.2}',
    *("loss.name=dpo", "loss.beta=0.1", "loss.label_smoothing=0.1"),
    *("model.n_layers=2", "train.seq_len=64", "checkpoint.interval=4"),
]
PP2 = ["parallel.pp=2", "parallel.passes.pipeline.schedule=1F1B", "train.batch_size=1", "train.grad_accumulation=4"]
LAYOUTS = {  # a step always has four samples
    "accumulation4": (1, ["train.batch_size=1", "train.grad_accumulation=4"]),
    "chunked": (1, ["loss.loss={name='chunked_cross_entropy', chunk_size=7}"]),
    "fsdp2": (2, ["train.batch_size=2"]),
    "copies2": (2, ["train.batch_size=2", "parallel.dp_replicate=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "tp2-chunked": (2, ["parallel.tp=2", "loss.loss={name='chunked_cross_entropy', chunk_size=7}"]),
    "pp2": (2, PP2),
    "cp2": (2, ["parallel.cp=2"]),
    "ac-compiled": (1, ["parallel.passes.activation_checkpointing=true", "parallel.passes.compile=true"]),
}
BY_NIGHT = ("chunked", "fsdp2", "copies2", "tp2", "ac-compiled")
REPORTED = [f"auxiliary/reward_{name}" for name in ("chosen", "rejected", "margin", "accuracy")]


def write_pairs(folder: Path) -> None:
    """Sums, right and wrong, and a reference near a model that knows nothing. Most pairs fill a sample, whose target is
    then in its first half, which under context parallelism another rank has than the second."""
    pairs = [
        {"prompt": f"{n} + {n % 7} = ", "chosen": f"{n + n % 7}", "rejected": "many " * 6 if n % 5 else f"{n + 9}"}
        for n in range(60)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    build = ComponentBuilder(discover())
    use = build.resolve("data_source", {"name": "preference_pairs", "path": str(folder / "pairs.jsonl")})
    source = build(use, seq_len=64, split="all", seed=0, samples_per_step=1, phases=())
    values = np.array([[-5.5 * one.sum() for one in pair.learned] for pair in source.pairs])  # of a model untrained
    values += np.random.default_rng(0).uniform(-5, 5, (60, 2))
    write_reference(folder / "reference.npz", [pair.key for pair in source.pairs], values, source.tokenizer.fingerprint)


@pytest.fixture(scope="module")
def launcher(request, tmp_path_factory) -> Launcher:
    launcher = Launcher(folder := tmp_path_factory.mktemp("preference"))
    write_pairs(folder)
    chosen = selected_cells(request)
    works = [Work(name, ranks, [*TRAINING, *layout]) for name, (ranks, layout) in LAYOUTS.items() if name in chosen]
    again = Work("again", 1, TRAINING, resumes="alone", resumes_at=4)
    launcher.launch([Work("alone", 1, TRAINING), again, *works])
    return launcher


@pytest.mark.parametrize("cell", by_day_or_night(LAYOUTS, BY_NIGHT))
def test_ten_steps_and_their_evaluation_are_those_of_one_process(launcher, cell):
    lines, references = launcher.metrics(cell), launcher.metrics("alone")

    assert [line["step"] for line in references] == [*range(1, 11), 10]
    for line, reference in zip(lines, references, strict=True):
        for key in reference.keys() & {"loss", "eval/loss", "eval/tokens"}:
            assert line[key] == pytest.approx(reference[key], rel=EXACT), (line["step"], key)
        for key in reference.keys() & {"grad_norm", *REPORTED}:
            assert line[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-4), (line["step"], key)


def test_the_margin_grows(launcher):
    lines = launcher.metrics("alone")

    assert set(REPORTED) <= lines[0].keys()
    assert lines[9]["auxiliary/reward_margin"] > lines[0]["auxiliary/reward_margin"] + 0.5
    assert lines[9]["loss"] < lines[0]["loss"]


def test_a_run_that_goes_on_has_the_same_bits(launcher):
    whole, rest = launcher.metrics("alone"), launcher.metrics("again")

    names = ("step", "loss", "grad_norm", *REPORTED)
    expected = [[line.get(name) for name in names] for line in whole if line["step"] > 4]
    assert [[line.get(name) for name in names] for line in rest if line["step"] > 4] == expected
    saved = [launcher.saved(name) for name in ("alone", "again")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][key]) for key, tensor in saved[0].items())
