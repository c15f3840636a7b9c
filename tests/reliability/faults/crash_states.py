"""Every state in which a crash may leave a file system, from a trace of what was asked of it.

After ALICE (Pillai et al., OSDI 2014), with one assumption more: operations on folders persist in the order in which
they were made, as journaling file systems see to. What is in a file persists when the file is flushed, and until then
may be there, absent, there by half, or be zeros. That an entry is in a folder persists when that folder is flushed, and
until then may or may not.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from faults.saving import ANNOUNCEMENTS
from faults.zygote import Rank

TRACED = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,lseek,ftruncate,truncate,fallocate,sendfile,"
    "copy_file_range,link,linkat,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,"
    "symlinkat"
)
_LINE = re.compile(r"^(\d+) +[\d.]+ (.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+)(<[^>]*>)?")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_HANDLE = re.compile(r"^(?:\d+|AT_FDCWD)<([^>]*)>")


def trace(ranks: Sequence[Rank], output: Path) -> subprocess.Popen[str]:
    """Note what the processes ask of the file system, from now until they end."""
    processes = [argument for rank in ranks for argument in ("-p", str(rank.process))]
    tracer = subprocess.Popen(
        [
            "strace",
            "-f",
            "-y",
            "-xx",
            "-ttt",
            "-s",
            "100000000",
            "-o",
            str(output),
            "-e",
            f"trace={TRACED}",
            *processes,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    attached = 0
    while attached < len(ranks):
        line = tracer.stderr.readline()
        if not line:
            raise RuntimeError("strace has not attached: " + line)
        attached += "attached" in line
    return tracer


@attrs.define
class _File:
    number: int
    content: bytearray = attrs.field(factory=bytearray)
    durable: bytes = b""
    is_dirty: bool = False
    position: int = 0


Entry = tuple[str, int | str]
"""``("file", number)``, ``("link", target)`` or ``("dir", "")``."""


@attrs.frozen
class _Change:
    """Of the names in folders."""

    kind: str
    path: str
    to: str = ""
    entry: Entry | None = None

    @property
    def folders(self) -> set[str]:
        return {str(Path(path).parent) for path in (self.path, self.to) if path}


@attrs.frozen
class CrashState:
    """What a run finds when it starts after a crash, and what had been promised by then."""

    entries: tuple[tuple[str, str, bytes], ...]
    """Path below the root, ``file``, ``dir`` or ``link``, and content or target."""
    acknowledged: int
    begun: int

    def put(self, root: Path) -> None:
        """Make ``root`` look like that."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path, kind, content in self.entries:
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if kind == "dir":
                place.mkdir(exist_ok=True)
            elif kind == "file":
                place.write_bytes(content)
            else:
                place.symlink_to(content.decode())


