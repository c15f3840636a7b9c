"""The observer ``reference_origin``: says so where a reference is of another checkpoint than a run begins with."""

from __future__ import annotations

import json
from pathlib import Path

from forge_core.contracts.callback import RunContext
from forge_core.contracts.observer import Observer
from forge_plugins_data.preference_config import PreferencePairsConfig
from forge_plugins_data.preference_reference import digest_of, recorded_checkpoint


class ReferenceOrigin(Observer):
    """Compares, before the first step, what the file of the reference records with what ``loaded.json`` names. Only the
    callback ``reference_check`` looks at the weights."""

    def step_start(self, run: RunContext, step: int) -> None:
        config = run.job.data.config
        if step > 1 or run.rank != 0 or not isinstance(config, PreferencePairsConfig) or config.reference is None:
            return
        recorded, begun = recorded_checkpoint(config.reference), _begun_with(run.run_dir)
        if recorded and begun and recorded.get("digest") not in [digest_of(one) for one in begun]:
            run.log(
                f"data.reference = {config.reference!r} was made with {recorded.get('path')}, and this run begins with "
                f"{' and '.join(map(str, begun))}; the callback reference_check tells whether their weights differ"
            )


def _begun_with(run_dir: Path) -> list[Path]:
    """The checkpoints that tensors have been taken from; none where a folder is of another format."""
    try:
        loaded = json.loads((run_dir / "loaded.json").read_text())
    except FileNotFoundError:
        return []
    sources = [Path(one["source"]) for one in loaded.get("loads", [loaded])]
    return sources if all(map(digest_of, sources)) else []
