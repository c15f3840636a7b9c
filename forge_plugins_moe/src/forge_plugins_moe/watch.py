"""The callback ``experts``: what each expert of each sparse layer had to do, kept, told and drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import torch

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.contracts.model import canonical_name
from forge_core.errors import ConfigError
from forge_plugins_moe.coactivation import Coactivation
from forge_plugins_moe.config import WatchConfig
from forge_plugins_moe.feed_forward import MoE
from forge_plugins_moe.heat_map import draw
from forge_plugins_moe.load_history import LoadHistory


@attrs.frozen
class _Look:
    """Values of a logged step on their way to the host."""

    step: int
    values: torch.Tensor
    """All layers' loads; then for how many steps their experts have had no token; then, if asked for, their pairs."""
    copied: torch.cuda.Event | None


class WatchExperts(Callback):
    """Looks at logged steps, and writes a line of ``experts.jsonl`` in the run's directory when their metrics are
    written. ``experts.html`` is drawn from it at the end.

    On other steps it counts, on the device, for how long each expert has been without a token, and nothing waits.
    """

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._layers: dict[str, MoE] = {}
        self._sizes: dict[str, int] = {}
        """Experts of each sparse layer of the model, those of other pipeline stages too."""
        self._without: dict[str, torch.Tensor] = {}
        """For how many steps each expert of this rank's layers has had no token."""
        self._last_without: dict[str, list[float]] = {}
        """The same at the last line written, of all layers, on rank 0."""
        self._coactivation: dict[str, Coactivation] = {}
        self._looks: list[_Look] = []
        self._told: dict[str, set[int]] = {}
        self._last_step = 0
        self._history: LoadHistory | None = None

    def run_start(self, run: RunContext) -> None:
        self._layers = {
            canonical_name(name): module
            for part in run.parts
            for name, module in part.named_modules()
            if isinstance(module, MoE)
        }
        own = {name: layer.config.n_experts for name, layer in self._layers.items()}
        # asked for once, as ranks of another pipeline stage have other layers
        sizes = [one for sizes in run.mesh.gather_over("pp", own) for one in sizes.items()]
        self._sizes = dict(sorted(sizes, key=lambda one: _number(one[0])))
        self._without = {
            name: self._steps_without(name, torch.zeros(layer.config.n_experts, device=run.device))
            for name, layer in self._layers.items()
        }
        if self._config.coactivation:
            self._coactivation = {name: Coactivation(layer, run.device) for name, layer in self._layers.items()}
        if run.rank == 0:
            self._history = LoadHistory(run.run_dir, run.log)
            self._history.forget_after(self._last_step)
            if not self._sizes:
                run.log("experts: the model has no layer `moe`; there is nothing to watch")

    @torch.no_grad()
    def step_end(self, run: RunContext, context: StepContext) -> None:
        for name, layer in self._layers.items():
            load, without = layer.last_load, self._without[name]
            # a layer that no gradient passes counts nothing, and tells nothing of its experts
            self._without[name] = torch.where(load > 0, 0, without + (load.sum() > 0))
        if context.logged and self._sizes:
            self._look(run, context.step)
        for pairs in self._coactivation.values():
            pairs.forget()

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        self._write(run, up_to=step)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._write(run, up_to=step)
        if self._history is not None and self._sizes:
            self._draw(run)

    def _draw(self, run: RunContext) -> None:
        """If it can be; the work of the run is done, with or without the picture."""
        try:
            draw(run.run_dir)
        except (OSError, ConfigError) as error:
            run.log(f"experts: cannot draw the picture: {error}")

    def state(self) -> Mapping[str, Any]:
        told = {name: sorted(dead) for name, dead in self._told.items()}
        # of the layers of other pipeline stages, rank 0 knows what they had at the last look
        without = {**self._last_without, **{name: steps.tolist() for name, steps in self._without.items()}}
        return {"step": self._last_step, "without": without, "told": told}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._last_step = int(state["step"])
        self._last_without = {name: [*steps] for name, steps in state.get("without", {}).items()}
        self._told = {name: {*dead} for name, dead in state.get("told", {}).items()}
        self._without = {name: self._steps_without(name, steps) for name, steps in self._without.items()}
        self._looks.clear()
        if self._history is not None:
            self._history.forget_after(self._last_step)

    def _steps_without(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What a layer goes on from: zeros, or what was restored."""
        steps = self._last_without.get(name, [])
        return like.new_tensor(steps) if len(steps) == len(like) else torch.zeros_like(like)

    def _look(self, run: RunContext, step: int) -> None:
        """Start to copy to rank 0's host. Ranks with the same layers have the same values."""
        self._last_step = step
        parts = [self._of_layers({name: layer.last_load for name, layer in self._layers.items()}, run)]
        parts.append(self._of_layers(self._without, run))
        if self._config.coactivation:
            pairs = {name: counts.fraction().flatten() for name, counts in self._coactivation.items()}
            parts.append(self._of_layers(pairs, run, power=2))
        values = run.mesh.sum_over(torch.cat(parts), ("pp",))
        if run.rank != 0:
            return
        copied = None
        if values.device.type == "cuda":
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            copied.record()
        self._looks.append(_Look(step, values, copied))

    def _of_layers(self, values: Mapping[str, torch.Tensor], run: RunContext, power: int = 1) -> torch.Tensor:
        """One vector, in the order of all layers, zero for those of another pipeline stage."""
        return torch.cat(
            [
                values[name].float() if name in values else torch.zeros(size**power, device=run.device)
                for name, size in self._sizes.items()
            ]
        )

    def _write(self, run: RunContext, up_to: int) -> None:
        while self._looks and self._looks[0].step <= up_to:
            look = self._looks.pop(0)
            if look.copied is not None:
                look.copied.synchronize()
            values = iter(look.values.tolist())
            load = self._by_layer(values)
            self._last_without = self._by_layer(values)
            pairs = self._by_layer(values, power=2) if self._config.coactivation else {}
            assert self._history is not None, "looks are kept by rank 0"
            self._history.add(look.step, load, pairs)
            run.track_series(look.step, {f"load/{name}": each for name, each in load.items()})
            for name, steps in self._last_without.items():
                self._tell_dead(run, name, steps)

    def _by_layer(self, values: Iterator[float], power: int = 1) -> dict[str, list[float]]:
        """The next vector, taken apart."""
        return {name: list(islice(values, size**power)) for name, size in self._sizes.items()}

    def _tell_dead(self, run: RunContext, name: str, without: Sequence[float]) -> None:
        """Once, until the expert has had a token again."""
        limit = self._config.dead_after
        dead = {expert for expert, steps in enumerate(without) if steps >= limit}
        new = sorted(dead - self._told.get(name, set()))
        if new:
            which = f"expert {new[0]} has" if len(new) == 1 else f"experts {', '.join(map(str, new))} have"
            run.log(f"experts: {name}: {which} had no token for {limit} steps")
        self._told[name] = dead


def _number(layer: str) -> float:
    """Its place in the model: ranks of a pipeline need not have stages that follow each other."""
    first, number, *_ = f"{layer}..".split(".")
    return int(number) if first == "blocks" else math.inf
