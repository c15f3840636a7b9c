"""The supervisor of a run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import RunSection
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.supervisor import Supervisor
from forge_core.registry.catalog import Catalog

_DEFAULT = "peers"


def chosen_supervisor(catalog: Catalog, run: RunSection) -> ComponentRef | None:
    """Return the one that the run names, or ``peers`` where it is installed."""
    if run.supervisor is None and any(one.component.name == _DEFAULT for one in catalog.components("supervisor")):
        return ComponentBuilder(catalog).resolve("supervisor", _DEFAULT)
    return run.supervisor


def build_supervisor(catalog: Catalog, run: RunSection, run_directory: Path) -> Supervisor:
    """Build it on all ranks. Where there is none, or a rank alone whose job names none, it does nothing."""
    use = chosen_supervisor(catalog, run)
    if use is None or (dist.get_world_size() == 1 and run.supervisor is None):
        return Supervisor()
    supervisor: Supervisor = ComponentBuilder(catalog)(use, run=run, run_directory=run_directory)
    return supervisor
