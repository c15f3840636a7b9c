"""A run that looks at nothing costs nothing: it runs the same operations as one without the package."""

from __future__ import annotations

import json
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job


class Operations(TorchDispatchMode):
    """Counts the operations that compute something; a view does not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(folder, name, disable=(), settings=()):
    """Those of a run of two steps, and what it says of each step but its time."""
    catalog = discover(disable)
    job = load_job(folder / "job.toml", [f"run.name={name}", *settings], catalog=catalog, world_size=1)
    with Operations() as seen:
        run_job(job, catalog)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return seen.counts, [(one["loss"], one["grad_norm"]) for one in steps if "grad_norm" in one]


def test_a_step_runs_the_operations_that_it_runs_without_the_package(run):
    folder = run.parents[1]
    capture = 'callbacks=[{name="capture", interval=1}]'

    installed, values = operations(folder, "installed")
    without, expected = operations(folder, "without", disable=["forge-plugins-interp"])
    looking, _ = operations(folder, "looking", settings=[capture])

    assert installed == without
    assert values == expected
    assert len(values) == 2
    assert sum(looking.values()) > sum(installed.values())
    assert any("backward" in name for name in installed)
