"""The commit of the working folder, for whoever wants to know later which code a run had."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PATIENCE = 5.0
"""Seconds: a checkout on a slow disk must not hold a run up."""
_ASK = ("git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def git_commit(folder: Path) -> str | None:
    """Its hash, with ``-dirty`` if tracked files differ from it; ``None`` if there is no checkout, commit or git."""
    try:
        said = subprocess.run(_ASK, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
