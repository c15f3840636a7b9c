"""Metrics at an MLflow server, or in its database."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus

from forge_core.contracts.tracker import Tracker
from forge_plugins_monitor.tracker_config import MlflowConfig
from forge_plugins_monitor.versions import versions

_STATUS = {"completed": RunStatus.FINISHED, "stopped": RunStatus.KILLED, "failed": RunStatus.FAILED}
_PARAMETERS_AT_ONCE = 100
"""Also the most that a server takes."""
_LONGEST = 500
"""Characters of a parameter's value that every store takes."""


class Mlflow(Tracker):
    """Metrics by step; keys of the job as parameters, and the whole as ``job.json``; versions as tags.

    The run's id there is state, so that a resumed run goes on with the same curves.
    """

    def __init__(self, config: MlflowConfig, /, *, run_name: str, run_dir: Path, job: Mapping[str, Any]) -> None:
        self._client = MlflowClient(tracking_uri=config.uri)
        self._experiment = config.experiment
        self._name = run_name
        self._job = job
        self._id = ""
        self._is_running = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        values = [Metric(_key(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._begun(), metrics=values)

    def log_figure(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._begun(), str(path), f"figures/{_key(name)}/step_{step:08d}")

    def close(self, outcome: str) -> None:
        if self._is_running:
            self._client.set_terminated(self._id, RunStatus.to_string(_STATUS[outcome]))

    def state(self) -> Mapping[str, Any]:
        return {"id": self._id} if self._id else {}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._id = state["id"]

    def _begun(self) -> str:
        """The id of the run there, which is new or known by the first line only."""
        if not self._is_running:
            if self._id:
                self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
            else:
                self._id = self._made()
            self._is_running = True
        return self._id

    def _made(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        tags = {f"version.{name}": version for name, version in versions().items()}
        made: str = self._client.create_run(experiment, tags=tags, run_name=self._name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(self._job)]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(made, params=parameters[start : start + _PARAMETERS_AT_ONCE])
        self._client.log_dict(made, dict(self._job), "job.json")
        return made


def _key(name: str) -> str:
    """With the characters that MLflow allows in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"train": {"steps": 3}}`` as ``("train.steps", 3)``."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _key(f"{prefix}{key}"), value
