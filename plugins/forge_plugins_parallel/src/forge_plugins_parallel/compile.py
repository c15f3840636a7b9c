"""torch.compile, block by block, or the model as a whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters, get_compilation_metrics

from forge_core.config.sections import Job
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_plugins_parallel.config import ActivationCheckpointingConfig, CompileConfig, config_in, splits_backward
from forge_plugins_parallel.split_backward import split_backward
from forge_plugins_parallel.units import units_of

logger = logging.getLogger(__name__)

_GRAPHS = 8
"""Of one kind of unit, at most, as torch has it: for training and evaluation, for sizes, for an input that needs no
gradient."""


class Compile:
    """Compiles each block, and each further unit of the model, in place: blocks of one shape share one graph, and
    parameter names stay as they are."""

    def __init__(self, config: CompileConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        compiled = {"": model} if self._config.whole_model else units_of(model)
        guard = _RecompileGuard(stops=self._config.on_recompile == "error")
        _refuse_old_torch(context.job)
        backend = split_backward if splits_backward(context.job) else "inductor"
        kinds = {tuple(type(part) for part in module.modules()) for module in compiled.values()}
        # torch counts by function, and recomputed units of all kinds share that of their wrapper
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _GRAPHS * len(kinds))
        for name, module in compiled.items():
            fullgraph = self._config.fullgraph
            if fullgraph is None:
                fullgraph = not any(getattr(part, "breaks_graph", False) for part in module.modules())
            module.compile(backend=backend, mode=self._config.mode, fullgraph=fullgraph)
            if self._config.on_recompile != "ignore":
                guard.watch(name, module)
        return model, list(compiled)


def _refuse_old_torch(job: Job) -> None:
    """
    Raises:
        ConfigError: torch is older than 2.13, and cannot compile such a job.
    """
    cannot = {
        "compute gradients of a compiled block's weights by themselves, as this schedule does": splits_backward(job),
        "compile blocks that are recomputed under tensor parallelism": job.parallel.tp > 1
        and config_in(job, ActivationCheckpointingConfig) is not None,
    }
    for words, is_so in cannot.items():
        if is_so and torch.__version__ < "2.13":
            raise ConfigError(f"parallel.passes.compile: torch {torch.__version__} cannot {words}; torch 2.13 can")


class _RecompileGuard:
    """Notices when a module is compiled for training after its first training forward, and says why."""

    def __init__(self, *, stops: bool) -> None:
        self._stops = stops
        self._graphs = 0
        self._settled: set[str] = set()

    def watch(self, name: str, module: nn.Module) -> None:
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
        def after(module: nn.Module, *_: Any) -> None:
            self._look(name, module.training)

        module.register_forward_hook(after)

    def _look(self, name: str, training: bool) -> None:
        graphs = counters["stats"]["unique_graphs"]
        compiled, self._graphs = graphs > self._graphs, graphs
        if compiled and training and name in self._settled:
            self._report(name or "the model")
        if training:
            self._settled.add(name)

    def _report(self, name: str) -> None:
        reasons = [one.recompile_reason for one in get_compilation_metrics() if one.recompile_reason]
        reason = reasons[-1] if reasons else "torch does not say why"
        sentence = f"{name} was compiled again during training, because {reason}"
        if self._stops:
            raise ConfigError(
                f'{sentence}. Keep what the message names the same from step to step, or set on_recompile = "warn" '
                "under [parallel.passes.compile]"
            )
        logger.warning(sentence)
