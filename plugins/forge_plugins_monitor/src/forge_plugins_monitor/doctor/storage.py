"""The place where runs will be written: space, speed, and what its file system keeps to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from forge_core.contracts.check import CheckContext, Finding

_MIB = 2**20
_WRITTEN = 64 * _MIB
_SLOW_MIB_PER_SECOND = 50
_SLOW_FLUSH_SECONDS = 1.0
_LITTLE_GIB = 20
_IN_MEMORY = ("tmpfs", "ramfs")


def look(surroundings: CheckContext) -> Iterator[Finding]:
    """Writes and removes 64 MiB in a folder of its own."""
    place = nearest_existing(surroundings.run_dir)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        advice = "choose another run.dir, or ask for permission"
        yield Finding("run.dir", "wrong", f"{surroundings.run_dir}: no permission to write in {place}", advice)
        return
    yield _kind(place, surroundings.run_dir)
    yield _space(place)
    try:
        with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=place) as folder:
            yield _speed(Path(folder))
            yield _flush(Path(folder))
            yield _rename(Path(folder))
            yield _locks(Path(folder))
    except OSError as error:
        yield Finding("run.dir", "wrong", f"{place}: {error.strerror or error}", "choose another run.dir")


def nearest_existing(path: Path) -> Path:
    """The path, or the folder above it in which it would be made."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _kind(place: Path, run_dir: Path) -> Finding:
    kind = file_system(place)
    found = f"{run_dir} is on {kind}" if kind else str(run_dir)
    if kind in _IN_MEMORY:
        return Finding("run.dir", "warning", found, "it is in memory and lost when the machine stops; use a disk")
    return Finding("run.dir", "fine", found)


def file_system(place: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Its type (``ext4``, ``nfs4``, ``lustre``); empty where the system does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    above = {str(one) for one in (place.resolve(), *place.resolve().parents)}
    found = [(len(words[1]), words[2]) for words in lines if words[1].replace("\\040", " ") in above]
    # of several mounts of equal length the last one covers the others
    return max(enumerate(found), key=lambda one: (one[1][0], one[0]))[1][1] if found else ""


def _space(place: Path) -> Finding:
    free = shutil.disk_usage(place).free / 2**30
    counts = os.statvfs(place)
    if counts.f_files and counts.f_favail < 10_000:
        advice = "remove files: a disk without free inodes takes no new file, however much space there is"
        return Finding("disk space", "warning", f"{counts.f_favail} files more can be made in {place}", advice)
    if free < _LITTLE_GIB:
        advice = (
            "a checkpoint takes 12 bytes a parameter with AdamW, 12 GB for 1 B parameters; make room, or set "
            "checkpoint.keep_last"
        )
        return Finding("disk space", "warning", f"{free:.1f} GiB are free", advice)
    return Finding("disk space", "fine", f"{free:,.0f} GiB are free")


def _speed(folder: Path) -> Finding:
    block = os.urandom(_MIB)
    path = folder / "speed"
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(_WRITTEN // _MIB):
            file.write(block)
        os.fsync(file.fileno())
    speed = _WRITTEN / _MIB / (time.perf_counter() - started)
    path.unlink()
    found = f"{speed:,.0f} MiB/s written and flushed by one process"
    if speed < _SLOW_MIB_PER_SECOND:
        advice = "choose a faster disk for run.dir, or save less often; checkpoint.background = true hides some of it"
        return Finding("disk speed", "warning", found, advice)
    return Finding("disk speed", "fine", found)


def _flush(folder: Path) -> Finding:
    """A commit flushes each file and each folder once."""
    times = []
    for number in range(10):
        started = time.perf_counter()
        with (folder / f"flush-{number}").open("wb") as file:
            file.write(b"x")
            os.fsync(file.fileno())
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        times.append(time.perf_counter() - started)
    slowest = max(times)
    found = f"a small file in {sorted(times)[5] * 1e3:.1f} ms, {slowest * 1e3:.1f} at most"
    if slowest > _SLOW_FLUSH_SECONDS:
        return Finding("flushing", "warning", found, "the disk is busy or far away; checkpoints take this much longer")
    return Finding("flushing", "fine", found)


def _rename(folder: Path) -> Finding:
    """What the commit of a checkpoint relies on."""
    source, target = folder / "unfinished", folder / "committed"
    source.mkdir()
    (source / "file").write_text("new")
    source.rename(target)
    (folder / "link").symlink_to(target.name)
    full = folder / "unfinished"
    full.mkdir()
    (full / "file").write_text("newer")
    try:
        full.rename(target)
        kept = False
    except OSError:
        kept = True
    if (target / "file").read_text() != "new" or not kept:
        advice = "choose another file system for run.dir: a checkpoint could be written over another one here"
        return Finding("renaming", "wrong", "a folder can be renamed to one that is not empty", advice)
    return Finding("renaming", "fine", "a folder gets its name at once, and does not replace another one")


def _locks(folder: Path) -> Finding:
    """Forge's own lease does without; databases and caches of libraries do not."""
    try:
        import fcntl
    except ImportError:
        return Finding("locks", "fine", "this system has no flock, and Forge needs none")
    with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            advice = "Forge needs none; set HF_HOME and TRITON_CACHE_DIR to a disk that has them"
            return Finding("locks", "warning", f"the file system has none: {error.strerror}", advice)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Finding("locks", "fine", "flock keeps a second one out")
    advice = "Forge needs none; set HF_HOME and TRITON_CACHE_DIR to a disk that keeps to them"
    return Finding("locks", "warning", "flock lets two in at once", advice)
