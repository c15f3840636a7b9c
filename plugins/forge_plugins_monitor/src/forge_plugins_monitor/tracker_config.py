"""The configuration of trackers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs.validators import min_len, optional

if TYPE_CHECKING:
    from forge_core.config.sections import Job


def _inside_the_run(_: object, __: attrs.Attribute[Any], value: str) -> None:
    path = PurePath(value)
    if not value or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"must be a folder within the run's directory, got {value!r}")


@attrs.frozen(kw_only=True)
class TensorBoardConfig:
    """Event files for ``tensorboard --logdir``."""

    dir: str = attrs.field(default="tensorboard", validator=_inside_the_run)
    """Folder of the event files, within the run's directory."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Two with one folder, of which TensorBoard makes one curve."""
        for index, one in enumerate(job.trackers):
            if one.config is self:
                return
            if isinstance(one.config, TensorBoardConfig) and PurePath(one.config.dir) == PurePath(self.dir):
                yield "dir", f"trackers[{index}] writes into {self.dir!r} as well; set another folder, or leave out one"
                return


@attrs.frozen(kw_only=True)
class WandbConfig:
    """Weights & Biases. Whom it writes as, and to which server, it takes from its own login and variables."""

    project: str = attrs.field(default="forge", validator=min_len(1))
    """The project that the run belongs to."""
    entity: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """User or team; by default that of the login."""
    group: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Runs that belong together, such as those of a sweep."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes into the run's directory, to be sent later with ``wandb sync``."""


@attrs.frozen(kw_only=True)
class MlflowConfig:
    """MLflow tracking."""

    uri: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """The server, such as ``"http://tracking:5000"``; by default what ``MLFLOW_TRACKING_URI`` says. A database,
    such as ``"sqlite:///runs.db"``, needs the package ``mlflow`` and not only ``mlflow-skinny``."""
    experiment: str = attrs.field(default="forge", validator=min_len(1))
    """The experiment that the run belongs to; made if it is not there."""
