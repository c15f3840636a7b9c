"""Metrics at Weights & Biases."""

from __future__ import annotations

import inspect
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from forge_core.contracts.tracker import Tracker
from forge_core.errors import ConfigError
from forge_plugins_monitor.tracker_config import WandbConfig
from forge_plugins_monitor.versions import versions


class Wandb(Tracker):
    """The run's id there is state, so that a resumed run goes on with the same curves.

    ``step`` is a metric, which the others are drawn over: a run that goes back to a checkpoint logs steps once more,
    and steps of wandb's own can only rise.

    Raises:
        ConfigError: from the constructor, if the run is to be sent and wandb has no login.
    """

    def __init__(self, config: WandbConfig, /, *, run_name: str, run_dir: Path, job: Mapping[str, Any]) -> None:
        if config.mode == "online" and not has_login():
            raise ConfigError(
                "wandb has no login on this machine, and nothing is sent; type wandb login, set WANDB_API_KEY, or set "
                'mode = "offline" and send the run later'
            )
        self._config = config
        self._name = run_name
        self._run_dir = run_dir
        self._facts = {"job": dict(job), "versions": versions()}
        self._id = ""
        self._goes_on = False
        self._run: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._begun().log({"step": step, **metrics})

    def log_series(self, step: int, series: Mapping[str, Sequence[float]]) -> None:
        run = self._begun()
        finite = {name: [value for value in values if math.isfinite(value)] for name, values in series.items()}
        histograms = {name: wandb.Histogram(values) for name, values in finite.items() if values}
        run.log({"step": step, **histograms})

    def log_figure(self, step: int, name: str, path: Path) -> None:
        self._begun().log({"step": step, name: wandb.Image(str(path))})

    def close(self, outcome: str) -> None:
        if self._run is not None:
            self._run.summary["outcome"] = outcome
            self._run.finish(exit_code=1 if outcome == "failed" else 0)

    def state(self) -> Mapping[str, Any]:
        return {"id": self._id} if self._id else {}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._id, self._goes_on = state["id"], True

    def _begun(self) -> Any:
        """The run there, which is new or known by the first line only."""
        if self._run is None:
            config = self._config
            self._id = self._id or secrets.token_hex(4)
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=list(config.tags) or None,
                name=self._name,
                id=self._id,
                resume="allow" if self._goes_on and config.mode == "online" else None,
                config=self._facts,
                dir=str(self._run_dir),
                mode=config.mode,
                # what a run prints is in log.txt
                settings=wandb.Settings(console="off", quiet=True),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        return self._run


def has_login() -> bool:
    """Return whether wandb finds a key, without asking for one at the terminal or asking the server."""
    if "prompt" not in inspect.signature(wandb.login).parameters:  # before 0.28
        return bool(wandb.api.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
    settings = wandb.setup().settings
    mode, silent = settings.mode, settings.silent
    settings.mode, settings.silent = "online", True  # silent, it does not ask the server whose key it is
    try:
        return wandb.login(prompt=False, verify=False)
    finally:
        settings.mode, settings.silent = mode, silent
