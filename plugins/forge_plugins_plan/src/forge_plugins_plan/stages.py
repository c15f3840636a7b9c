"""The ranks of a pipeline: of those whose stages are alike one is simulated, and the others follow from it."""

from __future__ import annotations

import attrs

from forge_core.config.sections import Job
from forge_core.contracts.gpu import Gpu
from forge_core.registry.catalog import Catalog
from forge_plugins_plan.simulation import SimulatedRank, Simulation, Twin, simulate


def simulate_stages(
    job: Job,
    catalog: Catalog,
    vocab_size: int,
    world_size: int,
    gpu: Gpu | None,
    ranks_per_node: int,
    *,
    timed: bool,
) -> list[SimulatedRank]:
    """Simulate a rank of each part of the pipeline, in order.

    Raises:
        ForgeError: as ``simulate``.
    """
    told = job, catalog, vocab_size, world_size
    ranks: list[SimulatedRank] = []
    patterns: list[tuple[Twin, SimulatedRank]] = []
    for stage in range(job.parallel.pp):
        one = Simulation(*told, stage, gpu, ranks_per_node, timed)
        is_inner = 0 < stage < job.parallel.pp - 1
        known = one.follow([each for each in patterns if _shares_nodes_alike(one, each[1].rank)]) if is_inner else None
        if known is None:
            known = simulate(*told, stage, gpu, ranks_per_node, timed=timed)
            if is_inner and stage < job.parallel.pp - 2 and known.traces is not None:
                patterns.append((one.twin(), known))
        ranks.append(attrs.evolve(known, traces=None))
    return ranks


def _shares_nodes_alike(one: Simulation, other: int) -> bool:
    """Return whether nodes cut the ranks of this stage as they cut those of the stage of rank ``other``. Collectives
    take as long then."""
    size, of_node = one.world_size // one.job.parallel.pp, one.ranks_per_node
    in_one = all(first // of_node == (first + size - 1) // of_node for first in (one.rank, other))
    return in_one or one.rank % of_node == other % of_node
