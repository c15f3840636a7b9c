"""Tensor parallelism against one process: same weights, same losses, same gradient norms, same checkpoints.

All runs on as many ranks share one launch, since starting costs more than training.
"""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.config.job import load_job
from forge_core.discovery import discover
from forge_core.engine.run import run_job
from forge_core.errors import ConfigError, ExitCode, PluginError
from forge_core.testing.parallel_pass import ParallelPassConformance
from forge_core.testing.small_model import SmallModel
from forge_plugins_parallel.tensor_parallel import matched_plan

TOML = """
[run]
name = "unnamed"
dir = "{folder}/runs"
device = "cpu"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
max_seq_len = 64
qk_norm = true

[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"
validation = 0.3

[train]
steps = 10
seq_len = 32
batch_size = 4
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[scheduler]
name = "cosine"
warmup_steps = 2

[metrics]
interval = 1
"""

TP = "parallel.tp=2"
HALF = "train.batch_size=2"

# What is trained, and on how many ranks; the same settings without `layout` are the one process it is compared with.
CELLS: dict[str, tuple[int, list[str], list[str]]] = {
    # name: ranks, settings, layout. The vocabulary of bytes has 257 tokens, which no number of ranks here divides.
    "tp2": (2, ["eval.interval=5"], [TP]),
    "tp2-whole-positions": (2, [], [TP, "parallel.passes.tensor_parallel.sequence_parallel=false"]),
    "tp2-tied": (2, ["model.tie_embeddings=true"], [TP]),
    "tp2-chunked": (2, ["loss.name=chunked_cross_entropy", "loss.chunk_size=48", "model.norm=layernorm"], [TP]),
    "tp2-documents": (2, ["data.document_mask=true"], [TP]),
    "tp2-fsdp-on-one-accumulation": (2, [], [TP, HALF, "train.grad_accumulation=2", "parallel.passes.fsdp=true"]),
    "tp4": (4, ["model.n_kv_heads=4"], ["parallel.tp=4"]),
    "tp2-fsdp2": (4, [], [TP, HALF]),
    "tp2-fsdp2-even-vocabulary": (4, ["model.vocab_size=264"], [TP, HALF]),
    "tp2-fsdp2-tied": (4, ["model.tie_embeddings=true"], [TP, HALF]),
    "tp2-two-copies": (4, [], [TP, HALF, "parallel.dp_replicate=2"]),
    "tp2-pp2": (4, [], [TP, "parallel.pp=2", "train.batch_size=1", "train.grad_accumulation=4"]),
    "tp2-cp2-documents": (4, ["data.document_mask=true"], [TP, "parallel.cp=2"]),
    "fsdp2": (2, [], [HALF]),
}

WORKER = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist

from forge_core.checkpoint.store import CheckpointStore
from forge_core.checkpoint.tensors import optimizer_state
from forge_core.config.job import load_job
from forge_core.discovery import discover
from forge_core.engine.mesh import choose_device, join_process_group
from forge_core.engine.run import _build, _prepare, _restore, run_job
from forge_core.errors import ExitCode

catalog = discover()
for work in json.loads(Path(sys.argv[2]).read_text()):
    os.environ["MASTER_PORT"] = str(work["port"])
    job = load_job(Path(sys.argv[1]), work["settings"], catalog=catalog, world_size=int(os.environ["WORLD_SIZE"]))
    if work["save_to"] is None:
        assert run_job(job, catalog) is ExitCode.COMPLETED
        continue
    join_process_group(choose_device(job.run.device))
    prepared = _prepare(job, catalog, choose_device(job.run.device))
    built = _build(prepared)
    _restore(prepared, built)
    tensors = {**built.model.tensors(), **optimizer_state(built.optimizer, built.model.parameters)[0]}
    if prepared.checkpoint is None:
        (model,) = built.model.parts
        tokens = torch.arange(2 * 32).view(2, 32) % 250
        logits = model(tokens)
        # as a loss would that knows nothing of vocabularies in parts; all ranks have the same tokens here
        logits.float().logsumexp(-1).square().sum().div(prepared.mesh.dp_size).backward()
        gradients = {f"gradient.{name}": parameter.grad for name, parameter in built.model.parameters.items()}
        tensors = {**tensors, **gradients, "logits": logits.detach()}
    CheckpointStore(Path(work["save_to"])).save(1, tensors, {}, lambda folder: None)
    dist.destroy_process_group()
