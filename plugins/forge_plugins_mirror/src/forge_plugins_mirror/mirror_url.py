"""Where ``checkpoint.mirror`` points to: a path, or a URL of any file system that fsspec has a package for."""

from __future__ import annotations

from pathlib import Path

from forge_core.config.describe import without_passwords
from forge_core.errors import nearest_hint


def mirror_problem(url: str) -> str | None:
    """What is wrong with it as far as this machine can tell without asking the file system, or ``None``."""
    try:
        from fsspec.registry import get_filesystem_class, known_implementations  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        return "needs the package fsspec, which is not installed: pip install fsspec"
    protocol, separator, path = url.rpartition("://")
    if (shown := without_passwords(url)) != url:
        return (
            f"{shown!r} has credentials in it, which would be written into the run's files; leave "
            f"them out and set {_variables(protocol.rpartition('::')[2])} in the environment"
        )
    if separator and not path.strip("/"):
        return f"{url!r} names no folder"
    try:
        path_of(url)
    except RuntimeError:
        return f"{url!r} begins with a user whom this machine does not have"
    for name in filter(None, protocol.split("::")):
        try:
            get_filesystem_class(name)
        except ValueError:
            more = nearest_hint(name, [*known_implementations])
            return f"{url!r}: fsspec knows no file system of the name {name!r}{more}"
        except ImportError as error:
            return f"{url!r} needs a package that is not installed: {error}"
    return None


def _variables(protocol: str) -> str:
    """By which the package of a file system learns what opens it."""
    named = {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "s3a": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS",
        "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
        "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
        "abfs": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
        "abfss": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    }
    prefix = f"FSSPEC_{protocol.upper()}_"  # fsspec itself reads these, for every one of its file systems
    return named.get(protocol, f"{prefix}USERNAME and {prefix}PASSWORD")


def url_of_run(mirror: str, name: str) -> str:
    """Where the mirror of a run is, in ``checkpoint.mirror``: several may have the same."""
    return f"{mirror.rstrip('/')}/{name}"


def path_of(url: str) -> Path | None:
    """The folder that is meant, if it is one of this machine's file systems."""
    protocol, separator, path = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return None
    return Path(path if separator else url).expanduser().absolute()
