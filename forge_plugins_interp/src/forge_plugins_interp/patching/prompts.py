"""Two prompts, and what is measured of them."""

from __future__ import annotations

import attrs
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.patching.metric import Metric
from forge_plugins_interp.session import Session


@attrs.frozen
class Prompts:
    """Two prompts of equal length, and what they are measured by."""

    clean: torch.Tensor
    """``(1, S)`` int64."""
    corrupt: torch.Tensor
    metric: Metric

    def __attrs_post_init__(self) -> None:
        if self.clean.shape != self.corrupt.shape:
            raise ConfigError(
                f"the clean prompt has {self.clean.shape[1]} tokens, and the corrupt one {self.corrupt.shape[1]}; "
                "patching needs equally many"
            )

    def measure(self, session: Session, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model, and measure each sample."""
        logits = session.model(tokens)
        assert logits is not None, "a pipeline was refused"
        return self.metric(logits)


@attrs.frozen
class Span:
    """The metric of both prompts, between which effects lie."""

    clean: float
    corrupt: float

    def __attrs_post_init__(self) -> None:
        if abs(self.clean - self.corrupt) < 1e-7:
            raise ConfigError(f"the metric is {self.clean:.6g} for both prompts, so that nothing can be brought back")

    def effect(self, value: float) -> float:
        """How much of the answer it brings back: 0 for nothing, 1 for all."""
        return (value - self.corrupt) / (self.clean - self.corrupt)


def refuse_pipeline(session: Session) -> None:
    """
    Raises:
        ConfigError: the model is on the stages of a pipeline.
    """
    if session.context.mesh.degrees["pp"] > 1:
        raise ConfigError("patching needs the logits on all ranks; open the model with parallel.pp=1")
