"""The job of a checkpoint on other ranks than it was trained on, without what is about training."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from forge_core.api import PassComponent
from forge_core.checkpoint.store import Checkpoint
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import load_job, settings_of
from forge_core.registry.catalog import Catalog
from forge_plugins_weights.loading import with_missing_plugins

_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


@attrs.frozen
class CheckpointJob:
    """A table, which may be changed before it is loaded."""

    checkpoint: Checkpoint
    table: dict[str, Any]
    disabled: Sequence[str]
    """Distributions that were switched off on the machine that it was trained on."""
    _catalog: Callable[[Collection[str]], Catalog]
    _world_size: int

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        overrides: Sequence[str],
        catalog: Callable[[Collection[str]], Catalog],
        world_size: int,
    ) -> CheckpointJob:
        """On one rank it has no layout; on several, that of the run, unless ``overrides`` have degrees of another one.

        Args:
            overrides: settings of the command line, as ``load`` is to be given them.
            catalog: the installed plugins without these distributions.
            world_size: ranks.
        """
        table = _table(checkpoint, world_size)
        disabled = table["plugins"].pop("disable", ())
        if world_size == 1 or any(map(_is_degree, settings_of("parallel", overrides)[0])):
            table["parallel"] = _on_one_rank(table["parallel"], catalog(disabled))
        return cls(checkpoint, table, disabled, catalog, world_size)

    def load(self, settings: Sequence[str]) -> Job:
        """
        Raises:
            ConfigError: the settings are wrong, or a plugin is not installed.
        """
        try:
            job = self._load(settings)
        except ConfigError as error:  # of a file that is not there any more
            text = re.sub(r"\S*/forge-\w+/job\.toml(?::\d+)?", f"{self.checkpoint.path}/job.toml", str(error))
            raise with_missing_plugins(ConfigError(text), self.checkpoint) from error
        return attrs.evolve(job, plugins=attrs.evolve(job.plugins, disable=(*self.disabled, *job.plugins.disable)))

    def _load(self, settings: Sequence[str]) -> Job:
        def catalog(more: Collection[str]) -> Catalog:
            return self._catalog([*self.disabled, *more])

        with tempfile.TemporaryDirectory(prefix="forge-") as folder:
            path = Path(folder) / "job.toml"
            path.write_text(tomli_w.dumps(self.table), encoding="utf-8")
            return load_job(path, settings, catalog=catalog, world_size=self._world_size)


def _is_degree(setting: str) -> bool:
    """Return whether a setting says a layout, in place of the run's."""
    key = setting.removeprefix("--").partition("=")[0].removeprefix("parallel").removeprefix(".")
    return key in ("", *_DEGREES)


def _table(checkpoint: Checkpoint, world_size: int) -> dict[str, Any]:
    """The checkpoint's job without what is about training."""
    table = dict(checkpoint.job())
    for section in ("train", "parallel", "plugins"):
        if not isinstance(table.setdefault(section, {}), dict):
            raise ConfigError(f"{checkpoint.path}/job.toml: {section} must be a table, got {table[section]!r}")
    table["train"] = train = dict(table["train"])
    # a multiple of the run's batch, as streams share it; as many as any pipeline has stages. An evaluation takes one
    batch = train.pop("global_batch_size", 1)
    train["grad_accumulation"] = world_size * batch if isinstance(batch, int) else batch  # of a stranger, refused
    for section in ("checkpoint", "callbacks", "trackers", "anomalies", "metrics", "phases"):
        table.pop(section, None)
    return table


def _on_one_rank(parallel: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """Without degrees, and without the passes that serve nothing else."""

    def serves_degrees(name: str) -> bool:
        component = catalog.lookup("parallel_pass", name).component
        return isinstance(component, PassComponent) and bool(set(component.serves) & set(_DEGREES))

    passes = parallel.get("passes", {})
    kept = {key: use for key, use in passes.items() if use and not serves_degrees(use.get("name", key))}
    return {"passes": kept}
