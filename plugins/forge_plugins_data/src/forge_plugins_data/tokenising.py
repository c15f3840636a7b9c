"""Parts of an input to files of tokens, by several processes, to be interrupted at any time.

A file is written under another name, moved to its own when it is whole, and then described by a JSON beside it: what
has its JSON is done, and is not done again.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import attrs

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError, ForgeError
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.documents import Document
from forge_plugins_data.encoding import encode_document
from forge_plugins_data.progress import Progress
from forge_plugins_data.shard_writer import ShardWriter
from forge_plugins_data.token_format import (
    INDEX,
    Shard,
    TokenHeader,
    map_shard,
    read_header,
    smallest_dtype,
    write_header,
)


class Part(Protocol):
    """A part of an input, small enough to be done again after an interruption. It becomes one file."""

    @property
    def size(self) -> int:
        """Bytes, for progress."""
        ...


@attrs.frozen(kw_only=True)
class Work:
    """All that a process needs to turn any part into a file."""

    folder: Path
    tokenizer: Tokenizer
    """Survives pickling."""
    encoding_errors: EncodingErrors
    documents: Callable[[Any], Iterable[Document]]
    """The documents of a part, in order. Survives pickling, as parts do."""
    header: TokenHeader
    """Without shards."""

    @classmethod
    def begun(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        documents: Callable[[Any], Iterable[Document]],
        encoding_errors: EncodingErrors = "strict",
    ) -> Work:
        """Save the tokenizer in ``folder``, which is there."""
        header = TokenHeader(
            dtype=smallest_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            tokenizer=dict(tokenizer.save(folder)),
            tokenizer_fingerprint=tokenizer.fingerprint,
            shards=(),
        )
        return cls(
            folder=folder, tokenizer=tokenizer, encoding_errors=encoding_errors, documents=documents, header=header
        )

    def finished(self, index: int) -> Shard | None:
        """What an earlier call has made of a part, if it is still there."""
        description = self.folder / f"{_name(index)}.json"
        if not description.is_file():
            return None
        try:
            header = read_header(description)
            (shard,) = header.shards
            map_shard(self.folder, header, shard)
        except (ConfigError, ValueError):  # damaged, or removed so that it be made again
            return None
        return shard

    def make(self, index: int, part: Part) -> Shard:
        """Turn a part into its file."""
        file = self.folder / f"{_name(index)}.bin"
        writer = ShardWriter(file, dtype=self.header.dtype, end_of_document=self.tokenizer.end_of_document)
        with writer:
            for document in self.documents(part):
                writer.add(encode_document(self.tokenizer, document.content, self.encoding_errors, document.where))
            shard = writer.finish()
        write_header(file.with_suffix(".json"), attrs.evolve(self.header, shards=(shard,)))
        return shard


def _name(index: int) -> str:
    return f"tokens_{index:05d}"


def tokenise(work: Work, parts: Sequence[Part], workers: int, progress: Progress) -> TokenHeader:
    """Do what is not done yet, in any order, and describe all of it in the order of the parts. The files do not depend
    on ``workers`` nor on interruptions.

    Args:
        workers: processes; with 1 the work is done in this one.

    Returns:
        The content of ``index.json``, which is written last, if there are any tokens.

    Raises:
        ConfigError: a document cannot be read, or the disk is full; what is finished stays.
        ForgeError: a process was killed; what is finished stays.
    """
    shards = {index: shard for index in range(len(parts)) if (shard := work.finished(index)) is not None}
    pending = {index: part for index, part in enumerate(parts) if index not in shards}
    if shards:
        progress.say(f"{len(shards)} of {len(parts)} parts are done already")
    try:
        with progress:
            progress.begin(sum(part.size for part in parts), sum(parts[index].size for index in shards))
            for index, shard in _made(work, pending, workers):
                shards[index] = shard
                progress.advance(parts[index].size, shard.tokens)
        header = attrs.evolve(work.header, shards=tuple(shards[index] for index in range(len(parts))))
        if header.tokens:
            write_header(work.folder / INDEX, header)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"the disk of {work.folder} is full ({error.strerror}). {len(shards)} of {len(parts)} parts are finished "
            "and kept: make room and do the same again, or name a folder elsewhere."
        ) from error
    return header


def _made(work: Work, pending: dict[int, Part], workers: int) -> Iterator[tuple[int, Shard]]:
    if workers == 1 or len(pending) < 2:
        for index, part in pending.items():
            yield index, work.make(index, part)
        return
    pool = _Pool(work, pending, workers)
    pool.start()
    try:
        while (result := pool.results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result
    except BrokenProcessPool as error:
        raise ForgeError(
            "a worker process was killed, perhaps because memory ran out. What is finished is kept: do the same "
            "again, with fewer of them if need be (--workers, or the key processes of a data source)."
        ) from error
    finally:  # after an error, Ctrl-C or the end of the process, too: no waiting for parts that will be thrown away
        pool.end()


class _Pool(threading.Thread):
    """Makes parts by several processes.

    The executor is used in this thread only. Ctrl-C raises ``KeyboardInterrupt`` anywhere in the main thread: a lock
    of the executor that it took just then would stay locked, and the process would never end.
    """

    def __init__(self, work: Work, pending: Mapping[int, Part], workers: int) -> None:
        super().__init__(name="forge-tokenise", daemon=True)
        self.results: SimpleQueue[tuple[int, Shard] | Exception | None] = SimpleQueue()
        """Each part's index and file in the order in which they are finished; last ``None``, or an error."""
        self._pending, self._capacity = pending, 2 * workers
        self._is_ended = False
        self._others = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            min(workers, len(pending)),
            mp_context=multiprocessing.get_context("spawn"),  # the tokenizers library must not be forked
            initializer=_start_worker,
            initargs=(work,),
        )

    def run(self) -> None:
        with self._executor:
            try:
                self._make_all()
            except Exception as error:  # noqa: BLE001 - raised where results are read
                self.results.put(error)
            else:
                self.results.put(None)

    def _make_all(self) -> None:
        waiting, running = iter(self._pending.items()), dict[Future[Shard], int]()
        while not self._is_ended:
            # few at a time: at the end of the process, which a thread of it cannot stop, no more of them begin
            for index, part in islice(waiting, self._capacity - len(running)):
                running[self._executor.submit(_make_in_worker, index, part)] = index
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self.results.put((running.pop(future), future.result()))

    def end(self) -> None:
        """Stop the processes, busy or not."""
        self._is_ended = True
        while self.is_alive():
            for worker in set(multiprocessing.active_children()) - self._others:
                worker.terminate()
            self.join(0.1)


_work: Work
"""In a worker process: what it was started for."""


def _start_worker(work: Work) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waiting for its next part would wait for ever after its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    parent.join()
    os._exit(1)


def _make_in_worker(index: int, part: Part) -> Shard:
    return _work.make(index, part)


@contextmanager
def writing_in(folder: Path, key: str) -> Iterator[None]:
    """Make a folder if it is not there; within the context, say in a sentence why it cannot be written to.

    Args:
        key: names the folder in problems: the option or the key that says it.

    Raises:
        ConfigError: it cannot be made or written to, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}: cannot make the folder {folder}: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot tokenise into the folder {folder}: {error.strerror or error}; make it a folder that can be "
            "written, and on a disk with room"
        ) from error


LOCK = "lock"
"""The file of a folder whose lock says that somebody writes there."""


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Two processes would write the same partial files: give whether this one is alone, until the context ends or the
    process does. On a file system of several nodes, for all of them, if it has locks (``flock``)."""
    with os.fdopen(os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def cores() -> int:
    """Cores that this process may use, where the system tells (Linux)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
