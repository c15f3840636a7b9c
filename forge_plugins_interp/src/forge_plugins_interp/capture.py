"""The callback ``capture``: values of sites in training steps."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.checkpoint.fsync import make_folder
from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_interp.host_copy import begin_copy, wait_for_copies
from forge_plugins_interp.monitoring_config import CaptureConfig
from forge_plugins_interp.observation import observe
from forge_plugins_interp.placement import whole
from forge_plugins_interp.reduction import Reduction
from forge_plugins_interp.shard_writer import ShardPart, ShardWriter
from forge_plugins_interp.sites import PlacedSite, sites_of_run
from forge_plugins_interp.store import TOKENS, Manifest, StoredSite, write_index

_WRITING = 600.0
"""Seconds that a store of a step may take."""


class Capture(Callback):
    """Writes what a step computes to ``captures/step_<step>`` in the run's directory, a store with one shard for each
    microbatch of each data-parallel rank. ``stimulus_id`` is the number of a sample in the batch of the step.

    The values are those of the training forward, with dropout. Files are written while the run goes on.
    """

    def __init__(self, config: CaptureConfig, /) -> None:
        self._config = config
        dtype = getattr(torch, config.dtype) if config.dtype else None
        self._reduction = Reduction(over=config.over, features=config.features, dtype=dtype)
        self._chosen: list[PlacedSite] = []
        self._contexts = ExitStack()
        self._writer: ShardWriter | None = None
        """Of the step that was captured last."""
        self._unfinished: tuple[Path, Manifest] | None = None
        """The store of that step, on rank 0."""
        self._rows: dict[str, list[torch.Tensor]] = {}
        """By site and microbatch, on ranks that write."""
        self._forwards: Counter[str] = Counter()
        self._are_tokens: list[torch.Tensor] = []
        """Of each microbatch, which positions ``(B, S)`` are no padding."""
        self._tokens: list[torch.Tensor] = []

    def run_start(self, run: RunContext) -> None:
        self._chosen = sites_of_run(run.parts, run.mesh, run.job).chosen(self._config.sites)

    def step_start(self, run: RunContext, step: int) -> None:
        if step % self._config.interval:
            return
        self._rows, self._are_tokens, self._tokens = defaultdict(list), [], []
        self._forwards.clear()
        for part in run.parts:
            hook = part.register_forward_pre_hook(self._look_at_inputs(run), with_kwargs=True)
            self._contexts.callback(hook.remove)
        self._contexts.enter_context(observe(self._chosen, lambda placed, value: self._take(run, placed, value)))

    def _look_at_inputs(self, run: RunContext) -> Any:
        def look(part: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
            # the engine looks into the loss once, beside the step, without gradients
            if not torch.is_grad_enabled() or part is not run.parts[0]:
                return
            first, positions = args[0] if args else inputs["tokens"], inputs.get("positions")
            whole_length = first.shape[1] * run.mesh.degrees["cp"]
            lengths = torch.full((len(first),), whole_length, device=first.device)
            if positions is not None and bool((positions < 0).any()):
                lengths = run.mesh.sum_over((positions >= 0).sum(1), ("cp",))
            is_token = torch.arange(whole_length, device=first.device) < lengths[:, None]
            self._are_tokens.append(is_token)
            if first.dtype == torch.int64 and first.shape[1] == whole_length:
                self._tokens.append(first[is_token].cpu())

        return look

    def _take(self, run: RunContext, placed: PlacedSite, value: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        is_token = self._are_tokens[self._forwards[placed.name]]
        self._forwards[placed.name] += 1
        made_whole = whole(value, placed.cuts)
        if _writes(run):
            seed = run.job.train.seed
            rows, lack = self._reduction.cast(self._reduction.rows(placed.site, made_whole, is_token, seed))
            if lack:
                told = f"callbacks.capture: site {placed.name} has {lack}, which are stored as infinite; use bfloat16"
                warnings.warn(told, stacklevel=2)
            self._rows[placed.name].append(begin_copy(rows))

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        if context.step % self._config.interval:
            return
        self._contexts.close()
        self._finish(run)
        wait_for_copies()
        self._refuse_unseen(run)
        folder = run.run_dir / "captures" / f"step_{context.step:08}"
        make_folder(folder)
        self._write(run, context.step, folder)

    def _refuse_unseen(self, run: RunContext) -> None:
        for placed in self._chosen:
            if _writes(run) and placed.name not in self._rows:
                raise ConfigError(
                    f"callbacks.capture: site {placed.name}: training does not compute it, as the loss takes the "
                    "head's weight itself"
                )

    def _write(self, run: RunContext, step: int, folder: Path) -> None:
        size, dp_size, dp_rank = _data_ranks(run)
        n_micro = len(self._are_tokens)
        self._write_manifest(run, step, folder, n_micro * dp_size * size)
        if not _writes(run):
            return
        self._writer = ShardWriter(folder)
        self._writer.__enter__()
        for number in range(n_micro):
            shard = {name: rows[number] for name, rows in self._rows.items()}
            if self._tokens:
                shard[TOKENS] = self._tokens[number]
            beside = {"length": self._are_tokens[number].sum(1).cpu()} if self._tokens else {}
            self._writer.put(
                ShardPart(shard=number * dp_size + dp_rank, rows=shard, beside_tokens=beside, is_last=True)
            )

    def _write_manifest(self, run: RunContext, step: int, folder: Path, n_samples: int) -> None:
        """The index and the manifest, of all stages, by rank 0. The store is complete once all ranks have written: that
        is known at the next capture, or at the end of the run."""
        own = {
            placed.name: StoredSite(
                dims=self._reduction.dims(placed.site),
                sizes=tuple(self._rows[placed.name][0].shape[1:]),
                dtype=str(self._rows[placed.name][0].dtype).removeprefix("torch."),
                reduced=self._reduction.words(),
            )
            for placed in self._chosen
            if placed.name in self._rows
        }
        sites = {name: one for stage in run.mesh.gather_over("pp", own) for name, one in stage.items()}
        lengths = torch.stack([one.sum(1) for one in self._are_tokens]).cpu()
        for axis in ("dp_shard", "dp_replicate"):
            lengths = torch.cat(run.mesh.gather_over(axis, lengths), dim=1)
        if run.rank == 0:
            origin = {"run": str(run.job.run.name), "step": step, "data": "the batch of the step"}
            manifest = Manifest(sites=sites, n_samples=n_samples, shard_samples=run.job.train.batch_size, origin=origin)
            write_index(folder, {"stimulus_id": np.arange(n_samples), "length": lengths.flatten().numpy()})
            manifest.write(folder)
            self._unfinished = folder, manifest

    def _finish(self, run: RunContext) -> None:
        """Wait for the files of the step that was captured last, on all ranks together."""
        self._wait_for_writer()
        for axis in run.mesh.degrees:
            run.mesh.gather_over(axis, None)
        if self._unfinished is not None:
            (folder, manifest), self._unfinished = self._unfinished, None
            attrs.evolve(manifest, complete=True).write(folder)

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.__exit__(None)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        with run.patient(_WRITING):
            self._finish(run)

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._contexts.close()
        self._wait_for_writer()


def _data_ranks(run: RunContext) -> tuple[int, int, int]:
    """Samples of a microbatch of a rank, data-parallel ranks, and this one's number among them."""
    mesh: Any = run.mesh
    return run.job.train.batch_size, mesh.dp_size, mesh.dp_rank


def _writes(run: RunContext) -> bool:
    mesh: Any = run.mesh
    return all(mesh.device_mesh.get_local_rank(axis) == 0 for axis in ("tp", "cp"))
