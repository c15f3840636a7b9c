"""What the engine adds to a step, and how often it makes the host wait for the device.

The same model, optimizer, clipping, schedule and data run in a bare PyTorch loop and in Forge's trainer, in one
process, in alternation. Usage: ``python benchmarks/step_overhead.py [--steps 40] [--rounds 7]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.callback import Callback, Requests, RunContext
from forge_core.contracts.parallel_pass import PassContext
from forge_core.contracts.phase_plan import PhasePlan
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import build_mesh, choose_device, join_process_group
from forge_core.job import load_job
from forge_core.passes.order import sort_passes
from forge_core.registry.discovery import discover
from forge_core.train.build import Built, build_model, build_optimizer
from forge_core.train.evaluation import Evaluations
from forge_core.train.events import Events
from forge_core.train.metrics import Metrics
from forge_core.train.replication import Replicas
from forge_core.train.run import Reports, Run
from forge_core.train.step_guard import StepGuard
from forge_core.train.step_modules import StepModules
from forge_core.train.trainer import Trainer

JOB = """
[model]
name = "transformer"
dim = {dim}
n_layers = {layers}
n_heads = 4
max_seq_len = 512
vocab_size = {vocab}
[data]
name = "text_files"
path = "unused"
[train]
steps = {steps}
seq_len = {seq_len}
batch_size = 4
grad_accumulation = {accumulation}
precision = "fp32"
[optimizer]
name = "adamw"
lr = 3e-4
[scheduler]
name = "cosine"
warmup_steps = 2
[checkpoint]
interval = 0
[metrics]
interval = 10
"""
SHAPES = {
    "tiny (dim 64, 2 layers, 4 × 32 tokens)": {"dim": 64, "layers": 2, "vocab": 257, "seq_len": 32},
    "small (dim 128, 4 layers, 4 × 128 tokens)": {"dim": 128, "layers": 4, "vocab": 1000, "seq_len": 128},
}


class RandomTokens:
    """A source in memory: data cost both loops the same."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size = vocab_size
        self._samples = np.random.default_rng(0).integers(0, vocab_size, (64, seq_len + 1))

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = self._samples[indices]
        return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}


class NothingIsSaved:
    """In place of ``Saving``: files are not what is measured here."""

    is_writing = False

    def finish(self, *_: object, **__: object) -> None:
        pass

    wait_until_copied = ask_for_timely_save = after_step = finish_run = finish


