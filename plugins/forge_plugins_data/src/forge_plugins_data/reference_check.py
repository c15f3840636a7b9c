"""The callback ``reference_check``: a reference of other weights ends the run at its first step."""

from __future__ import annotations

import math

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_data.preference_config import ReferenceCheckConfig
from forge_plugins_data.preference_reference import HOW_TO_MAKE


class ReferenceCheck(Callback):
    """Looks at the loss of the first step. Of weights that are the reference it is log 2, as all margins are 0."""

    def __init__(self, config: ReferenceCheckConfig, /) -> None:
        self._tolerance = config.tolerance

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if context.step > 1:
            return
        loss = float(context.metrics["loss"])  # of all ranks, which raise together
        if not abs(loss - math.log(2)) <= self._tolerance:
            raise ConfigError(
                f"data.reference: the loss of the first step is {loss:.4f}, and log 2 = 0.6931 with a reference of the "
                f"weights that the run begins with; {HOW_TO_MAKE}; or take the callback reference_check out, if the "
                "model has dropout"
            )
