"""The callback ``coordinates``: how large activations are, and how far training has moved them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_studies.config import COORDINATES, CoordinatesConfig


class Coordinates(Callback):
    """Reports, in each step that is logged, before its update and over the first microbatch of the run:

    - ``coordinates/size/<place>``: the mean absolute value of what the place gives.
    - ``coordinates/change/<place>``: the mean absolute difference from what it gave before the first update.

    Places are ``embed``, ``middle_block``, ``last_block`` (the residual stream after them) and ``logits``. On one
    process, from the first step on; a step that is measured costs a forward pass.
    """

    def __init__(self, config: CoordinatesConfig, /) -> None:
        self._batch: Mapping[str, Any] | None = None
        self._initial: dict[str, torch.Tensor] = {}

    def run_start(self, run: RunContext) -> None:
        """
        Raises:
            ConfigError: there are several ranks, or the run goes on from a checkpoint.
        """
        if run.world_size > 1 or len(run.parts) > 1:
            raise ConfigError("callbacks: coordinates measures a model on one process; start the run with one")
        self._hook = run.parts[0].register_forward_pre_hook(self._take_batch, with_kwargs=True)

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        if not context.logged:
            return
        found = self._measure(run.parts[0])
        if context.step == 1:
            self._initial = found
        if not self._initial:
            raise ConfigError(
                "callbacks: coordinates compares with the first step of a run, and this one goes on later"
            )
        values = {f"{COORDINATES}/size/{place}": value.abs().mean() for place, value in found.items()}
        changes = {place: (value - self._initial[place]).abs().mean() for place, value in found.items()}
        run.report(values | {f"{COORDINATES}/change/{place}": change for place, change in changes.items()})

    def _take_batch(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tokens = arguments[0] if arguments else keywords["tokens"]
        others = {key: value for key, value in keywords.items() if key not in ("tokens", "targets", "loss")}
        self._batch = {"tokens": tokens.clone(), **others}
        self._hook.remove()

    @torch.no_grad()
    def _measure(self, model: Any) -> dict[str, torch.Tensor]:
        assert self._batch is not None, "a step has run the model"
        blocks = [*model.blocks.values()]
        places = {"embed": model.embed, "middle_block": blocks[(len(blocks) - 1) // 2], "last_block": blocks[-1]}
        with _evaluating(model), _outputs(places) as outputs:
            logits = model(**self._batch)
        return {name: outputs[name].float() for name in places} | {"logits": logits.float()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


@contextmanager
def _outputs(places: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """What modules give while it is open; the first, where one gives several."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any) -> None:
        found[name] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for name, module in places.items():
            handle = module.register_forward_hook(lambda *given, name=name: keep(name, given[-1]))
            hooks.callback(handle.remove)
        yield found
