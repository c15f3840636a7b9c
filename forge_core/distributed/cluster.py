"""The cluster that has started this process, of those that plugins describe."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.cluster_environment import NO_CLUSTER, ClusterEnvironment
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_core.registry.suggestions import missing_cluster

CLUSTER, JOB, JOB_END = "FORGE_JOB_CLUSTER", "FORGE_JOB_ID", "FORGE_JOB_END"
"""Environment variables: which cluster's job this is, its number there, and its end in seconds since 1970."""


def find_cluster(catalog: Catalog, environment: Mapping[str, str]) -> ClusterEnvironment:
    """The installed one that detects itself, or ``NO_CLUSTER``.

    Raises:
        ConfigError: several do; or none does, and the environment is that of one whose plugin is missing.
    """
    build = ComponentBuilder(catalog)
    found = {}
    for provided in catalog.components("cluster_environment"):
        cluster = build(build.resolve("cluster_environment", provided.qualified_name))
        if cluster.detect(environment):
            found[provided] = cluster
    if len(found) > 1:
        names = " and ".join(provided.qualified_name for provided in found)
        last = [*found][-1].plugin.distribution
        raise ConfigError(
            f"{len(found)} clusters at once: {names} detect their variables; --disable-plugin {last} drops one"
        )
    missing = "" if found or "RANK" in environment else missing_cluster(catalog, environment)
    if missing:
        raise ConfigError(missing)
    return next(iter(found.values()), NO_CLUSTER)


def note_job(cluster: ClusterEnvironment, environment: MutableMapping[str, str]) -> None:
    """Set the variables above, and forget those of a job that has started this one."""
    end = cluster.end_time(environment)
    said = {CLUSTER: cluster.title, JOB: cluster.job(environment), JOB_END: "" if end is None else str(end)}
    for name, value in said.items():
        if value:
            environment[name] = value
        else:
            environment.pop(name, None)
