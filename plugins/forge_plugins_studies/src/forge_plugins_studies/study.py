"""The jobs of a study: one for each point of a sweep."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import attrs

from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog
from forge_plugins_studies.points import Point, points_of

_MOST_BYTES = 200


@attrs.frozen(kw_only=True)
class Study:
    """Jobs that differ by the settings of their points, checked and named."""

    name: str
    """The name of the job that all are made of."""
    points: Sequence[Point]
    jobs: Sequence[Job]
    """One for each point; ``run.name`` has the point's suffix."""

    @property
    def runs(self) -> list[Path]:
        """The directory of each run."""
        return [Path.cwd() / job.run.dir.expanduser() / str(job.run.name) for job in self.jobs]

    @property
    def folder(self) -> Path:
        """Where the study keeps what belongs to no single run."""
        return self.runs[0].parent / f"{self.name}-sweep"


def load_study(
    config: Path,
    overrides: Sequence[str],
    sweeps: Sequence[str],
    *,
    catalog: Callable[[Collection[str]], Catalog],
    world_size: int | None,
    options: Collection[str],
) -> Study:
    """Load a job for each combination of the values in ``sweeps``, or the one job without any.

    Args:
        overrides: settings of the command line, for all.
        catalog, world_size, options: as ``load_job`` takes them.

    Raises:
        ConfigError: a sweep is none, one of its keys is among the overrides too, one of the jobs is wrong, or its name
            is too long.
    """
    points, jobs, name = points_of(sweeps), [], ""
    swept = {one.partition("=")[0] for one in points[0].overrides}
    for one in overrides:
        if (key := one.strip().removeprefix("--").partition("=")[0].strip()) in swept:
            raise ConfigError(f"{one}: {key} is swept, and each run has a value of its own; leave one of the two out")
    for point in points:
        settings = (*overrides, *point.overrides)
        job = load_job(config, settings, catalog=catalog, world_size=world_size, options=options)
        name = name or str(job.run.name)
        run = attrs.evolve(job.run, name=f"{job.run.name}{point.suffix}")
        _refuse_too_long(str(run.name))
        jobs.append(attrs.evolve(job, run=run) if point.suffix else job)
    return Study(name=name, points=points, jobs=jobs)


def _refuse_too_long(name: str) -> None:
    """As the job of the run is refused, once it has this name."""
    if (n_bytes := len(os.fsencode(name))) > _MOST_BYTES:
        raise ConfigError(
            f"run.name: a run would be called {name[:40]}…, with {n_bytes} bytes, and at most {_MOST_BYTES} can be the "
            "name of its directory; shorten it, or values that are swept"
        )
