"""Short trainings: the same numbers as a reference gives, and nothing that slows a GPU down."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.checkpoint.store import open_checkpoint
from forge_plugins_parallel.block_scaled import CAPABILITIES
from gpu_steps.small_run import read_run, train
from gpu_steps.step import FailedError, Figures, Setting, SkippedError, must

ROOT = Path(__file__).resolve().parents[2]
BF16 = "train.precision=bf16"
COMPILED = "parallel.passes.compile.fullgraph=true"
MASKED = ("data.document_mask=true", "data.end_of_document=0")
LAST = "checkpoints/step_00000020"
MOST_STALL = 0.02
"""Of a step, that saving in the background may cost."""
BF16_BOUND = 2e-2
"""Relative difference of losses: kernels round in other orders."""


def documents(setting: Setting) -> Figures:
    """Packed documents in bf16: FlexAttention, compiled blocks and not, against plain products."""
    plain = train(setting, "math", BF16, *MASKED, "model.attention=math")
    distances = {
        "written": train(setting, "written", BF16, *MASKED).distance(plain),
        "compiled": train(setting, "compiled", BF16, *MASKED, COMPILED).distance(plain),
    }
    return _within(distances, BF16_BOUND)


def parity_dense(setting: Setting) -> Figures:
    """Twenty steps of the dense decoder on this device and on the CPU."""
    return _parity(setting, sparse=False)


def parity_sparse(setting: Setting) -> Figures:
    """Twenty steps of the sparse decoder on this device and on the CPU."""
    return _parity(setting, sparse=True)


def _parity(setting: Setting, *, sparse: bool) -> Figures:
    keys = ("train.batch_size=2", *MASKED)
    train(setting, "first", *keys, "train.steps=1", sparse=sparse, device="cpu")
    same_weights = (*keys, f"checkpoint.load.path={setting.folder / 'first'}")  # devices draw their own
    cpu = train(setting, "cpu", *same_weights, sparse=sparse, device="cpu")
    here = train(setting, "here", *same_weights, sparse=sparse)
    rounded = train(setting, "rounded", *same_weights, BF16, sparse=sparse)
    first = abs(here.losses[0] - cpu.losses[0]) / cpu.losses[0]
    distances = {"fp32_first": first, "fp32": here.distance(cpu), "bf16": rounded.distance(cpu)}
    # of a sparse decoder, a token may go to another expert where two are nearly as good
    bounds = {"fp32_first": 1e-5, "fp32": 1e-3 if sparse else 1e-4, "bf16": BF16_BOUND}
    figures = {name: float(f"{distance:.1e}") for name, distance in distances.items()}
    return must(
        {f"{name} is off by {distances[name]:.1e}": not distances[name] < bounds[name] for name in bounds}, figures
    )


def precisions(setting: Setting) -> Figures:
    """Losses of ``bf16_pure``, with each rounding, against ``bf16``; microbatches too."""
    kept = train(setting, "bf16", BF16, "train.grad_accumulation=2")
    distances = {}
    for rounding in ("nearest", "stochastic", "split"):
        keys = ("train.precision=bf16_pure", "train.grad_accumulation=2", f"optimizer.rounding={rounding}")
        distances[rounding] = train(setting, rounding, *keys).distance(kept)
    return _within(distances, 5e-2)


def recompiles(setting: Setting) -> Figures:
    """Graphs and graph breaks of 50 compiled steps, documents and loads of experts changing."""
    figures: dict[str, float | int | str] = {}
    problems = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        torch._dynamo.reset()
        counters.clear()
        run = train(
            setting,
            name,
            *(BF16, *MASKED, COMPILED, "parallel.passes.compile.on_recompile=error"),
            *(() if setting.tiny else ("train.steps=50",)),
            sparse=sparse,
        )
        breaks = sum(counters["graph_break"].values())
        figures |= {f"{name}_graphs": counters["stats"]["unique_graphs"], f"{name}_breaks": breaks}
        figures[f"{name}_first_step_s"] = round(run.logged[0]["step_seconds"], 1)
        problems[f"{breaks} graph breaks ({name})"] = breaks > 0
    return must(problems, figures)


def host_waits(setting: Setting) -> Figures:
    """How often the host waits for the device in a step that logs nothing: scalars read, and what CUDA reports."""
    figures: dict[str, float | int | str] = {}
    places: Counter[str] = Counter()
    for name, sparse in (("dense", False), ("sparse", True)):
        for accumulation in (1, 2):
            few, many = (3, 5) if setting.tiny else (12, 22)
            found = [
                _waits(setting, f"{name}{accumulation}-{steps}", steps, accumulation, sparse, places)
                for steps in (few, many)
            ]
            key = f"{name}_{accumulation}"
            for part, one, other in zip(("scalars", "reported"), *found, strict=True):
                if part == "scalars" or setting.is_gpu:
                    figures[f"{key}_{part}"] = (other - one) / (many - few)
    waits = {name: value for name, value in figures.items() if value}
    where = "; ".join(f"{place} ({count} times)" for place, count in places.most_common(4))
    return must({f"the host waits: {waits}; {where}": bool(waits)}, figures)


def _waits(
    setting: Setting, name: str, steps: int, accumulation: int, sparse: bool, places: Counter[str]
) -> tuple[int, int]:
    overrides = (BF16, f"train.steps={steps}", f"train.grad_accumulation={accumulation}", "metrics.interval=1000")
    if setting.is_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught, ScalarReads() as reads:
            warnings.simplefilter("always")
            train(setting, name, *overrides, sparse=sparse)
    finally:
        if setting.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
    of_cuda = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    places.update(f"{Path(one.filename).name}:{one.lineno}" for one in of_cuda)
    return reads.count, len(of_cuda)


class ScalarReads(TorchDispatchMode):
    """Counts what reads a value of a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def recomputation(setting: Setting) -> Figures:
    """Each mode of activation checkpointing: the same losses, and the most memory of each."""
    key = "parallel.passes.activation_checkpointing"
    kept = train(setting, "kept", BF16, *MASKED, COMPILED)
    modes = {
        "full": (f"{key}.mode=full",),
        "selective": (f"{key}.mode=selective",),
        "second": (f"{key}.mode=full", f"{key}.every=2"),
        "budget": (f"{key}.mode=budget", f"{key}.budget=0.5"),
        **({"offload": (f"{key}.mode=offload",)} if setting.is_gpu else {}),
    }
    runs = {mode: train(setting, mode, BF16, COMPILED, *MASKED, *keys) for mode, keys in modes.items()}
    memory = {f"{mode}_gib": round(run.memory_gib, 3) for mode, run in {"kept": kept, **runs}.items()}
    return {**_within({mode: run.distance(kept) for mode, run in runs.items()}, BF16_BOUND), **memory}


