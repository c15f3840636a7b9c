"""Updates that come too early: parameters that change while gradients are computed."""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.contracts.callback import RunContext
from forge_core.contracts.observer import Observer
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import PluginError, and_more
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.observers.bit_sums import bit_sums

_STEPS = 2
"""After each start. The host has to wait for what is compared; an update in backward shows in the second step at the
latest, when the optimizer has state."""


class EarlyUpdate(Observer):
    """Ends a run whose optimizer or model changes parameters before gradients are whole."""

    def __init__(self, *, catalog: Catalog) -> None:
        self._catalog = catalog
        self._left = _STEPS
        self._before: Mapping[str, int] = {}

    def gradients_start(self, run: RunContext) -> None:
        if self._left:
            self._before = bit_sums(run.parameters)

    def gradients_end(self, run: RunContext, step: int) -> None:
        """Same as ``Observer.gradients_end``.

        Raises:
            PluginError: parameters have changed.
        """
        if self._left:
            self._left -= 1
            run_on_all_ranks(lambda: self._refuse_if_changed(run, step))
            self._before = {}

    def _refuse_if_changed(self, run: RunContext, step: int) -> None:
        after = bit_sums(run.parameters)
        changed = [name for name in after if after[name] != self._before[name]]
        if changed:
            more = and_more(len(changed), 1)
            raise PluginError(
                f"step {step}: {changed[0]}{more} changed while gradients were computed. Only the step of "
                f"{self._catalog.words_for(run.job.optimizer)} may change parameters, which the engine calls after "
                "gradients are summed over microbatches and ranks and are clipped. This is a bug in the optimizer if "
                "it updates in backward, and otherwise in the model"
            )
