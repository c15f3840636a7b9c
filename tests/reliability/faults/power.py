"""Power cuts on a real file system: an ext4 image inside XFS, of which a copy shares its blocks.

Such a copy is made in one go, and has what has reached the disk by then; mounting it replays its journal, as after the
power has come back.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotPermittedError(Exception):
    """Disks cannot be made here; the message says why."""


@contextmanager
def power_disk(folder: Path) -> Iterator[PowerDisk]:
    """A disk of 256 MiB.

    Raises:
        NotPermittedError: a program is missing, or the right to mount.
    """
    missing = [program for program in ("mkfs.xfs", "mkfs.ext4") if shutil.which(program) is None]
    if missing:
        raise NotPermittedError(f"{' and '.join(missing)} is not installed")
    outer, disk = folder / "outer", folder / "disk"
    outer.mkdir()
    disk.mkdir()
    mounted: list[Path] = []
    try:
        _make_image(folder / "outer.img", "3G", "mkfs.xfs", "-q", "-f", "-m", "reflink=1")
        _run("mount", "-o", "loop", folder / "outer.img", outer)
        mounted.append(outer)
        _make_image(outer / "inner.img", "256M", "mkfs.ext4", "-q", "-F")
        _run("mount", "-o", "loop", outer / "inner.img", disk)
        mounted.append(disk)
        yield PowerDisk(disk, outer)
    finally:
        for place in reversed(mounted):
            _run("umount", place)
        (folder / "outer.img").unlink(missing_ok=True)


class PowerDisk:
    """What is written to ``path`` reaches the disk when the kernel thinks fit, or when it is flushed."""

    def __init__(self, path: Path, outer: Path) -> None:
        self.path = path
        self._outer = outer
        self._after = outer.parent / "after"
        self._after.mkdir()

    def cut(self) -> None:
        """The power is gone, as far as a copy of the disk goes."""
        _run("cp", "--reflink=always", self._outer / "inner.img", self._outer / "cut.img")

    @contextmanager
    def after_the_cut(self) -> Iterator[Path]:
        """The power is back."""
        _run("mount", "-o", "loop", self._outer / "cut.img", self._after)
        try:
            yield self._after
        finally:
            _run("umount", self._after)
            (self._outer / "cut.img").unlink()


def _make_image(file: Path, size: str, *command: str) -> None:
    _run("truncate", "-s", size, file)
    _run(*command, file)


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise NotPermittedError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