class Recording:
    """Follows a trace, one operation after the other.

    Args:
        root: what happens below it counts.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[int, _File] = {}
        self._names: dict[str, Entry] = {}
        self._changes: list[_Change] = []
        self._durable = 0
        self._acknowledged = 0
        self._begun = 0
        self.operations = 0

    def states(self, traced: Path) -> Iterator[CrashState]:
        """All that are possible, each once."""
        seen: set[bytes] = set()
        for call, arguments, result in _calls(traced):
            if result < 0 or not self._follow(call, arguments, result):
                continue
            self.operations += 1
            for state in self._now():
                digest = hashlib.sha256(repr(state).encode()).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield state

    def _now(self) -> Iterator[CrashState]:
        dirty = any(file.is_dirty for file in self._files.values())
        for length in range(self._durable, len(self._changes) + 1):
            names: dict[str, Entry] = {}
            for change in self._changes[:length]:
                _apply(change, names)
            for unflushed in ("present", "absent", "half", "zeros") if dirty else ("present",):
                entries = (
                    (path.removeprefix(self._root + "/"), entry[0], self._content(entry, unflushed))
                    for path, entry in sorted(names.items())
                )
                yield CrashState(tuple(entries), self._acknowledged, self._begun)

    def _content(self, entry: Entry, unflushed: str) -> bytes:
        kind, value = entry
        if kind != "file":
            return str(value).encode()
        file = self._files[int(value)]
        if not file.is_dirty or unflushed == "present":
            return bytes(file.content)
        if unflushed == "absent":
            return file.durable
        return bytes(file.content[: len(file.content) // 2]) if unflushed == "half" else bytes(len(file.content))

    def _follow(self, call: str, arguments: str, result: int) -> bool:
        """Whether anything has changed."""
        if call == "write" and Path(_handle(arguments)).name == ANNOUNCEMENTS:
            what, step, _ = _strings(arguments)[0].decode().split()
            self._begun = max(self._begun, int(step)) if what == "begin" else self._begun
            self._acknowledged = max(self._acknowledged, int(step)) if what == "saved" else self._acknowledged
            return what == "saved"
        paths = _paths(call, arguments)
        if not any(path.startswith(self._root + "/") or path == self._root for path in paths):
            return False
        return self._operation(call, arguments, paths, result)

    def _operation(self, call: str, arguments: str, paths: list[str], result: int) -> bool:
        path = paths[0]
        if call in ("openat", "open", "creat"):
            return self._opened(path, arguments)
        if call == "write":
            file, data = self._file(path), _strings(arguments)[0]
            file.content[file.position : file.position + len(data)] = data
            file.position += len(data)
            file.is_dirty = True
        elif call == "lseek":
            if path in self._names and self._names[path][0] == "file":
                self._file(path).position = result
            return False
        elif call in ("fsync", "fdatasync"):
            self._flushed(path)
        elif call in ("rename", "renameat", "renameat2"):
            self._change(_Change("rename", path, paths[1]))
        elif call in ("unlink", "unlinkat", "rmdir"):
            self._change(_Change("remove", path))
        elif call in ("mkdir", "mkdirat"):
            if path != self._root:
                self._change(_Change("add", path, entry=("dir", "")))
        elif call in ("symlink", "symlinkat"):
            self._change(_Change("add", path, entry=("link", _strings(arguments)[0].decode())))
        else:
            raise ValueError(f"{call} was traced, and what a crash leaves of it is not modelled: {arguments[:200]}")
        return True

    def _opened(self, path: str, arguments: str) -> bool:
        if "O_CREAT" in arguments and path not in self._names:
            number = len(self._files)
            self._files[number] = _File(number)
            self._change(_Change("add", path, entry=("file", number)))
            return True
        if "O_TRUNC" in arguments:
            file = self._file(path)
            file.content.clear()
            file.position, file.is_dirty = 0, True
            return True
        return False

    def _flushed(self, path: str) -> None:
        if path != self._root and self._names[path][0] == "file":
            file = self._file(path)
            file.durable, file.is_dirty = bytes(file.content), False
            return
        touching = [number for number, change in enumerate(self._changes, 1) if path in change.folders]
        self._durable = max([self._durable, *touching])

    def _change(self, change: _Change) -> None:
        self._changes.append(change)
        _apply(change, self._names)

    def _file(self, path: str) -> _File:
        return self._files[int(self._names[path][1])]


def _apply(change: _Change, names: dict[str, Entry]) -> None:
    if change.kind == "add":
        assert change.entry is not None
        names[change.path] = change.entry
        return
    below = [path for path in names if path == change.path or path.startswith(change.path + "/")]
    moved = {change.to + path.removeprefix(change.path): names.pop(path) for path in below}
    if change.kind == "rename":
        names.update(moved)


def _calls(traced: Path) -> Iterator[tuple[str, str, int]]:
    """Name, arguments and result of each call, in the order in which they returned."""
    begun: dict[str, str] = {}
    for line in traced.read_text().splitlines():
        matched = _LINE.match(line)
        if matched is None:
            continue
        thread, text = matched.groups()
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<... "):
            text = begun.pop(thread, "") + text.partition(" resumed>")[2]
        if call := _CALL.match(text):
            yield call[1], call[2], int(call[3])


def _paths(call: str, arguments: str) -> list[str]:
    """Absolute paths that a call is about."""
    if call in ("write", "pwrite64", "writev", "lseek", "ftruncate", "fallocate", "fsync", "fdatasync"):
        return [_handle(arguments)]
    strings = [text.decode() for text in _strings(arguments)]
    if call in ("symlink", "symlinkat"):
        strings = strings[1:]
    folders = [_plain(folder) for folder in re.findall(r"(?:AT_FDCWD|\b\d+)<([^>]*)>", arguments)] or ["/"]
    return [str(Path(folders[min(i, len(folders) - 1)]) / path) for i, path in enumerate(strings)]


def _handle(arguments: str) -> str:
    matched = _HANDLE.match(arguments)
    return _plain(matched[1]) if matched else ""


def _strings(arguments: str) -> list[bytes]:
    return [bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(arguments)]


def _plain(path: str) -> str:
    return bytes.fromhex(path.replace("\\x", "")).decode() if path.startswith("\\x") else path