"""


class Runs:
    """A folder with a job, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.toml"
        self.config.write_text(TOML.format(folder=folder))
        (folder / "worker.py").write_text(WORKER)
        (folder / "text").mkdir()
        for i in range(12):
            lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(7 + 5 * i))
            (folder / "text" / f"{i}.txt").write_text(lines)

    def alone(self, name: str, *settings: str) -> None:
        """One process: this one."""
        catalog = discover()
        job = load_job(self.config, [*settings, f"run.name={name}"], catalog=catalog, world_size=1)
        assert run_job(job, catalog) is ExitCode.COMPLETED

    def together(self, ranks: int, works: list[tuple[str, list[str], str | None]]) -> None:
        """A name, settings and, to build and restore only, a folder to save to; one after the other, in one launch."""
        plan = self.folder / f"{ranks}.json"
        plan.write_text(
            json.dumps(
                [
                    {"port": _free_port(), "settings": [*settings, f"run.name={name}"], "save_to": save_to}
                    for name, settings, save_to in works
                ]
            )
        )
        processes = [
            subprocess.Popen(
                [sys.executable, self.folder / "worker.py", self.config, plan],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "localhost",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=240)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, said, strict=True):
            assert process.returncode == 0, output[-4000:]

    def metrics(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    def checkpoint(self, name: str) -> Path:
        return self.folder / "runs" / name / "checkpoints" / "step_00000010"

    def saved(self, folder: str) -> Path:
        return self.folder / folder / "step_00000001"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _reference(settings: list[str]) -> str:
    return "alone-" + ("-".join(settings).replace(".", "_").replace("=", "_") or "plain")


BF16 = ["train.precision=bf16"]
EVEN = ["model.vocab_size=264"]
EVALUATED = ["eval.interval=5"]
CONTINUED = ["scheduler.name=constant"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("tensor_parallel"))

    def on(ranks: int) -> list[tuple[str, list[str], str | None]]:
        return [(name, settings + layout, None) for name, (n, settings, layout) in CELLS.items() if n == ranks]

    def saving(name: str, settings: list[str], folder: str) -> tuple[str, list[str], str]:
        """Build, restore what the run of this name has saved, and save again."""
        return name, settings, str(runs.folder / folder)

    two = [
        *on(2),
        ("tp2-bf16", [*BF16, TP], None),
        ("tp2-continued", [*CONTINUED, TP, "train.steps=5"], None),
        saving("initial", [TP], "initial-tp2"),
        saving("tp2", [*EVALUATED, HALF], "tp2-by-fsdp2"),
        saving("fsdp2", [TP], "fsdp2-by-tp2"),
    ]
    four = [
        *on(4),
        saving("initial", [TP, HALF], "initial-tp2-fsdp2"),
        saving("initial", [*EVEN, TP, HALF], "initial-even-tp2-fsdp2"),
        saving("tp2", [*EVALUATED, TP, HALF], "tp2-by-tp2-fsdp2"),
    ]
    one = [
        saving("initial", [], "initial-alone"),
        saving("initial", EVEN, "initial-even-alone"),
        saving("tp2", EVALUATED, "tp2-by-one"),
        saving("tp2-fsdp2-even-vocabulary", EVEN, "tp2-fsdp2-even-vocabulary-by-one"),
    ]
    for ranks, works in ((2, two), (4, four), (1, one)):
        runs.together(ranks, works)
    for settings in {tuple(settings) for _, settings, _ in CELLS.values()} | {tuple(BF16), tuple(CONTINUED)}:
        runs.alone(_reference(list(settings)), *settings)
    return runs


@pytest.mark.parametrize("cell", CELLS)
def test_ten_steps_have_the_loss_and_gradient_norm_of_one_process(runs: Runs, cell: str) -> None:
    lines, expected = runs.metrics(cell), runs.metrics(_reference(CELLS[cell][1]))

    assert len(lines) == len(expected) >= 10
    for line, reference in zip(lines, expected, strict=True):
        for key in reference.keys() & {"loss", "grad_norm", "tokens", "eval/loss", "eval/tokens"}:
            assert line[key] == pytest.approx(reference[key], rel=1e-5), (line["step"], key)


def test_the_first_loss_is_that_of_a_model_whose_norms_are_initialised(runs: Runs) -> None:
    """A model with norms of zero gives ln V exactly; this one starts near it."""
    first = runs.metrics("tp2")[0]["loss"]

    assert 1e-4 < abs(first - math.log(257)) < 0.1


def test_bf16_is_near_one_process(runs: Runs) -> None:
    """Sums over ranks round elsewhere, to 8 bits; over ten steps of training that is a percent at most."""
    lines = runs.metrics("tp2-bf16")
    expected = runs.metrics(_reference(BF16))

    for line, reference in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-2)


