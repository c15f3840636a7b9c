"""All ranks run the same job with the same packages, or none does."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from forge_core import __version__
from forge_core.config.describe import literal
from forge_core.config.diff import leaves
from forge_core.config.sections import Job
from forge_core.distributed.collective_errors import any_rank, gather, run_on_rank0
from forge_core.distributed.installed import chosen_supervisor, installed_observers
from forge_core.errors import ConfigError, and_more
from forge_core.job import components, job_table
from forge_core.registry.catalog import Catalog

_OF_THE_MACHINE = ("run.dir", "run.device")
_SHOWN = 10


def refuse_unequal_ranks(job: Job, catalog: Catalog) -> None:
    """Compare what decides the run over all ranks; all of them must call it.

    Raises:
        ConfigError: on every rank, with each key that differs, its values, and the ranks that have them.
    """
    if dist.get_world_size() == 1:
        return
    own = fingerprint(job, catalog)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    if not any_rank(digest != run_on_rank0(lambda: digest))[0]:
        return
    differences = list(_differences(gather(own)))
    shown = "\n".join(differences[:_SHOWN]) + and_more(len(differences), _SHOWN, "\n  ")
    raise ConfigError(f"the ranks have not been started with the same job and packages:\n{shown}")


def fingerprint(job: Job, catalog: Catalog) -> dict[str, str]:
    """Every key of the resolved job that is not the machine's own, and every version that could change a number."""
    facts = {key: literal(value) for key, value in leaves(job_table(job)) if key not in _OF_THE_MACHINE}
    for key in [key for key in facts if key.startswith("plugins.files.")]:
        facts[key] = hashlib.sha256(facts[key].encode()).hexdigest()[:12]  # of a text that is too long for a message
    supervisor = chosen_supervisor(catalog, job.run)  # ranks with different ones would wait for each other
    facts["run.supervisor"] = "none" if supervisor is None else str(supervisor.provider)
    observers = installed_observers(catalog)
    facts["observers"] = ", ".join(use.qualified_name for use in observers) or "none"
    beside = [*observers, *([supervisor] if supervisor else [])]
    providers = {use.provider for use in (*beside, *(one for _, one in components(job)))}
    versions = {one.distribution: one.version for one in catalog.plugins if one.distribution in providers}
    versions |= {"forge-core": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
    versions["Python"] = ".".join(platform.python_version_tuple()[:2])
    return facts | {f"version of {name}": number for name, number in versions.items()}


def _differences(ranks: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for key in sorted({key for facts in ranks for key in facts}):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            holders.setdefault(facts.get(key, "unset"), []).append(rank)
        if len(holders) > 1:
            yield f"  {key}: " + "; ".join(f"{value} on {_rank_words(held)}" for value, held in holders.items())


def _rank_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{and_more(len(ranks), 8)}"
