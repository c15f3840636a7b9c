"""A model that our passes have never seen gets every layout from what it declares: the curve of one process.

``acme-jay`` is built and named differently in everything that the contract leaves open; see its ``model.py``.
"""

from __future__ import annotations

import pytest
import torch

from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import by_day_or_night, selected_cells

pytestmark = pytest.mark.slow

STEPS = 3
SHORT = [f"train.steps={STEPS}", f"eval.interval={STEPS}", "train.batch_size=2", "train.grad_accumulation=4"]
JAY = ['model={name="acme-jay:jay",width=32,depth=4,looks=4}', *SHORT]
_LINEAR = '{at="::2", mixer={name="acme-mixers:gated_linear", memory=4.0}}'
TRAININGS = {
    "plain": JAY,
    "packed": [*JAY, "data.path=short", "data.document_mask=true"],
    "tied": [*JAY, "model.tied=true"],
    "cubic": [  # for so long that it has learnt what is rare
        *(*JAY, "train.steps=10", "eval.interval=10"),
        *("optimizer={name='cubic', lr=0.02}", "evaluations=[{name='surprise'}]"),
    ],
    "row-scaled": [*JAY, "optimizer={name='row_scaled', lr=1e-3}"],
    "averaged": [  # of steps one is a spike, and left out
        *(*JAY, "train.steps=6", "eval.interval=6"),
        *("optimizer={name='signum', lr=1e-3}", "anomalies={spike_factor=1.045, spike_window=2}"),
        "callbacks=[{name='parity_probe'}, {name='polyak'}]",
    ],
    "linear": [  # a mixer of a wheel in every second layer of our decoder, between two kinds of attention
        'model.mixer={name="latent", kv_rank=24, plain_dim=6, rotary_dim=2, value_dim=6}',
        f'model.layers=[{_LINEAR}, {{at=1, mixer="attention", window=8}}]',
        *(*SHORT, "data.path=short", "data.document_mask=true"),
    ],
    "streamed": [
        *JAY,
        'data={name="acme-recipes:tides",vocab_size=257,streams=4}',
        *('eval.data={name="text_files",path="long",pattern="*.txt"}', "eval.batches=2"),
    ],
}

HALF = "train.batch_size=1"  # on two ranks with samples of their own
FULL = "parallel.passes.activation_checkpointing=true"
SELECTIVE = "parallel.passes.activation_checkpointing.mode=selective"
COMPILE = "parallel.passes.compile=true"
WHOLE_STREAM = "parallel.passes.tensor_parallel.sequence_parallel=false"
ZERO_BUBBLE = "parallel.passes.pipeline.schedule=ZBVZeroBubble"
TP2, PP2, CP2 = "parallel.tp=2", "parallel.pp=2", "parallel.cp=2"

CELLS = {  # the ranks, the training that is to be reproduced, and the layout
    "full": (1, "plain", [FULL]),
    "selective": (1, "plain", [SELECTIVE]),
    "compile-selective": (1, "plain", [COMPILE, SELECTIVE]),
    "fsdp2": (2, "packed", [HALF]),
    "fsdp2-full": (2, "plain", [HALF, FULL]),
    "fsdp2-tied": (2, "tied", [HALF]),
    "tp2": (2, "packed", [TP2]),
    "tp2-whole-stream": (2, "plain", [TP2, WHOLE_STREAM]),
    "tp2-selective": (2, "plain", [TP2, SELECTIVE]),
    "tp2-compile": (2, "plain", [TP2, COMPILE]),
    "tp2-tied": (2, "tied", [TP2]),
    "pp2": (2, "packed", [PP2]),
    "pp2-zero-bubble": (2, "plain", [PP2, ZERO_BUBBLE]),
    "cp2": (2, "packed", [CP2]),
    "cp2-full": (2, "packed", [CP2, FULL]),
    "fsdp2-cubic": (2, "cubic", [HALF]),
    "pp2-tp2-zero-bubble": (4, "packed", [PP2, TP2, ZERO_BUBBLE]),
    "pp2-fsdp2": (4, "plain", [PP2, HALF]),
    "tp2-fsdp2": (4, "plain", [TP2, HALF]),
    "tp2-fsdp2-streamed": (4, "streamed", [TP2, HALF]),
    "cp2-tp2": (4, "packed", [CP2, TP2]),
    "tp2-fsdp2-cubic": (4, "cubic", [TP2, HALF]),
    "tp2-fsdp2-linear": (4, "linear", [TP2, HALF, "checkpoint.interval=1"]),
    "pp2-linear": (2, "linear", [PP2, ZERO_BUBBLE]),
    "compile-linear": (1, "linear", [COMPILE, FULL]),
    "tp2-fsdp2-row-scaled": (4, "row-scaled", [TP2, HALF]),
    "tp2-fsdp2-averaged": (4, "averaged", [TP2, HALF]),
}
ON = [f"train.steps={STEPS + 1}", "eval.interval=0"]
"""One more step, in another layout."""
AVERAGED_ON = ["train.steps=7", "eval.interval=7"]


