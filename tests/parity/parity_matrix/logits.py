"""The callback ``logits_probe``: a model asked for logits, and not for its loss."""

from __future__ import annotations

from pathlib import Path

import torch

from forge_core.checkpoint.state_dict import named_parameters
from forge_core.contracts.callback import Callback, RunContext
from forge_core.ops.partial_gradients import PartialGradients
from parity_matrix.config import NothingToChoose
from parity_matrix.probe import whole

FILE = "logits.pt"


class LogitsProbe(Callback):
    """Runs the model on tokens of its own before the first step, forward and backward."""

    def __init__(self, config: NothingToChoose) -> None:
        pass

    def run_start(self, run: RunContext) -> None:
        (model,) = run.parts
        parameters, partial = named_parameters(run.parts), PartialGradients.of(run.parts, run.mesh, run.device)
        tokens = torch.arange(3 * 32).view(3, 32) % 250  # two ranks along tp share the middle one
        logits = model(tokens)
        copies = run.world_size // run.job.parallel.tp  # whose gradients are summed, and who have the same tokens here
        logits.float().logsumexp(-1).square().sum().div(copies).backward()
        partial.sum()
        seen = whole({"logits": logits, **{name: parameter.grad for name, parameter in parameters.items()}})
        run.optimizer.zero_grad()
        if run.rank == 0:
            torch.save(seen, run.run_dir / FILE)


def logits_and_gradients(run_dir: Path) -> dict[str, torch.Tensor]:
    """``logits`` (B, S, V), and the gradients of its function, by parameter."""
    seen: dict[str, torch.Tensor] = torch.load(run_dir / FILE)
    return seen
