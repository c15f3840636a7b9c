"""``forge data prepare``: text in, token files out, by several processes, to be interrupted at any time.

The input is cut into units, each of which becomes one file. A file is written under another name, moved to its own when
it is whole, and then described by a JSON beside it: what has its JSON is done, and is not done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError, ForgeError
from forge_plugins_data.bpe import train_bpe
from forge_plugins_data.config import EncodingErrors, TokenizerFileConfig
from forge_plugins_data.documents import DEFAULT_PATTERNS, Unit, plan_units, read_documents
from forge_plugins_data.encoding import encode_document
from forge_plugins_data.file_selection import SelectedFile, count_left_out, select_files
from forge_plugins_data.progress import Progress
from forge_plugins_data.shard_writer import ShardWriter
from forge_plugins_data.token_format import (
    INDEX,
    SETTINGS,
    Shard,
    TokenHeader,
    map_shard,
    read_header,
    smallest_dtype,
    write_atomically,
    write_header,
)
from forge_plugins_data.tokenizer_file import FILE_NAME, TokenizerFile

UNIT_SIZE = 64 * 2**20
_ENDINGS = 5
"""Named of those that are left out."""


def prepare(
    inputs: Sequence[str],
    output: Path,
    *,
    tokenizer: Tokenizer | int,
    text_field: str = "text",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    encoding_errors: EncodingErrors = "strict",
    binary: bool = False,
    workers: int = 1,
    unit_size: int = UNIT_SIZE,
    progress: Progress,
) -> TokenHeader:
    """Tokenise ``inputs`` into the folder ``output``, or finish what an earlier call with the same settings began.

    The files do not depend on ``workers`` nor on interruptions.

    Args:
        inputs: folders, files and globs of text (one document a file), ``.jsonl`` and ``.parquet``.
        tokenizer: what to use, which must survive pickling; or the vocabulary of a BPE tokenizer to be trained first.
        text_field: the key or column of JSONL and Parquet files that holds the text.
        patterns: which files to take from folders.
        encoding_errors: what becomes of documents that are not UTF-8.
        binary: whether text files may hold anything, such as NUL bytes.
        workers: processes; with 1 the work is done in this one.
        unit_size: bytes of input that become one file of tokens.

    Returns:
        The content of ``index.json``.

    Raises:
        ConfigError: input missing, empty or damaged, or ``output`` holds something else.
        ForgeError: a process was killed; what is finished stays.
    """
    files = select_files(list(inputs), list(patterns))
    if left_out := count_left_out(inputs, files):
        example = f"**/*{next(filter(None, left_out), '')}"
        progress.say(f"left out: {_listed(left_out)}; choose others with --pattern, such as --pattern '{example}'")
    units = plan_units([file.path for file in files], unit_size, text_field, binary=binary)
    if not sum(unit.size for unit in units):
        raise ConfigError(f"the input is empty: {len(files)} file{'s' * (len(files) != 1)}, no bytes")
    settings = _settings(files, tokenizer, text_field, encoding_errors, binary, unit_size)
    _require_same_settings(output, settings)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: cannot make the folder {output}: {error.strerror}") from error
    with _alone(output):
        if not (output / SETTINGS).is_file():
            write_atomically(output / SETTINGS, json.dumps(settings, indent=2) + "\n")
        if isinstance(tokenizer, int):
            tokenizer = _trained(output, units, tokenizer, text_field, encoding_errors, progress)
        work = _Work(
            folder=output,
            tokenizer=tokenizer,
            text_field=text_field,
            encoding_errors=encoding_errors,
            header=TokenHeader(
                dtype=smallest_dtype(tokenizer.vocab_size).name,
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
                tokenizer=dict(tokenizer.save(output)),
                tokenizer_fingerprint=tokenizer.fingerprint,
                shards=(),
            ),
        )
        header = _complete(work, units, workers, progress)
        if header.tokens == 0:
            raise ConfigError(f"the input has no text: {len(files)} file{'s' * (len(files) != 1)}, all documents empty")
        write_header(output / INDEX, header)
        return header


def _listed(endings: Mapping[str, int]) -> str:
    """``{".md": 16}`` as ``16 files ending in .md``; of many endings, the commonest."""
    common = [
        f"{count:,} file{'s' * (count != 1)} " + (f"ending in {ending}" if ending else "without an ending")
        for ending, count in [*endings.items()][:_ENDINGS]
    ]
    others = [*endings.values()][_ENDINGS:]
    return ", ".join(common) + (f", {sum(others):,} files with {len(others)} other endings" if others else "")


@attrs.frozen(kw_only=True)
class _Work:
    """All that a process needs to turn any unit into a file."""

    folder: Path
    tokenizer: Tokenizer
    text_field: str
    encoding_errors: EncodingErrors
    header: TokenHeader
    """Without shards."""

    def finished(self, index: int) -> Shard | None:
        """What an earlier call has made of a unit, if it is still there."""
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

    def make(self, index: int, unit: Unit) -> Shard:
        file = self.folder / f"{_name(index)}.bin"
        writer = ShardWriter(file, dtype=self.header.dtype, end_of_document=self.tokenizer.end_of_document)
        with writer:
            for document in read_documents(unit, self.text_field, self.encoding_errors):
                writer.add(encode_document(self.tokenizer, document.content, self.encoding_errors, document.where))
            shard = writer.finish()
        write_header(file.with_suffix(".json"), attrs.evolve(self.header, shards=(shard,)))
        return shard


def _name(index: int) -> str:
    return f"tokens_{index:05d}"


def _complete(work: _Work, units: Sequence[Unit], workers: int, progress: Progress) -> TokenHeader:
    """Do what is not done yet, in any order, and describe all of it in the order of the units."""
    shards = {index: shard for index in range(len(units)) if (shard := work.finished(index)) is not None}
    pending = {index: unit for index, unit in enumerate(units) if index not in shards}
    if shards:
        progress.say(f"{len(shards)} of {len(units)} parts are done already")
    with progress:
        progress.begin(sum(unit.size for unit in units), sum(units[index].size for index in shards))
        for index, shard in _made(work, pending, workers):
            shards[index] = shard
            progress.advance(units[index].size, shard.tokens)
    return attrs.evolve(work.header, shards=tuple(shards[index] for index in range(len(units))))


def _made(work: _Work, pending: dict[int, Unit], workers: int) -> Iterator[tuple[int, Shard]]:
    if workers == 1 or len(pending) < 2:
        for index, unit in pending.items():
            yield index, work.make(index, unit)
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(workers, len(pending)),
        mp_context=multiprocessing.get_context("spawn"),  # the tokenizers library must not be forked
        initializer=_start_worker,
        initargs=(work,),
    )
    try:
        futures: dict[Future[Shard], int] = {
            executor.submit(_make_in_worker, index, unit): index for index, unit in pending.items()
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise ForgeError(
            "a worker process was killed, perhaps because memory ran out. What is finished is kept: run the same "
            "command again, with fewer --workers if need be."
        ) from error
    except BaseException:  # an error or Ctrl-C: do not wait for units that will be thrown away
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_work: _Work
"""In a worker process: what it was started for."""


def _start_worker(work: _Work) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waiting for its next unit would wait for ever after its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    parent.join()
    os._exit(1)


def _make_in_worker(index: int, unit: Unit) -> Shard:
    return _work.make(index, unit)


def _settings(
    files: Sequence[SelectedFile],
    tokenizer: Tokenizer | int,
    text_field: str,
    encoding_errors: EncodingErrors,
    binary: bool,
    unit_size: int,
) -> dict[str, Any]:
    """All that decides the output, as JSON values."""
    inputs = hashlib.sha256()
    for file in files:
        status = file.path.stat()
        inputs.update(f"{file.relative}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    which = {"train_bpe": tokenizer} if isinstance(tokenizer, int) else {"tokenizer": tokenizer.fingerprint}
    return which | {
        "text_field": text_field,
        "encoding_errors": encoding_errors,
        "unit_size": unit_size,
        "files": len(files),
        "names_sizes_and_times_of_files": inputs.hexdigest(),
        **({"binary": True} if binary else {}),  # earlier versions did not know it, and what they began is continued
    }


def _require_same_settings(output: Path, settings: dict[str, Any]) -> None:
    file = output / SETTINGS
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; the output is a folder")
    if not file.is_file():
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"the folder {output} has other things in it; name a new or an empty one")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
    if differing:
        changes = "; ".join(f"{key}: {before.get(key)} then, {settings.get(key)} now" for key in differing)
        raise ConfigError(
            f"{output} was begun with other settings or input ({changes}). Use the same ones to continue, another "
            "folder, or remove this one."
        )


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Two processes would write the same partial files."""
    with os.fdopen(os.open(output / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another 'forge data prepare' is working in {output}") from error
        yield


def _trained(
    output: Path,
    units: Sequence[Unit],
    vocab_size: int,
    text_field: str,
    encoding_errors: EncodingErrors,
    progress: Progress,
) -> Tokenizer:
    file = output / FILE_NAME
    if not file.is_file():
        progress.say(f"training a BPE tokenizer with {vocab_size} ids")
        trained = train_bpe(units, vocab_size, text_field, encoding_errors)
        write_atomically(file, trained.to_str())
    tokenizer = TokenizerFile(TokenizerFileConfig(path=FILE_NAME), base=output)
    if tokenizer.vocab_size < vocab_size:
        progress.say(f"the text has pairs for {tokenizer.vocab_size} ids only")
    return tokenizer