def float8(setting: Setting) -> Figures:
    """Losses with linear layers, and with experts, in float8 against bf16."""
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        raise SkippedError("torchao is not installed") from error
    if setting.is_gpu and torch.cuda.get_device_capability(setting.device) < (8, 9):
        raise SkippedError("this GPU has no float8")
    emulated = () if setting.is_gpu else ("parallel.passes.fp8.emulate=true",)
    distances = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        own = ("parallel.passes.fp8.experts=true",) if sparse else ()
        compiled = () if setting.tiny else (COMPILED,)
        bf16 = train(setting, name, BF16, *compiled, sparse=sparse)
        for recipe in _recipes(setting):
            run = train(
                setting,
                f"{name}-{recipe}",
                *(BF16, *compiled, "parallel.passes.fp8.min_dim=16", f"parallel.passes.fp8.recipe={recipe}"),
                *(*own, *emulated),
                sparse=sparse,
            )
            distances[f"{name}_{recipe}"] = run.distance(bf16)
    return _within(distances, 5e-2)


def _recipes(setting: Setting) -> list[str]:
    """What the device has products for, and the sizes allow."""
    if not setting.is_gpu:
        return ["tensorwise", "rowwise", "mxfp8"]
    if setting.tiny:
        return ["tensorwise", "rowwise"]
    capability = torch.cuda.get_device_capability(setting.device)
    return ["tensorwise", "rowwise", *(recipe for recipe, least in CAPABILITIES.items() if capability >= least)]