@pytest.mark.parametrize("layout", ["tp2", "tp2-fsdp2", "even-tp2-fsdp2"])
def test_initial_values_and_logits_are_those_of_one_process(runs: Runs, layout: str) -> None:
    alone = "initial-even-alone" if "even" in layout else "initial-alone"

    _assert_equal(runs.saved(f"initial-{layout}"), runs.saved(alone))


@pytest.mark.parametrize(
    ("written", "reader"),
    [
        ("tp2", "one"),
        ("tp2", "fsdp2"),
        ("tp2", "tp2-fsdp2"),
        ("fsdp2", "tp2"),
        ("tp2-fsdp2-even-vocabulary", "one"),
    ],
)
def test_a_checkpoint_of_one_layout_is_bit_equal_in_another(runs: Runs, written: str, reader: str) -> None:
    _assert_equal(runs.checkpoint(written), runs.saved(f"{written}-by-{reader}"))


def test_one_process_continues_what_tensor_parallelism_began(runs: Runs) -> None:
    runs.alone("tp2-continued", *CONTINUED)

    lines, expected = runs.metrics("tp2-continued"), runs.metrics(_reference(CONTINUED))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["parallel.tp=3"], "4 heads cannot be shared out evenly to parallel.tp = 3 ranks"),
        (["parallel.tp=4"], "2 key-value heads cannot be shared out evenly to parallel.tp = 4 ranks"),
        ([TP, "train.seq_len=31"], "train.seq_len = 31 cannot be shared out evenly to parallel.tp = 2 ranks"),
        (["parallel.passes.tensor_parallel=true"], "nothing to share layers with, as parallel.tp = 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_at_validation(tmp_path: Path, settings: list[str], sentence: str) -> None:
    config = Runs(tmp_path).config

    with pytest.raises(ConfigError, match=sentence):
        load_job(config, settings, catalog=discover(), world_size=int(settings[0].rpartition("=")[2] == "true") or None)


class TestConformance(ParallelPassConformance):
    """On one rank, with a model whose plan has no ``sequence`` modules."""

    component = "tensor_parallel"


def test_a_star_in_a_plan_stands_for_one_part_of_a_name() -> None:
    plan = matched_plan(SmallModel(n_layers=2))

    assert plan["blocks.1.query"] == "column"
    assert plan["head"] == "vocab"
    assert len(plan) == 2 + 2 * 6


def test_a_plan_that_names_no_module_is_refused() -> None:
    class Misnaming(SmallModel):
        def parallel_plan(self):
            return {"blocks.*.querry": "column"}

    with pytest.raises(PluginError, match=r"Misnaming.parallel_plan names 'blocks.\*.querry', which is no module"):
        matched_plan(Misnaming())


def _assert_equal(one: Path, other: Path) -> None:
    first, second = _tensors(one), _tensors(other)
    assert first.keys() == second.keys()
    assert any(isinstance(tensor, torch.Tensor) and tensor.ndim == 2 for tensor in first.values())
    for key, tensor in first.items():
        if key.startswith(("model.", "optimizer.")):
            assert torch.equal(tensor, second[key]), key
        else:
            torch.testing.assert_close(tensor, second[key], rtol=1e-4, atol=1e-6)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in checkpoint.saved_tensors().items()
    }
    checkpoint.load(tensors)
    return tensors