def warm(source: str) -> list[str]:
    """A run that begins with all tensors of another one."""
    return ["train.steps=3", "eval.interval=0", f'checkpoint.load={{path="runs/{source}", include=["*"]}}']


COMPARED = {
    *("loss", "grad_norm", "eval/loss", "tokens", "skipped", "eval/surprise/targets"),
    "polyak/away/head.weight",  # what reaches biases of keys is rounding alone, of which signum takes the sign
}

BY_NIGHT = {  # by day, each pass and each training is there once, but for compile, which takes a minute
    *("selective", "compile-selective", "fsdp2-full", "tp2-whole-stream", "tp2-selective", "tp2-compile"),
    *("pp2-zero-bubble", "fsdp2", "fsdp2-tied", "tp2", "pp2", "pp2-fsdp2", "tp2-fsdp2", "cp2-tp2", "compile-linear"),
    *("tp2-fsdp2-linear", "tp2-tied", "pp2-tp2-zero-bubble", "full", "cp2", "tp2-fsdp2-cubic"),
    "tp2-fsdp2-averaged",
}
assert CELLS.keys() >= BY_NIGHT


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, installed, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """The runs of all selected tests share one launch of four ranks, of the environment that has nothing but wheels."""
    chosen = selected_cells(request)
    launcher = Launcher(tmp_path_factory.mktemp("jay"), python=installed.python)
    works = [Work(f"alone-{name}", 1, TRAININGS[name]) for name in trainings_of(chosen)]
    for name, (ranks, training, layout) in CELLS.items():
        if name in chosen:
            works.append(Work(name, ranks, [*TRAININGS[training], *layout]))
    if (written := "tp2-fsdp2-linear") in chosen:
        works.append(Work("linear-again", 4, [*TRAININGS["linear"], TP2, HALF], resumes=written, resumes_at=1))
    if (written := "tp2-fsdp2-row-scaled") in chosen:
        works.append(Work("row-scaled-on", 2, [*TRAININGS["row-scaled"], HALF, *ON], resumes=written))
        works.append(Work("alone-row-scaled-on", 1, [*TRAININGS["row-scaled"], *ON], resumes="alone-row-scaled"))
        works.append(Work("row-scaled-warm", 2, [*TRAININGS["row-scaled"], HALF, *warm(written)]))
        works.append(Work("alone-row-scaled-warm", 1, [*TRAININGS["row-scaled"], *warm("alone-row-scaled")]))
    if (written := "tp2-fsdp2-averaged") in chosen:
        works.append(Work("averaged-on", 2, [*TRAININGS["averaged"], HALF, *AVERAGED_ON], resumes=written))
        works.append(Work("alone-averaged-on", 1, [*TRAININGS["averaged"], *AVERAGED_ON], resumes="alone-averaged"))
    launcher.launch(works)
    return launcher


def trainings_of(cells: set[str]) -> list[str]:
    """What has to be reproduced in these cells; all of it, if none is chosen."""
    return sorted({CELLS[cell][1] for cell in cells}) or [*TRAININGS]


@pytest.mark.timeout(1500)  # of which the launch is nearly all
@pytest.mark.parametrize("cell", by_day_or_night(CELLS, BY_NIGHT))
def test_steps_have_the_losses_and_gradient_norms_of_one_process(launcher: Launcher, cell: str) -> None:
    ranks, training, _ = CELLS[cell]

    lines, references = launcher.metrics(cell), launcher.metrics(f"alone-{training}")

    steps = {"cubic": 10, "averaged": 6}.get(training, STEPS)
    assert [line["step"] for line in references] == [*range(1, steps + 1), steps]  # and an evaluation
    for line, reference in zip(lines, references, strict=True):
        for key in reference.keys() & COMPARED:
            assert line[key] == pytest.approx(reference[key], rel=1e-5), (line["step"], key)
        if "eval/surprise/rare" in reference:  # a probability may be rounded across the border
            assert 0 < reference["eval/surprise/rare"] < 1
            assert line["eval/surprise/rare"] == pytest.approx(reference["eval/surprise/rare"], abs=5e-3)
    norms = [seen.gradient_norms for seen in launcher.seen(cell)]
    assert norms == [norms[0]] * ranks


