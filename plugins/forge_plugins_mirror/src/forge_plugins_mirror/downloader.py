"""Bringing checkpoints back from a mirror, for a start on a machine that has lost them or never had them."""

from __future__ import annotations

from pathlib import Path

from forge_core.checkpoint.manifest import DamagedError, NewerFormatError, lack_of_room
from forge_core.errors import ConfigError
from forge_plugins_mirror.mirror import Mirror


def fetch(mirror: Mirror, step: int, folder: Path) -> str | None:
    """Fetch a checkpoint that was listed last to ``folder``. Returns what is wrong with it, or ``None``.

    Raises:
        ConfigError: there is no room for it, or a later version of Forge has written it.
        MirrorError: the mirror fails.
    """
    found = mirror.found(step)
    if isinstance(found, NewerFormatError):
        raise ConfigError(f"step {step} at {mirror.url} was written by a later version of Forge: {found}; upgrade it")
    if isinstance(found, DamagedError):
        return str(found)
    place = folder.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {place}: {error.strerror}") from error
    if lack := lack_of_room(place, found.n_bytes, f"the checkpoint at {mirror.url}"):
        raise ConfigError(lack)
    try:
        return mirror.fetch(step, folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {place}: {error.strerror}") from error
