"""The cluster that has started this process, one of the plugins' clusters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.cluster_environment import NO_CLUSTER, ClusterEnvironment
from forge_core.errors import ConfigError, PluginError, retelling
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.suggestions import missing_cluster

CLUSTER, JOB, JOB_END = "FORGE_JOB_CLUSTER", "FORGE_JOB_ID", "FORGE_JOB_END"
"""Environment variables: which cluster's job this is, its number there, and its end in seconds since 1970."""


def find_cluster(catalog: Catalog, environment: Mapping[str, str]) -> ClusterEnvironment:
    """Find the installed cluster that detects itself, or ``NO_CLUSTER``.

    Raises:
        PluginError: one fails while it is asked.
        ConfigError: several do; or none does, and the environment is that of one whose plugin is missing.
    """
    build = ComponentBuilder(catalog)
    found = {}
    for provided in catalog.components("cluster_environment"):
        cluster = build(build.resolve("cluster_environment", provided.qualified_name))
        if _detects(cluster, environment, provided):
            found[provided] = cluster
    if len(found) > 1:
        names = " and ".join(provided.qualified_name for provided in found)
        last = [*found][-1].plugin.distribution
        raise ConfigError(f"{len(found)} clusters detect their variables: {names}; --disable-plugin {last} drops one")
    missing = "" if found or "RANK" in environment else missing_cluster(catalog, environment)
    if missing:
        raise ConfigError(missing)
    return next(iter(found.values()), NO_CLUSTER)


def _detects(cluster: ClusterEnvironment, environment: Mapping[str, str], provided: CatalogEntry) -> bool:
    words, owner = f"the cluster environment '{provided.component.name}'", provided.plugin
    bug = f"This is a bug in {owner.distribution}."
    with retelling(lambda why: PluginError(f"{words} of {owner} fails in detect: {why}. {bug}")):
        return cluster.detect(environment)


def note_job(cluster: ClusterEnvironment, environment: MutableMapping[str, str]) -> None:
    """Set the variables above, and forget those of a job that has started this one."""
    end = cluster.end_time(environment)
    said = {CLUSTER: cluster.title, JOB: cluster.job(environment), JOB_END: "" if end is None else str(end)}
    for name in said:
        environment.pop(name, None)
    environment.update({name: value for name, value in said.items() if value})
