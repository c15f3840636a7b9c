"""A run that changes its pipeline goes on where it was, and what cannot be one is refused. Curves: tests/parity."""

import re

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from parity_matrix.launch import Launcher, Work

FOUR = ["model.n_layers=4", "train.batch_size=1", "train.grad_accumulation=4"]
CALLBACKS = "callbacks=[{name='parity_probe'}, {name='weight_norm'}]"
# a clipped gradient depends on how a norm is summed
HALVES = [*FOUR, CALLBACKS, "train.clip_norm=0", "scheduler.decay_steps=10"]
GROUPED = [*FOUR, 'optimizer.groups=[{pattern="embed.*", lr=1e-3}, {pattern="blocks.3.*", weight_decay=0.5}]']
PP2 = "parallel.pp=2"


def pipeline(schedule, *overrides):
    return [f"parallel.passes.pipeline.schedule={schedule}", *overrides]


FSDP2 = ["train.grad_accumulation=2"]
CHAINS = {  # layouts of one run: the ranks, the step until which it goes, and what is set
    "stages-one-process": [(2, 5, [PP2]), (1, 10, [])],
    "one-process-stages": [(1, 5, []), (2, 10, [PP2, *pipeline("Interleaved1F1B")])],
    "stages-shards-stages": [(2, 4, [PP2]), (2, 7, FSDP2), (2, 10, [PP2, *pipeline("ZBVZeroBubble")])],
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def said(launcher):
    """All runs of this file, in one launch; what its rank 0 printed."""
    return launcher.launch(
        [
            Work("straight", 1, HALVES),
            *(
                Work(name, ranks, [*HALVES, *layout, f"train.steps={steps}"])
                for name, legs in CHAINS.items()
                for ranks, steps, layout in legs
            ),
            Work("grouped-one-process", 1, GROUPED),
            Work("grouped", 2, [*GROUPED, PP2]),
            Work("dry", 2, [*FOUR, PP2, *pipeline("ZBVZeroBubble")], dry_run=True),
            Work("short", 2, [*FOUR, PP2, "model.n_layers=1"], refused=True),
        ]
    )


def steps(launcher, name):
    return [line for line in launcher.metrics(name) if "loss" in line]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_in_another_layout_where_it_was(launcher, said, chain):
    references, lines = steps(launcher, "straight"), steps(launcher, chain)

    assert [line["step"] for line in lines] == list(range(1, 11))
    for line, reference in zip(lines, references, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("chain", ["stages-one-process", "one-process-stages"])
def test_checkpoints_of_stages_are_those_of_one_process_bit_for_bit(launcher, said, chain):
    one, other = launcher.saved("straight"), launcher.saved(chain)

    assert one.keys() == other.keys()
    assert any(key.startswith("optimizer.") for key in one)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    latest = (launcher.run_dir(name) / "checkpoints/latest" for name in (chain, "straight"))
    state, reference = (open_checkpoint(path).state()["optimizer"] for path in latest)
    assert state == reference


def test_a_callback_sums_over_the_stages_what_each_of_them_has(launcher, said):
    norms = [
        float(re.search(r"weights: (\S+)", (launcher.run_dir(name) / "log.txt").read_text())[1])
        for name in ("straight", "stages-one-process", "stages-shards-stages")
    ]

    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-6)


def test_a_dry_run_shows_the_stages_of_all_ranks(said):
    lines = [" ".join(line.split()) for line in said.splitlines()]
    place = lines.index("forge-plugins-parallel:pipeline split 0 5 embed, blocks.0,3, norm, head")
    assert lines[place + 1] == "1 2 blocks.1–2"


def test_fewer_layers_than_stages_are_refused_before_anything_is_written(launcher, said):
    assert "the model has 1 layers, and each of 2 stages needs at least one" in said
    assert not launcher.run_dir("short").exists()


def test_parameter_groups_may_name_what_one_stage_holds(launcher, said):
    for line, expected in zip(steps(launcher, "grouped"), steps(launcher, "grouped-one-process"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.grad_accumulation=1"], "fewer microbatches than the pipeline has ranks; set it to at least 2"),
        (pipeline("ZBVZeroBuble"), "'ZBVZeroBubble'"),
        (
            pipeline("DualPipeV", "parallel.passes.fsdp.reshard_after_forward=always"),
            '"DualPipeV" cannot be combined with reshard_after_forward = "always"',
        ),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(tiny, capfd, overrides, sentence):
    code = main(["run", str(tiny.config), "--nproc", "2", *FOUR, PP2, *overrides])

    said = capfd.readouterr().err
    assert code == 2, said
    assert sentence in said
    assert not tiny.path().exists()
