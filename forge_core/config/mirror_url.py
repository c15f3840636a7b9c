"""Where ``checkpoint.mirror`` points to: a path, or a URL of any file system that fsspec has a package for."""

from __future__ import annotations

from pathlib import Path

from forge_core.config.problems import nearest


def mirror_problem(url: str) -> str | None:
    """What is wrong with it as far as this machine can tell without asking the file system, or ``None``."""
    try:
        from fsspec.registry import get_filesystem_class, known_implementations  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        return "needs the package fsspec, which is not installed: pip install fsspec"
    protocol, separator, path = url.rpartition("://")
    if separator and not path.strip("/"):
        return f"{url!r} names no folder"
    for name in filter(None, protocol.split("::")):
        try:
            get_filesystem_class(name)
        except ValueError:
            near = nearest(name, [*known_implementations])
            more = f"; did you mean {near!r}?" if near else ""
            return f"{url!r}: fsspec knows no file system of the name {name!r}{more}"
        except ImportError as error:
            return f"{url!r} needs a package that is not installed: {error}"
    return None


def url_of_run(mirror: str, name: str) -> str:
    """Where the mirror of a run is, in ``checkpoint.mirror``: several may have the same."""
    return f"{mirror.rstrip('/')}/{name}"


def path_of(url: str) -> Path | None:
    """The folder that is meant, if it is one of this machine's file systems."""
    protocol, separator, path = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return None
    return Path(path if separator else url).expanduser().absolute()
