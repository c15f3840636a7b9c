"""The supervisor of a run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import RunSection
from forge_core.contracts.supervisor import Supervisor
from forge_core.registry.catalog import Catalog

_DEFAULT = "peers"


def find_supervisor(catalog: Catalog, run: RunSection, run_directory: Path) -> Supervisor:
    """Build it on all ranks. For one rank alone, or where there is none, it is a ``Supervisor`` that does nothing."""
    build, use = ComponentBuilder(catalog), run.supervisor
    if use is None and any(one.component.name == _DEFAULT for one in catalog.components("supervisor")):
        use = build.resolve("supervisor", _DEFAULT)
    if use is None or dist.get_world_size() == 1:
        return Supervisor()
    supervisor: Supervisor = build(use, run=run, run_directory=run_directory)
    return supervisor
