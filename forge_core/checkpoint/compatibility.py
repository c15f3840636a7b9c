"""Which changes of a configuration a resumed run can honour."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from forge_core.config.diff import Difference, differences
from forge_core.errors import ConfigError, and_more
from forge_core.registry.entry_points import installed as installed
from forge_core.registry.plugin_files import PROVIDER

_FIXED = (
    "model",
    "parametrization",
    "optimizer.name",
    "train.seq_len",
    "train.seed",
    "train.data_seed",
    "data.shuffle",
)
"""Sections that give weights, the optimizer's state and the position in the data their meaning. The data themselves
are compared by their fingerprint, so that they may be moved."""
_NAMED = 5


def changed_keys(
    saved: Mapping[str, Any], now: Mapping[str, Any], where: str, fixed: Collection[str] = ()
) -> list[Difference]:
    """The differences between a checkpoint's job and this one, all of which can be honoured.

    Args:
        fixed: further sections that may not change.

    Raises:
        ConfigError: some cannot, each named with both values.
    """
    changes = differences(dict(saved), dict(now))
    refused = [change for change in changes if any(_is_within(change.key, section) for section in (*_FIXED, *fixed))]
    if refused:
        named = [f"{change.key}: {value_text(change.old)} -> {value_text(change.new)}" for change in refused[:_NAMED]]
        lines = "\n  ".join(named) + and_more(len(refused), _NAMED, "\n  ")
        raise ConfigError(
            f"{where} cannot be continued with this configuration; keys that differ: {len(refused)}\n  {lines}\n"
            "Restore them, or choose another run.name to start afresh."
        )
    return changes


def changes_that_matter(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The differences that are about what is trained, without where it is done and what is written of it."""
    elsewhere = ("run.", "metrics.", "checkpoint.")
    return [
        change
        for change in differences(dict(saved), dict(now))
        if not change.key.startswith(elsewhere) and (change.old or change.new)
    ]


def used_plugins(*tables: object) -> set[str]:
    """The distributions whose components plain tables name: those of ``name = "distribution:component"``."""
    used: set[str] = set()
    for table in tables:
        if isinstance(table, Mapping):
            name = table.get("name")
            if isinstance(name, str) and ":" in name and not name.startswith(PROVIDER):  # the job itself has a file
                used.add(name.partition(":")[0])
            used |= used_plugins(*table.values())
        elif isinstance(table, list):
            used |= used_plugins(*table)
    return used


def versions_changed(versions: Mapping[str, str], job: Mapping[str, Any]) -> list[str]:
    """Return the distributions of a job whose version is another one now: ``acme-norm 1.0 (now 2.0)``."""
    import torch  # its metadata do not name the CUDA that it is built for

    used = {"forge-core", "torch", *used_plugins(job)}
    now = {name: str(torch.__version__) if name == "torch" else installed(name) for name in used}
    changed = [name for name in sorted(used & versions.keys()) if now[name] not in (None, versions[name])]
    return [f"{name} {versions[name]} (now {now[name]})" for name in changed]


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith((section + ".", section + "["))


def value_text(value: object) -> str:
    """A value of a job in a message."""
    if isinstance(value, str) and "\n" in value:
        return f"{len(value.splitlines())} lines of digest {hashlib.sha256(value.encode()).hexdigest()[:8]}"
    return "unset" if value is None else repr(value)
