"""How large the activations are after each block of the model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_plugins_monitor.config import ActivationNormsConfig
from forge_plugins_monitor.logged_steps import is_due

_SQUARES, _COUNT, _MAXIMUM = range(3)


class ActivationNorms(Callback):
    """Reports, of the hidden states that each block gives in training, over all tokens and features of a step:

    - ``activation_rms/<block>``: the root of the mean square.
    - ``activation_max/<block>``: the largest absolute value.

    They are of all microbatches and ranks, padding included, and the host does not wait for them. A block that is
    computed again on the way back counts once, as its own call is what is looked at.

    Hooks are there in the steps that are reported only. But a model that is compiled as a whole takes the hooks that
    it has at its first forward into its graph, for good: it measures in every step, which the compiler fuses.
    """

    def __init__(self, config: ActivationNormsConfig) -> None:
        self._config = config
        self._blocks: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        self._is_traced = False
        self._measured = torch.empty(0)
        """``(3, blocks)`` fp32: the sum of squares, how many values, and the largest absolute one."""

    def run_start(self, run: RunContext) -> None:
        self._blocks = {f"blocks.{key}": block for part in run.parts for key, block in _blocks_of(part)}
        self._measured = torch.zeros(3, len(self._blocks), device=run.device)
        self._is_traced = any(part._compiled_call_impl is not None for part in run.parts)
        if self._is_traced:
            # at one address, as CUDA graphs do without what else is written to
            torch._dynamo.mark_static_address(self._measured)
            self._hook_blocks()

    def step_start(self, run: RunContext, step: int) -> None:
        if not is_due(run, step, self._config.interval):
            return
        self._measured.zero_()
        if not self._is_traced:
            self._hook_blocks()

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        if is_due(run, context.step, self._config.interval):
            self._unhook_blocks()
            self._report(run)
        elif context.logged and run.mesh.degrees["pp"] > 1:
            # what a pipeline ever reports it reports always; the line has null
            nothing = torch.full((2, len(self._blocks)), math.nan, device=run.device)
            self._report_of_blocks(run, nothing)

    def _hook_blocks(self) -> None:
        for index, block in enumerate(self._blocks.values()):
            self._hooks.append(block.register_forward_hook(self._hook_of(index)))

    def _unhook_blocks(self) -> None:
        if not self._is_traced:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _hook_of(self, index: int) -> Any:
        measured = self._measured

        def measure(_: nn.Module, __: Any, output: Any) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output).detach()
            norm = torch.linalg.vector_norm(hidden, dtype=torch.float32)
            measured[_SQUARES, index] += norm * norm
            measured[_COUNT, index] += hidden.numel()
            largest = torch.linalg.vector_norm(hidden, math.inf).float()
            measured[_MAXIMUM, index] = torch.maximum(measured[_MAXIMUM, index], largest)

        # the hook of a block that is compiled by itself stands outside of its graph, and would become one of its own
        return measure if self._is_traced else torch.compiler.disable(measure)  # type: ignore[no-untyped-call]  # torch's

    def _report(self, run: RunContext) -> None:
        """Sums are over ``tp`` as well: where ranks have other tokens that is right, and where they have copies, so
        many times the squares are divided by so many times the values."""
        sums, largest = self._measured[:_MAXIMUM], self._measured[_MAXIMUM]
        # a row for each rank, as the mesh adds up and knows no maximum
        everywhere = self._measured.new_zeros(_MAXIMUM + run.world_size, len(self._blocks))
        everywhere[:_MAXIMUM] = sums
        everywhere[_MAXIMUM + run.rank] = largest
        run.mesh.sum_over(everywhere, ("dp_replicate", "dp_shard", "cp", "tp"))
        rms = (everywhere[_SQUARES] / everywhere[_COUNT]).sqrt()
        self._report_of_blocks(run, torch.stack((rms, everywhere[_MAXIMUM:].amax(dim=0))))

    def _report_of_blocks(self, run: RunContext, values: torch.Tensor) -> None:
        for what, of_blocks in zip(("activation_rms", "activation_max"), values, strict=True):
            run.report({f"{what}/{name}": value for name, value in zip(self._blocks, of_blocks, strict=True)})


def _blocks_of(part: Any) -> list[tuple[str, nn.Module]]:
    return list(part.blocks.items())
