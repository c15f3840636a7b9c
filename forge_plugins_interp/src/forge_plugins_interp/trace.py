"""The callback ``trace``: fingerprints of what a few steps compute, in the order in which they compute it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_core.ops.auxiliary_loss import LEDGER
from forge_plugins_interp.fingerprint import Fingerprint, add_samples
from forge_plugins_interp.observation import observe
from forge_plugins_interp.placement import summed, whole
from forge_plugins_interp.sites import PlacedSite, sites_of_run
from forge_plugins_interp.trace_comparison import FILE, trace_lines
from forge_plugins_interp.trace_config import TraceConfig

STOPPED = "the last step that was to be traced"


class Trace(Callback):
    """Writes ``trace.jsonl``, a line for each thing of a step, in the order of computation:

    1. ``site``: values of the forward, of all samples of the step;
    2. ``site_gradient``: gradients of the loss by them, from the last to the first;
    3. ``gradient``: gradients of parameters, from the last to the first;
    4. ``update``: how far the optimizer moves each.
    """

    def __init__(self, config: TraceConfig, /) -> None:
        self._config = config
        self._chosen: list[PlacedSite] = []
        self._steps = range(config.first, config.last + 1)
        self._path = Path(config.out) / FILE
        self._contexts = ExitStack()
        self._values: dict[str, Fingerprint] = {}
        self._gradients: dict[str, Fingerprint] = {}
        self._before: dict[str, torch.Tensor] = {}

    def run_start(self, run: RunContext) -> None:
        sites = sites_of_run(run.parts, run.mesh, run.job)
        if self._config.sites:
            self._chosen = sites.chosen(self._config.sites)
        else:
            self._chosen = [placed for placed in sites.here.values() if not placed.site.compute]
        if run.rank == 0:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"out = {self._config.out!r}: cannot write {self._path}: {error.strerror}") from error

    def step_start(self, run: RunContext, step: int) -> None:
        if step in self._steps:
            self._values, self._gradients = {}, {}
            self._contexts.enter_context(observe(self._chosen, self._take))

    def _take(self, placed: PlacedSite, value: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # the engine looks into the loss once, beside the step
            return
        _add(self._values, placed, whole(value, placed.cuts))
        if value.requires_grad:

            def take_gradient(gradient: torch.Tensor) -> None:
                if LEDGER.loss_scale is not None:
                    gradient = gradient.float() / LEDGER.loss_scale
                _add(self._gradients, placed, whole(summed(gradient, placed.sums), placed.cuts))

            handle = value.register_hook(take_gradient)  # type: ignore[no-untyped-call]
            # a pipeline receives into the same tensors in every step
            self._contexts.callback(handle.remove)

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        if context.step not in self._steps:
            return
        self._contexts.close()
        self._write(run, context.step, "site", _of_samples(run, self._values))
        gradients = {name: self._gradients[name] for name in self._values if name in self._gradients}
        self._write(run, context.step, "site_gradient", _of_samples(run, gradients), backward=True)
        found = {name: one.grad for name, one in run.parameters.items() if one.grad is not None}
        self._write(run, context.step, "gradient", _of_parameters(found), backward=True)
        self._before = {name: one.detach().clone() for name, one in run.parameters.items()}

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if context.step not in self._steps:
            return
        moved = {name: run.parameters[name].detach() - before for name, before in self._before.items()}
        self._before = {}
        self._write(run, context.step, "update", _of_parameters(moved))
        if context.step == self._steps[-1]:
            run.log(f"traced steps {self._steps[0]} to {self._steps[-1]}: {self._path}")
            if self._config.stop and context.step < run.total_steps:
                run.requests.stop = STOPPED

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._contexts.close()

    def _write(
        self, run: RunContext, step: int, kind: str, own: dict[str, Fingerprint], *, backward: bool = False
    ) -> None:
        of_stages = run.mesh.gather_over("pp", own)
        if run.rank != 0:
            return
        names = in_order_of_layers(of_stages)
        found = {name: value for one in of_stages[:: 1 if backward else -1] for name, value in one.items()}
        ordered = {name: found[name] for name in (reversed(names) if backward else names)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(trace_lines(step, kind, ordered))


def in_order_of_layers(of_ranks: Iterable[Iterable[str]]) -> list[str]:
    """The names that ranks along ``pp`` have, each in the order of its own stages, which need not follow each other."""
    layers: dict[str, int] = {}
    for names in of_ranks:
        layer = -1  # of what comes before all blocks; what comes after one is at it
        for name in names:
            layer = int(block[1]) if (block := re.match(r"blocks\.(\d+)\.", name)) else layer
            layers.setdefault(name, layer)
    return sorted(layers, key=layers.__getitem__)


def _add(to: dict[str, Fingerprint], placed: PlacedSite, value: torch.Tensor) -> None:
    dims = placed.site.dims
    add_samples(to, placed.name, value, dims.index("sample") if "sample" in dims else 0)


def _of_samples(run: RunContext, own: dict[str, Fingerprint]) -> dict[str, Fingerprint]:
    """The samples of all data-parallel ranks together."""
    for axis in ("dp_shard", "dp_replicate"):
        first, *others = run.mesh.gather_over(axis, own)
        own = first
        for one in others:
            own = {name: value + one[name] if name in one else value for name, value in own.items()}
    return own


def _of_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, Fingerprint]:
    """Each made whole by itself; all ranks that have a part of one call it together."""
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = Fingerprint.of(name, full, None)
    return found
