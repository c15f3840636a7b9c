"""Models of the Hugging Face Hub, by name."""

from __future__ import annotations

import re
from pathlib import Path

from forge_core.errors import ConfigError
from forge_plugins_hf.shards import are_pickled, why_not_pickled

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
"""Configuration, weights, tokenizer and its template; no pickled weights, and no code."""
_OF_OTHERS = ["*/*", "consolidated*"]
"""Folders and files in which some models have the same weights once more, for other programs."""


def folder_of(source: Path) -> Path:
    """The source, if it is a path; for a name such as ``Qwen/Qwen3-0.6B``, the folder in the Hub's cache (``HF_HOME``)
    with the model's files, which are downloaded where they are missing.

    Raises:
        ConfigError: the Hub has no such model, keeps it from this user, or cannot be reached; or the model has pickled
            weights only.
    """
    name = source.as_posix()
    if source.exists() or source.parent.is_dir() or not _NAME.fullmatch(name):
        return source
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is no folder here; for a model of the Hugging Face Hub: pip install 'forge-plugins-hf[hub]'"
        ) from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OF_OTHERS))
    except Exception as error:  # of the library, of its HTTP client, or of the system
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{name} is no folder here, and the Hugging Face Hub does not give it: {first_line}. Where there is no "
            f"network, run `hf download {name} --local-dir FOLDER` elsewhere, copy FOLDER, and give it"
        ) from error
    if not any(folder.glob("*.safetensors")) and are_pickled(_files_of(name, folder.name)):
        raise ConfigError(why_not_pickled(name))
    return folder


def _files_of(name: str, commit: str) -> list[str]:
    """The files of a model, downloaded or not; none where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=commit)
    except Exception:  # noqa: BLE001 - as above; what is here is looked at as any folder is
        return []
