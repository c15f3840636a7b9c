"""The run that the path of a command means, and its mirror."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from forge_core.checkpoint.manifest import DamagedError
from forge_core.config.describe import printable
from forge_core.config.problems import ConfigProblems, InvalidError
from forge_core.config.sections import CheckpointSection
from forge_core.contracts.checkpoint_mirror import WRITER, CheckpointMirror, MirrorContext
from forge_core.errors import ConfigError
from forge_core.job import structure
from forge_core.registry.catalog import Catalog

JOB = "job.toml"


class NamedRun:
    """The run that a path means: its directory, or the folder of its checkpoints.

    Args:
        may_be_elsewhere: all its checkpoints may be at its mirror.
    """

    def __init__(self, path: Path, *, may_be_elsewhere: bool = False) -> None:
        from forge_core.checkpoint.store import CheckpointStore

        if is_checkpoint(path):
            raise ConfigError(f"{path} is one checkpoint; give the directory of its run")
        self.path = path.parent if path.name == "checkpoints" else path
        self.is_mirror = (self.path / WRITER).exists()
        self.store = CheckpointStore(self.path / "checkpoints")
        if not self.store.path.is_dir() and not (may_be_elsewhere and self.has_mirror):
            missing = "does not exist" if not path.exists() else "is not the directory of a run: it has no checkpoints/"
            raise ConfigError(f"{path} {missing}{self.hint}")

    @property
    def section(self) -> CheckpointSection:
        """The section of the last start of the run; if it is not readable the defaults, by which all are kept."""
        try:
            table = {key: value for key, value in self._job().get("checkpoint", {}).items() if key != "mirror"}
            section = structure(table, CheckpointSection, Catalog([]))
        except InvalidError as error:
            raise ConfigError(f"{self.path / JOB} is not what Forge wrote: {error}") from error
        return section.at_mirror() if self.is_mirror else section

    @property
    def hint(self) -> str:
        """The end of a sentence on checkpoints that are not here."""
        if not self.has_mirror:
            return ""
        return "; forge checkpoint list shows those at its checkpoint.mirror, and forge checkpoint fetch brings one"

    @property
    def has_mirror(self) -> bool:
        return "mirror" in self._job().get("checkpoint", {}) and not self.is_mirror

    def mirror(self, catalog: Catalog) -> CheckpointMirror:
        """Build the mirror of the run, which has one. Nothing is asked of it.

        Raises:
            ConfigError: its component is not installed, or does not take its keys.
        """
        chosen, name = self._job()["checkpoint"]["mirror"], self._job().get("run", {}).get("name", self.path.name)
        return _mirror(chosen, str(name), self.section, catalog, self.store.path)

    def _job(self) -> Mapping[str, Any]:
        from forge_core.checkpoint.store import read_job

        if not (self.path / JOB).exists():
            return {}
        try:
            return read_job(self.path)
        except DamagedError as error:
            raise ConfigError(f"{self.path} is not what Forge wrote: {error}") from error


def _mirror(
    chosen: Any, run_name: str, section: CheckpointSection, catalog: Catalog, folder: Path | None = None
) -> CheckpointMirror:
    """Build the mirror that ``checkpoint.mirror`` chooses, or that a URL stands for."""
    from forge_core.config.builder import ComponentBuilder

    try:
        use = structure({"mirror": chosen}, CheckpointSection, catalog).mirror
    except InvalidError as error:
        raise ConfigProblems([problem.under("checkpoint") for problem in error.problems], "the mirror") from error
    assert use is not None, "it is chosen"
    context = MirrorContext(
        run_name=run_name,
        folder=folder or Path(),
        section=section,
        say=lambda line: click.echo(printable(line), err=True),
        run_on_rank0=lambda work: work(),
    )
    mirror: CheckpointMirror = ComponentBuilder(catalog)(use, context=context)
    return mirror


def mirror_at(url: str, catalog: Catalog) -> CheckpointMirror:
    """Build the mirror whose place is that of one run.

    Raises:
        ConfigError: its component is not installed, or the URL means nothing.
    """
    return _mirror(url, "", CheckpointSection(), catalog)


def is_url(path: str) -> bool:
    """Whether it names a mirror."""
    return "://" in path


def is_checkpoint(path: Path) -> bool:
    """Whether it is one checkpoint, and no run."""
    return path.resolve().name.startswith("step_") or (path / "manifest.json").exists()
