"""The configuration of this distribution's components."""

from __future__ import annotations

import attrs

ASKED = "slurm/requeue"
"""In the run's directory: says to the batch script that the run wants to go on, in case the run cannot see to it."""


@attrs.frozen(kw_only=True)
class SlurmRequeueConfig:
    """``slurm_requeue`` has nothing to choose: everything else is in the environment of the Slurm job."""


@attrs.frozen(kw_only=True)
class SlurmEnvironmentConfig:
    """Slurm is known by its variables: there is nothing to set."""


@attrs.frozen(kw_only=True)
class JobColumnConfig:
    """The column of ``forge runs`` has no keys."""