def saving(setting: Setting) -> Figures:
    """Twenty steps in one go and in two, bit by bit; and how much longer a step takes that saves in the background."""
    halves = (BF16, *MASKED, "checkpoint.interval=10")
    train(setting, "straight", *halves, "train.steps=20")
    train(setting, "halves", *halves, "train.steps=10")
    train(setting, "halves", *halves, "train.steps=20")
    straight, resumed = (open_checkpoint(setting.folder / name / LAST) for name in ("straight", "halves"))
    names = straight.saved_tensors()
    different = [name for name in names if not torch.equal(straight.read(name), resumed.read(name))]
    stall = _stall(setting)
    problems = {
        f"{len(different)} tensors differ, such as {different[:1]}": bool(different),
        f"a step that saves takes {stall:.3f} of a step longer": setting.measures and stall > MOST_STALL,
    }
    return must(problems, {"tensors": len(names), "stall": stall})


def _stall(setting: Setting) -> float:
    """Time that a saving step takes longer, in steps."""
    run = train(setting, "stalls", BF16, "train.steps=40", "checkpoint.interval=10")
    seconds = [step["step_seconds"] for step in run.logged[5:]]
    usual = statistics.median(seconds)
    saving_steps = [step["step_seconds"] for step in run.logged[5:] if step["step"] % 10 in (0, 1)]
    return round(statistics.median(saving_steps) / usual - 1, 3)


def demo(setting: Setting) -> Figures:
    """``make demo`` on this device: ``configs/demo.toml`` interrupted, continued, and a sample of it."""
    keys = [f"run.dir={setting.folder}", f"run.device={setting.device.type}"]
    if setting.tiny:
        keys += ["model.n_layers=1", "train.seq_len=32", "train.batch_size=2", "eval.batches=1"]
        keys += ["train.steps=120", "checkpoint.interval=60", "eval.interval=60"]
    run, folder = ["run", str(ROOT / "configs" / "demo.toml"), *keys], setting.folder / "demo"
    said = setting.folder / "said.txt"
    with said.open("w") as output:
        interrupted = subprocess.Popen(_forge(*run), stdout=output, stderr=output)
    while interrupted.poll() is None and not (folder / "checkpoints" / "latest").exists():
        time.sleep(0.2)
    interrupted.send_signal(signal.SIGINT)
    codes = [interrupted.wait()]
    sample = ["generate", str(folder), "--prompt", "def ", "--max-new-tokens", "100"]
    done = [subprocess.run(_forge(*one), capture_output=True, text=True) for one in (run, sample)]
    codes += [one.returncode for one in done]
    if codes[0] not in (0, 3) or any(codes[1:]):
        last_words = [said.read_text(), *(one.stderr for one in done)]
        raise FailedError("; ".join([f"exit codes {codes}", *(words.strip()[-600:] for words in last_words)]), {})
    losses = read_run(folder).losses
    figures = {"first_loss": round(losses[0], 3), "last_loss": round(losses[-1], 3), "sampled": len(done[1].stdout)}
    return must({"it has not learnt": losses[-1] > losses[0] - 1}, figures)


def _forge(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "forge_core", *arguments]


def _within(distances: dict[str, float], bound: float) -> Figures:
    """Rounded for the table; ``nan`` is beyond any bound."""
    figures = {name: float(f"{distance:.1e}") for name, distance in distances.items()}
    beyond = {f"{name} is off by {distance:.1e}": not distance < bound for name, distance in distances.items()}
    return must(beyond, figures)