class Bench:
    """One shape, built twice with the same weights."""

    def __init__(
        self, folder: Path, steps: int, accumulation: int = 1, overrides: Sequence[str] = (), **shape: int
    ) -> None:
        config = folder / "job.toml"
        config.write_text(JOB.format(steps=steps, accumulation=accumulation, **shape))
        catalog = discover()
        self.job = load_job(config, overrides, catalog=catalog, world_size=1)
        self.passes = sort_passes(self.job, catalog)
        self.device = choose_device("auto")
        self.mesh = build_mesh(self.job, self.device)
        self.context = PassContext(self.mesh, self.job, self.device)
        self.build = ComponentBuilder(catalog)
        self.source = RandomTokens(shape["vocab"], shape["seq_len"])
        self.steps = steps

    def loader(self) -> BatchLoader:
        train = self.job.train
        return BatchLoader(
            SampleStream(self.source, seed=0, shuffle=True),
            position=0,
            batch_size=train.batch_size,
            grad_accumulation=train.grad_accumulation or 1,
            dp_rank=0,
            dp_size=1,
            workers=1,
            prefetch=4,
            pin_memory=self.device.type == "cuda",
        )

    def parts(self) -> tuple:
        built = build_model(self.context, self.source.vocab_size, self.passes, self.build)
        (model,) = built.parts
        schedule = self.schedule()
        return model, build_optimizer(self.job, built, self.build), schedule, self.build(self.job.loss)

    def schedule(self) -> Schedule:
        train = self.job.train
        tokens = train.batch_size * (train.grad_accumulation or 1) * train.seq_len
        return self.build(self.job.scheduler, total_steps=self.steps, tokens_per_step=tokens)

    def bare(self) -> float:
        """Seconds a step of a loop that anyone would write."""
        model, optimizer, schedule, loss_function = self.parts()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step + 1))
        parameters = list(model.parameters())
        with self.loader() as loader:
            started = None
            for step, microbatches in enumerate(loader, 1):
                if step == 3:
                    started = time.perf_counter()
                for batch in microbatches:
                    on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
                    total, count, _ = model(**on_device, loss=loss_function)
                    (total / count / len(microbatches)).backward()
                norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
                if step % 10 == 0:
                    _ = (total / count).item(), norm.item()
                if step == self.steps:
                    break
            self._wait()
        return (time.perf_counter() - started) / (self.steps - 2)

    def forge(self) -> float:
        """Seconds a step of the engine, from the third step on."""
        trainer = self.trainer()
        starts: list[float] = []
        step = trainer._train_step
        trainer._train_step = lambda microbatches: starts.append(time.perf_counter()) or step(microbatches)
        trainer.train(save_first=False)
        self._wait()
        ended = time.perf_counter()
        trainer.run.loader.close()
        return (ended - starts[2]) / (self.steps - 2)

    def trainer(self, callbacks: Sequence[tuple[str, Callback]] = ()) -> Trainer:
        model = build_model(self.context, self.source.vocab_size, self.passes, self.build)
        optimizer = build_optimizer(self.job, model, self.build)
        requests, reports = Requests(), Reports()
        context = RunContext(
            job=self.job,
            run_dir=Path(),
            rank=0,
            world_size=1,
            device=self.device,
            parts=model.parts,
            optimizer=optimizer,
            total_steps=self.steps,
            requests=requests,
            log=print,
            parameters=model.parameters,
            mesh=self.mesh,
            report=reports.add,
        )
        run = Run(
            context=context,
            mesh=self.mesh,
            directory=SimpleNamespace(write_event=print),
            loader=self.loader(),
            events=Events(callbacks),
            supervisor=None,
            consensus=Consensus(requests, self.device),
            record=lambda values: None,
            reports=reports,
        )
        modules = StepModules(model.parts, self.mesh)
        guard = StepGuard(run)
        metrics = Metrics(run, model, modules, guard)
        return Trainer(
            run=run,
            built=Built(model, optimizer, PhasePlan(model.known)),
            schedule=self.schedule(),
            step_modules=modules,
            evaluations=Evaluations(run, None, None, [], metrics),
            metrics=metrics,
            guard=guard,
            rollback=None,
            saving=NothingIsSaved(),
            replicas=Replicas(),
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class HostSynchronisations(TorchDispatchMode):
    """Counts operations whose result the host needs: each makes it wait for everything the device has queued."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs: Mapping | None = None):
        if function.overloadpacket.__name__ in self.NAMES:
            self.count += 1
        return function(*args, **(kwargs or {}))


def synchronisations(bench: Bench) -> list[tuple[bool, int]]:
    """For each step: whether it was logged, and how often the host waited, including for the values logged before."""
    trainer = bench.trainer()
    counted: list[tuple[bool, int]] = []
    step = trainer._train_step

    def counting(microbatches) -> bool:
        fetch = trainer.metrics.fetch
        waited = 0

        def counting_fetch():
            nonlocal waited
            values = fetch()
            waited += values is not None  # .tolist() on the values of an earlier step does not pass the dispatcher
            return values

        trainer.metrics.fetch = counting_fetch
        with HostSynchronisations() as mode:
            counts = step(microbatches)
        trainer.metrics.fetch = fetch
        counted.append((trainer.metrics.is_logged(trainer.step), mode.count + waited))
        return counts

    trainer._train_step = counting
    trainer.train(save_first=False)
    trainer.run.loader.close()
    return counted


def empty_lifecycle(steps: int = 10_000) -> float:
    """Microseconds a step of the events that nobody listens to."""
    lifecycle = Events([])
    started = time.perf_counter()
    for step in range(steps):
        for event in ("step_start", "before_optimizer_step", "step_end"):
            lifecycle.call(event, run=None, step=step, context=None)
    return (time.perf_counter() - started) / steps * 1e6


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    join_process_group(choose_device("auto"))
    print(f"{'shape':44} {'bare ms':>9} {'forge ms':>9} {'ratio':>7} {'added ms':>9}")
    with TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            bench = Bench(Path(folder), options.steps, **shape)
            bench.bare(), bench.forge()
            pairs = [(bench.bare(), bench.forge()) for _ in range(options.rounds)]
            bare, forge = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            added = statistics.median(b - a for a, b in pairs) * 1e3
            print(f"{name:44} {bare:9.3f} {forge:9.3f} {ratio:7.3f} {added:9.3f}")
        print(f"the empty lifecycle: {empty_lifecycle():.2f} µs a step")
        for accumulation in (1, 4):
            bench = Bench(Path(folder), 25, accumulation, **SHAPES["tiny (dim 64, 2 layers, 4 × 32 tokens)"])
            counted = synchronisations(bench)
            silent = sorted({count for logged, count in counted if not logged})
            total = sum(count for _, count in counted)
            logged = sum(logged for logged, _ in counted)
            print(
                f"accumulation {accumulation}: host synchronisations on steps after unlogged ones {silent[0]}; "
                f"{total} in all for {logged} logged steps of {len(counted)}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
