"""The configuration of the mirror on file systems of fsspec."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from forge_core.config.sections import Job
from forge_plugins_mirror.mirror_url import mirror_problem, path_of, url_of_run


@attrs.frozen(kw_only=True)
class FsspecMirrorConfig:
    """Copies checkpoints to a file system of fsspec."""

    url: str = attrs.field(validator=attrs.validators.min_len(1))
    """A path, or a URL (``s3://bucket/runs``) whose package is installed; each run has a folder of its name there. No
    credentials: the environment has them."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Refuse a place that cannot be, or that has the checkpoints already."""
        if problem := mirror_problem(self.url):
            yield "url", problem
        elif path_of(self.url) == job.run.dir.expanduser().absolute():
            yield "url", f"{self.url!r} is run.dir, where the checkpoints are already; name another place"

    def within(self, name: str) -> FsspecMirrorConfig:
        """The same place, one folder further down."""
        return attrs.evolve(self, url=url_of_run(self.url, name))
