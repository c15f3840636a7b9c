"""Components that a run has because they are installed: its observers, and a supervisor."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import RunSection
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.supervisor import Supervisor
from forge_core.registry.catalog import Catalog

_DEFAULT = "peers"
"""The supervisor of a job that names none."""


def installed_observers(catalog: Catalog) -> list[ComponentRef]:
    """Return all that are installed, in the same order on all ranks."""
    names = sorted(one.qualified_name for one in catalog.components("observer"))
    return [ComponentBuilder(catalog).resolve("observer", name) for name in names]


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
