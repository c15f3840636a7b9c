"""The loss curve does not depend on how a model is cut into pipeline stages, nor do checkpoints.

All runs of one number of ranks share the processes of one launch: starting them costs more than a run.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main

FOUR = ["model.n_layers=4", "train.batch_size=1", "train.grad_accumulation=4", "eval.interval=5"]
PACKED = [*FOUR, "data.document_mask=true"]
AUXILIARY = [*FOUR, 'model.feed_forward={name="sized_mlp"}']
HALVES = [*FOUR, "train.clip_norm=0", "scheduler.decay_steps=10"]  # a clipped gradient depends on how a norm is summed
GROUPED = [*FOUR, 'optimizer.groups=[{pattern="embed.*", lr=1e-3}, {pattern="blocks.3.*", weight_decay=0.5}]']
BF16 = [*FOUR, "train.precision=bf16"]


def pipeline(schedule, *overrides):
    return [f"parallel.passes.pipeline.schedule={schedule}", *overrides]


PP2 = "parallel.pp=2"
CURVES = {  # the ranks, what both have in common, and what only the pipeline has
    "gpipe": (2, FOUR, [PP2, *pipeline("GPipe")]),
    "1f1b": (2, PACKED, [PP2, *pipeline("1F1B")]),
    "1f1b, auxiliary losses": (2, AUXILIARY, [PP2, *pipeline("1F1B")]),
    "interleaved 1f1b": (2, FOUR, [PP2, *pipeline("Interleaved1F1B")]),
    "interleaved zero bubble": (2, PACKED, [PP2, *pipeline("InterleavedZeroBubble")]),
    "zero bubble v": (2, AUXILIARY, [PP2, *pipeline("ZBVZeroBubble")]),
    "zero bubble v, chunked loss": (2, [*FOUR, "loss.name=chunked_cross_entropy"], [PP2, *pipeline("ZBVZeroBubble")]),
    "dualpipe v": (2, PACKED, [PP2, *pipeline("DualPipeV")]),
    "bf16": (2, BF16, [PP2, *pipeline("Interleaved1F1B")]),
    "four stages": (4, FOUR, ["parallel.pp=4"]),
    "two stages of two shards": (4, FOUR, [PP2, "train.grad_accumulation=2"]),
    "two v stages of two tensor parts": (4, PACKED, [PP2, "parallel.tp=2", *pipeline("DualPipeV")]),
    "two v stages of two copies": (
        4,
        FOUR,
        [PP2, "train.grad_accumulation=2", "parallel.dp_replicate=2", *pipeline("ZBVZeroBubble")],
    ),
}

FSDP2 = ["train.grad_accumulation=2"]
CHAIN = {  # layouts of one run, by the step until which each goes on
    "stages, one process": [(5, [PP2]), (10, None)],
    "one process, stages": [(5, None), (10, [PP2, *pipeline("Interleaved1F1B")])],
    "stages, shards, stages": [(4, [PP2]), (7, FSDP2), (10, [PP2, *pipeline("ZBVZeroBubble")])],
}

RANK = """
import json, os, sys
from pathlib import Path
from forge_core.config.job import load_job
from forge_core.discovery import discover
from forge_core.engine.run import run_job
from forge_core.errors import ForgeError

catalog = discover()
for port, overrides, dry_run, refused in json.loads(sys.argv[2]):
    os.environ["MASTER_PORT"] = port
    job = load_job(Path(sys.argv[1]), overrides, catalog=catalog, world_size=int(os.environ["WORLD_SIZE"]))
    try:
        run_job(job, catalog, dry_run=dry_run)
    except ForgeError as error:
        if not refused:
            raise
        print(error)
"""

PLUGIN = """
from forge_core.api import Component, hookimpl

@hookimpl
def forge_feed_forwards():
    yield Component(
        name="sized_mlp",
        summary="an MLP whose output should be small, in layers 0 and 3",
        factory="sized.layer:SizedMLP",
        config="forge_plugins_dense.config:MLPConfig",
    )
"""

LAYER = """
from forge_core.auxiliary import attach_auxiliary_loss
from forge_plugins_dense.feed_forward import MLP

class SizedMLP(MLP):
    def __init__(self, config, *, layer, **rest):
        super().__init__(config, **rest)
        self.layer = layer

    def forward(self, hidden, valid=None):
        out = super().forward(hidden, valid)
        if self.layer in (0, 3):
            return attach_auxiliary_loss(out, 0.1 * out.float().square().sum(), f"size_{self.layer}")
        return out
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """A folder with a plugin whose feed-forward layers have auxiliary losses, different ones in different stages."""
    site = tmp_path_factory.mktemp("site")
    for path, text in {
        "sized/__init__.py": "",
        "sized/plugin.py": PLUGIN,
        "sized/layer.py": LAYER,
        "sized-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sized\nVersion: 1.0\n",
        "sized-1.0.dist-info/entry_points.txt": "[forge.v1]\nsized = sized.plugin\n",
    }.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
    sys.path.insert(0, str(site))
    yield site
    sys.path.remove(str(site))


@pytest.fixture(scope="module")
def together(shared_tiny, plugins):
    """Run jobs (overrides, and whether to stop before the first step, or to be refused) one after the other on so many
    ranks; gives back what the first rank said."""

    def run(ranks, jobs):
        sockets = [socket.socket() for _ in jobs]
        for one in sockets:
            one.bind(("localhost", 0))
        ports = [str(one.getsockname()[1]) for one in sockets]
        for one in sockets:
            one.close()
        work = json.dumps([[port, *job] for port, job in zip(ports, jobs, strict=True)])
        environment = {
            **shared_tiny.environment(),
            "PYTHONPATH": os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "localhost",
            "WORLD_SIZE": str(ranks),
        }
        started = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(shared_tiny.config), work],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
        return said[0]

    return run