@pytest.mark.nightly  # by day, the kit and a run in one process
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", ["tp2-fsdp2-averaged"])
def test_the_mean_of_an_outsiders_callback_is_evaluated(launcher: Launcher, cell: str) -> None:
    """Over the updates that were made, of an optimizer that leaves one out; in this layout, and when it goes on in
    another."""
    last = launcher.metrics(cell)[-2]
    tensors, on = launcher.saved(cell), [launcher.metrics(name)[-2:] for name in ("averaged-on", "alone-averaged-on")]
    mine = {key.rpartition(".polyak.")[2]: one for key, one in tensors.items() if ".callback.polyak." in key}

    assert last["skipped"] == 1
    assert mine.pop("count") == 5
    assert mine.keys() == {key.removeprefix("evaluation.") for key in tensors if key.startswith("evaluation.")}
    for name, mean in mine.items():
        assert torch.equal(tensors[f"evaluation.{name}"], mean)
        assert not torch.equal(tensors[f"model.{name}"], mean)
        assert last[f"polyak/away/{name}"] == pytest.approx((tensors[f"model.{name}"] - mean).norm().item(), rel=1e-5)
    for line, reference in zip(*on, strict=True):
        assert line["step"] == reference["step"] == 7
        for key in reference.keys() & {"loss", "grad_norm", "eval/loss"}:
            assert line[key] == pytest.approx(reference[key], rel=1e-5), key
    assert {"eval/loss"} <= on[0][1].keys()


def test_the_trainings_differ_from_each_other(launcher: Launcher, request: pytest.FixtureRequest) -> None:
    """Else a cell could not tell that documents or the tie had been lost."""
    trainings = trainings_of(selected_cells(request))
    losses = [launcher.metrics(f"alone-{training}")[STEPS - 1]["loss"] for training in trainings]

    assert min(abs(one / other - 1) for one in losses for other in losses if one is not other) > 1e-4


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", ["tp2-fsdp2-row-scaled"])
@pytest.mark.parametrize(("way", "step"), [("on", STEPS + 1), ("warm", 3)])
def test_state_of_another_shape_goes_on_in_another_layout(launcher: Launcher, cell: str, way: str, step: int) -> None:
    """Resumed, and as a warm start."""
    line, reference = (launcher.metrics(name)[-1] for name in (f"row-scaled-{way}", f"alone-row-scaled-{way}"))

    assert line["step"] == reference["step"] == step
    for key in ("loss", "grad_norm", "tokens"):
        assert line[key] == pytest.approx(reference[key], rel=1e-5), key


@pytest.mark.nightly  # by day, a pipeline has this mixer
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", ["tp2-fsdp2-linear"])
def test_a_mixer_of_another_package_goes_on_to_the_same_bits(launcher: Launcher, cell: str) -> None:
    lines, again = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in launcher.metrics(name) if "loss" in line]
        for name in (cell, "linear-again")
    )

    assert again[0][0] == 2
    assert again == lines[1:]
    tensors, others = launcher.saved(cell), launcher.saved("linear-again")
    assert tensors.keys() == others.keys()
    assert all(torch.equal(one, others[key]) for key, one in tensors.items())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("neighbours")
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    path = folder / "jay.toml"
    path.write_text(
        """
[model]
name = "jay"
width = 32
depth = 12
looks = 4

[data]
name = "text_files"
path = "text.txt"

[train]
steps = 4
seq_len = 32
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3
"""
    )
    return path


def table(said: str) -> list[list[str]]:
    """The lines of a dry run's table of passes, in words."""
    lines = [line.split() for line in said.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:2] == ["pass", "phase"])
    return [words for words in lines[start + 1 :] if ":" in words[0]]


def test_a_pass_stands_where_its_neighbours_tell_it_to(installed, job) -> None:
    """By name alone, and by the order of the configuration, they would stand the other way round."""
    chosen = ["parallel.passes.acme_offload.every=3", "parallel.passes.fsdp=true", "parallel.passes.label_blocks=true"]

    said = installed.trained("run", "--dry-run", job, *chosen, cwd=job.parent)

    assert table(said) == [
        ["acme-passes:label_blocks", "checkpointing", "12", "blocks.0–11"],
        ["forge-plugins-parallel:activation_checkpointing", "checkpointing", "12", "blocks.0–11"],
        ["acme-passes:acme_offload", "checkpointing", "4", "blocks.0,3,6,9"],
        ["forge-plugins-parallel:fsdp", "fsdp", "14", "blocks.0–11,", "head,", "the", "model"],
    ]


@pytest.mark.parametrize(
    ("passes", "sentence"),
    [
        (
            ["against_the_phases", "fsdp"],
            "it says that it comes after 'fsdp', but its phase 'shard' comes before 'fsdp'. This is a bug in one of",
        ),
        (
            ["in_a_circle", "label_blocks", "activation_checkpointing"],
            "says that it comes before the next; leave one out",
        ),
        (["without_its_neighbour"], "it needs the pass 'adapters'"),
        (["label_blocks", "compile"], "a compiled block is one kernel after the other, and has no place for a label"),
    ],
)
def test_what_cannot_be_true_is_refused_by_validation(installed, job, passes: list[str], sentence: str) -> None:
    said = installed.refused("validate", job, *(f"parallel.passes.{name}=true" for name in passes), cwd=job.parent)

    assert sentence in said
