"""The callback ``parity_probe``: what only the ranks themselves can see of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state_dict import model_tensors, named_parameters, optimizer_state
from forge_core.contracts.callback import Callback, RunContext, StepContext
from parity_matrix.config import NothingToChoose


@attrs.frozen
class Seen:
    """What one rank saw of a run, from its (last) start to its end."""

    start: Mapping[str, str]
    """Digests of the whole tensors that it held parts of, by key, before its first step."""
    end: Mapping[str, str]
    """The same after the last step."""
    gradient_norms: Mapping[str, float]
    """By step."""
    gradients: Mapping[str, torch.Tensor]
    """Whole gradients of its parameters at step 1, by name; empty if the run began later."""


class Probe(Callback):
    """Gathers tensors from the ranks that share them, which no step does by itself."""

    def __init__(self, config: NothingToChoose) -> None:
        self._norms: dict[str, float] = {}
        self._gradients: dict[str, torch.Tensor] = {}

    def run_start(self, run: RunContext) -> None:
        self._parameters = named_parameters(run.parts)  # FSDP has others in the modules after the first forward
        self._start = self._digests(run)
        run.log(f"weights: {weight_norm(run):.9g}")

    def before_optimizer_step(self, context: StepContext) -> None:
        self._norms[str(context.step)] = context.metrics["grad_norm"].item()
        if context.step == 1:
            self._gradients = {name: whole(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def run_end(self, run: RunContext) -> None:
        file = _file(run.run_dir, run.rank)
        file.parent.mkdir(exist_ok=True)
        torch.save(self._gradients, file.with_suffix(".pt"))
        seen = {"start": self._start, "end": self._digests(run), "gradient_norms": self._norms}
        file.write_text(json.dumps(seen))

    def _digests(self, run: RunContext) -> dict[str, str]:
        state, _ = optimizer_state(run.optimizer, self._parameters)
        tensors = {**model_tensors(self._parameters, run.parts), **state}
        return {key: digest(whole(tensor)) for key, tensor in tensors.items()}


def weight_norm(run: RunContext) -> float:
    """The L2 norm of all weights, in any layout, as ``docs/hooks/forge_callbacks.md`` has it."""
    squares = torch.zeros((), device=run.device)
    for part in run.parts:
        for parameter in part.parameters():
            square = parameter.detach().float().square().sum()
            squares += square.full_tensor() if isinstance(square, DTensor) else square
    return run.sum_over_stages(squares).sqrt().item()


def seen_by(run_dir: Path, rank: int) -> Seen:
    """What the rank recorded in the folder of its run."""
    file = _file(run_dir, rank)
    return Seen(**json.loads(file.read_text()), gradients=torch.load(file.with_suffix(".pt")))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, gathered on all ranks that share it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if tensor.dtype == torch.int16:  # no collective has it
        return whole(tensor.int()).short()
    return tensor.full_tensor().clone()


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bits; dtype and shape count as well."""
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / "seen" / f"rank{rank}.json"