def whole(tiny, overrides):
    """The same job in this process, once."""
    name = f"whole-{abs(hash(tuple(overrides)))}"
    if not tiny.path(name).exists():
        tiny.completed(*overrides, f"run.name={name}")
    return tiny.metrics(name)


@pytest.fixture(scope="module")
def curves(shared_tiny, together):
    for ranks in (2, 4):
        jobs = [
            [[*common, *own, f"run.name={name.replace(', ', '-')}"], False, False]
            for name, (wanted, common, own) in CURVES.items()
            if wanted == ranks
        ]
        together(ranks, jobs)
    return lambda name: shared_tiny.metrics(name.replace(", ", "-"))


@pytest.mark.parametrize("name", CURVES)
def test_ten_steps_and_evaluations_have_the_values_of_one_process(shared_tiny, curves, name):
    _, common, _ = CURVES[name]
    tolerance = 5e-3 if common is BF16 else 1e-5  # rounding to 8 bits comes at other places in other sums

    lines, references = curves(name), whole(shared_tiny, common)

    assert len(lines) == len(references) == 12  # ten steps and two evaluations
    for line, reference in zip(lines, references, strict=True):
        assert line.keys() == reference.keys()
        for key in ("step", "tokens", "eval/tokens"):
            assert line.get(key) == reference.get(key)
        for key in line:
            if key in ("loss", "grad_norm", "eval/loss") or key.startswith("auxiliary/"):
                assert line[key] == pytest.approx(reference[key], rel=tolerance), key


def test_auxiliary_losses_of_all_stages_are_reported(curves):
    for name in ("1f1b, auxiliary losses", "zero bubble v"):
        assert {"auxiliary/size_0", "auxiliary/size_3"} <= curves(name)[0].keys()


@pytest.fixture(scope="module")
def chains(shared_tiny, together):
    """Each run of ``CHAIN`` to its end. What needs two ranks goes through one launch where the order allows it."""

    def alone(name, steps):
        shared_tiny.completed(*HALVES, f"run.name={name}", f"train.steps={steps}")

    def job(name, steps, own):
        return [[*HALVES, *own, f"run.name={name}", f"train.steps={steps}"], False, False]

    first, second = "stages-one-process", "one-process-stages"
    alone(second, 5)
    dry = [[*FOUR, PP2, *pipeline("ZBVZeroBubble"), "run.name=dry"], True, False]
    short = [[*FOUR, PP2, "model.n_layers=1", "run.name=short"], False, True]
    grouped = [[*GROUPED, PP2, "run.name=grouped"], False, False]
    said = together(
        2,
        [
            job(first, *CHAIN["stages, one process"][0]),
            job(second, *CHAIN["one process, stages"][1]),
            *(job("stages-shards-stages", *leg) for leg in CHAIN["stages, shards, stages"]),
            grouped,
            dry,
            short,
        ],
    )
    alone(first, 10)
    return said


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    entries = open_checkpoint(checkpoint).saved_tensors()
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    open_checkpoint(checkpoint).load(tensors)
    return tensors


@pytest.mark.parametrize("chain", CHAIN)
def test_a_run_goes_on_in_another_layout_where_it_was(shared_tiny, chains, chain):
    name = chain.replace(", ", "-").replace(" ", "-")

    references = [line for line in whole(shared_tiny, HALVES) if "loss" in line]
    lines = [line for line in shared_tiny.metrics(name) if "loss" in line]

    assert [line["step"] for line in lines] == list(range(1, 11))
    for line, reference in zip(lines, references, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("chain", ["stages, one process", "one process, stages"])
def test_checkpoints_of_stages_are_those_of_one_process_bit_for_bit(shared_tiny, chains, chain):
    whole(shared_tiny, HALVES)
    straight = shared_tiny.path(f"whole-{abs(hash(tuple(HALVES)))}") / "checkpoints/step_00000010"
    halved = shared_tiny.path(chain.replace(", ", "-").replace(" ", "-")) / "checkpoints/step_00000010"

    one, other = tensors_of(straight), tensors_of(halved)

    assert one.keys() == other.keys()
    assert any(key.startswith("optimizer.") for key in one)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    state, reference = (open_checkpoint(path).state()["optimizer"] for path in (halved, straight))
    assert state == reference


def test_a_dry_run_shows_the_stages_of_all_ranks(chains):
    assert "pipeline, rank 0 of pp: 5 modules: embed, blocks.0, blocks.3, norm, head" in chains
    assert "pipeline, rank 1 of pp: 2 modules: blocks.1, blocks.2" in chains


def test_fewer_layers_than_stages_are_refused_before_anything_is_written(shared_tiny, chains):
    assert "the model has 1 layers, and each of 2 stages needs at least one" in chains
    assert not shared_tiny.path("short").exists()


def test_parameter_groups_may_name_what_one_stage_holds(shared_tiny, chains):
    references = whole(shared_tiny, GROUPED)

    for line, expected in zip(shared_tiny.metrics("grouped"), references, strict=True):
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.grad_accumulation=1"], "fewer microbatches than the pipeline has ranks; set it to at least 2"),
        (["model.tie_embeddings=true"], "embedding and head are one tensor"),
        (pipeline("ZBVZeroBuble"), "'ZBVZeroBubble'"),
        (pipeline("DualPipeV", "parallel.passes.compile=true"), "DualPipeV cannot be combined with 'compile'"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(tiny, capfd, overrides, sentence):
    code = main(["run", str(tiny.config), "--nproc", "2", *FOUR, PP2, *overrides])

    said = capfd.readouterr().err
    assert code == 2, said
    assert sentence in said
    assert not tiny.path().exists()
