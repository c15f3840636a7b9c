"""The log-probabilities of pairs under the weights that preference tuning begins with, in a file.

It is ``.npz`` of NumPy: ``pairs`` ``(N, 16)`` uint8, the key of each pair; ``log_probabilities`` ``(N, 2)`` float64 in
nats, of the chosen and the rejected answer; ``about``, a JSON object with format, version, tokenizer and
the checkpoint that it was made with: path, step and ``digest_of``.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_core.checkpoint.fsync import flush
from forge_core.errors import ConfigError, SaveError
from forge_plugins_data.file_selection import expanded

_FORMAT, _VERSION = "forge-preference-reference", 1

HOW_TO_MAKE = (
    "make it by forge eval RUN --evaluation preference_reference --job CONFIG, with the run that training begins with"
)


@attrs.frozen(eq=False)
class ReferenceFile:
    """The contents of a file."""

    path: Path
    tokenizer: str
    """The fingerprint of the tokenizer."""
    log_probabilities: Mapping[bytes, np.ndarray]
    """By the key of a pair, ``(2,)`` float64."""

    @classmethod
    def read(cls, path: str) -> ReferenceFile:
        """Read a file.

        Raises:
            ConfigError: it is not there, or is no such file.
        """
        file = expanded(path)
        if not file.exists():
            raise ConfigError(f"reference = {path!r}: there is no such file; {HOW_TO_MAKE}")
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                pairs, values, about = arrays["pairs"], arrays["log_probabilities"], json.loads(str(arrays["about"]))
            known = about.get("format") == _FORMAT and about.get("version") == _VERSION
            is_whole = (
                pairs.shape == (len(values), 16) and values.shape == (len(values), 2) and np.isfinite(values).all()
            )
        except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise ConfigError(f"reference = {path!r} is damaged, or no reference of pairs; {HOW_TO_MAKE}") from error
        if not (known and is_whole):
            raise ConfigError(f"reference = {path!r} is no reference of pairs of version {_VERSION}; {HOW_TO_MAKE}")
        keys = (key.tobytes() for key in pairs)
        return cls(file, str(about.get("tokenizer")), dict(zip(keys, values, strict=True)))

    def of(self, keys: Sequence[bytes], tokenizer: str) -> np.ndarray:
        """The log-probabilities of pairs, ``(N, 2)`` fp32.

        Raises:
            ConfigError: it is a reference of another tokenizer or of other pairs.
        """
        if tokenizer != self.tokenizer:
            raise ConfigError(f"reference = {str(self.path)!r} is of another tokenizer; {HOW_TO_MAKE}")
        if missing := sum(key not in self.log_probabilities for key in keys):
            raise ConfigError(
                f"reference = {str(self.path)!r} lacks {missing:,} of the {len(keys):,} pairs: it is of other data, or "
                f"of another template, train.seq_len or too_long; {HOW_TO_MAKE}"
            )
        return np.array([self.log_probabilities[key] for key in keys], dtype=np.float32)


def digest_of(checkpoint: Path) -> str:
    """A hash of all that a checkpoint has, by its manifest; empty for what is no checkpoint."""
    manifest = checkpoint / "manifest.json"
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else ""


def recorded_checkpoint(path: str) -> Mapping[str, Any]:
    """What the reference in ``path`` was made with; empty where it does not say."""
    with np.load(Path(path).expanduser(), allow_pickle=False) as arrays:
        found = json.loads(str(arrays["about"])).get("checkpoint")
    return found if isinstance(found, dict) else {}


def refuse_unwritable(path: Path) -> None:
    """
    Raises:
        ConfigError: no file can be written there, or one is there that is no reference.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = (
            "it is a folder" if path.is_dir() else "" if os.access(path.parent, os.W_OK) else "it may not be written"
        )
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise ConfigError(f"data.reference = {str(path)!r} cannot be written: {problem}")
    if path.exists():
        try:
            ReferenceFile.read(str(path))
        except ConfigError as error:
            raise ConfigError(
                f"data.reference = {str(path)!r} is a file that is no reference; name a new one, or remove it"
            ) from error


def write_reference(
    path: Path, keys: Sequence[bytes], values: np.ndarray, tokenizer: str, checkpoint: Mapping[str, Any] | None = None
) -> None:
    """Write a file, whole or not at all.

    Args:
        values: ``(N, 2)`` float64.
        checkpoint: what it was made with.

    Raises:
        SaveError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    about = json.dumps({"format": _FORMAT, "version": _VERSION, "tokenizer": tokenizer, "checkpoint": checkpoint})
    pairs = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
    try:
        with temporary.open("wb") as file:
            np.savez(file, pairs=pairs, log_probabilities=values, about=np.array(about))
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise SaveError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
