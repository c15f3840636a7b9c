"""``forge data prepare``: text in, token files out, by several processes, to be interrupted at any time.

The input is cut into units, each of which becomes one file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.bpe import train_bpe
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.documents import DEFAULT_PATTERNS, Unit, plan_units, read_documents
from forge_plugins_data.encoding import reads_bytes
from forge_plugins_data.file_selection import SelectedFile, count_left_out, select_files
from forge_plugins_data.progress import Progress
from forge_plugins_data.token_format import SETTINGS, TokenHeader, write_atomically
from forge_plugins_data.tokenising import LOCK, Work, alone_in, tokenise, writing_in
from forge_plugins_data.tokenizer_config import TokenizerFileConfig
from forge_plugins_data.tokenizer_file import FILE_NAME, TokenizerFile

UNIT_SIZE = 64 * 2**20
_ENDINGS = 5
"""So many of the files that are left out are named."""


def prepare(
    inputs: Sequence[str],
    output: Path,
    *,
    tokenizer: Tokenizer | int,
    text_field: str = "text",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    exclude: Sequence[str] = (),
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
        exclude: globs for the names within folders of files to leave out.
        encoding_errors: what becomes of documents that are not UTF-8.
        binary: whether text files may hold anything, such as NUL bytes.
        workers: processes; with 1 the work is done in this one.
        unit_size: bytes of input that become one file of tokens.

    Returns:
        The content of ``index.json``.

    Raises:
        ConfigError: input missing, empty or damaged; ``output`` holds something else, or cannot be written; its disk is
            full.
        ForgeError: a process was killed; what is finished stays.
    """
    files = select_files(inputs, patterns, exclude)
    if left_out := count_left_out(inputs, select_files(inputs, patterns) if exclude else files):
        example = f"**/*{next(filter(None, left_out), '')}"
        progress.say(f"left out: {_listed(left_out)}; choose others with --pattern, such as --pattern '{example}'")
    units = plan_units([file.path for file in files], unit_size, text_field, binary=binary)
    if not sum(unit.size for unit in units):
        raise ConfigError(f"the input is empty: {len(files)} file{'s' * (len(files) != 1)}, no bytes")
    if all(unit.kind == "text" for unit in units):
        _refuse_idle(tokenizer, text_field, encoding_errors)
    settings = _settings(files, tokenizer, text_field, encoding_errors, binary, unit_size)
    _require_same_settings(output, settings)
    with writing_in(output, "--output"), alone_in(output) as alone:
        if not alone:
            raise ConfigError(f"another 'forge data prepare' is working in {output}")
        if not (output / SETTINGS).is_file() or _has_nothing_yet(output):
            write_atomically(output / SETTINGS, json.dumps(settings, indent=2) + "\n")
        if isinstance(tokenizer, int):
            tokenizer = _trained(output, units, tokenizer, text_field, encoding_errors, progress)
        documents = partial(read_documents, field=text_field, errors=encoding_errors)
        header = tokenise(Work.begun(output, tokenizer, documents, encoding_errors), units, workers, progress)
    if header.tokens == 0:
        raise ConfigError(f"the input has no text: {len(files)} file{'s' * (len(files) != 1)}, all documents empty")
    return header


def _refuse_idle(tokenizer: Tokenizer | int, text_field: str, encoding_errors: EncodingErrors) -> None:
    """What says nothing about plain text."""
    if text_field != "text":
        raise ConfigError(f"--text-field {text_field} has no effect: no input is JSONL or Parquet; remove it")
    if encoding_errors != "strict" and not isinstance(tokenizer, int) and reads_bytes(tokenizer):
        raise ConfigError(
            f"--encoding-errors {encoding_errors} has no effect: this tokenizer reads the bytes of text files and "
            "decodes nothing; remove it"
        )


def _listed(endings: Mapping[str, int]) -> str:
    """``{".md": 16}`` as ``16 files ending in .md``; of many endings, the commonest."""
    common = [
        f"{count:,} file{'s' * (count != 1)} " + (f"ending in {ending}" if ending else "without an ending")
        for ending, count in [*endings.items()][:_ENDINGS]
    ]
    others = [*endings.values()][_ENDINGS:]
    more = f"{sum(others):,} file{'s' * (sum(others) != 1)} with {len(others)} other ending{'s' * (len(others) != 1)}"
    return ", ".join([*common, more] if others else common)


_INPUTS = "names_sizes_and_times_of_files"
"""A hash, of which the two values say nothing to people."""


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
        name = file.relative.encode("utf-8", "surrogateescape")
        inputs.update(name + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    which = {"train_bpe": tokenizer} if isinstance(tokenizer, int) else {"tokenizer": tokenizer.fingerprint}
    return which | {
        "text_field": text_field,
        "encoding_errors": encoding_errors,
        "unit_size": unit_size,
        "files": len(files),
        _INPUTS: inputs.hexdigest(),
        **({"binary": True} if binary else {}),  # earlier versions did not know it, and what they began is continued
    }


def _require_same_settings(output: Path, settings: dict[str, Any]) -> None:
    file = output / SETTINGS
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; the output is a folder")
    if not output.exists() or _has_nothing_yet(output):
        return
    if not file.is_file():
        raise ConfigError(f"the folder {output} has other things in it; name a new or an empty one")
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is damaged ({error}); remove {output} and prepare the data again") from error
    differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
    if differing:
        changes = "; ".join(
            "a file of the input has another name, size or time"
            if key == _INPUTS
            else f"{key}: {before.get(key)} then, {settings.get(key)} now"
            for key in differing
        )
        raise ConfigError(
            f"{output} was begun with other settings or input ({changes}). Use the same ones to continue, another "
            "folder, or remove this one."
        )


def _has_nothing_yet(output: Path) -> bool:
    """A call that came no further, as at a file that is no text or on a full disk, does not bind the next one."""
    return {found.name for found in output.iterdir()} <= {LOCK, SETTINGS, f"{SETTINGS}.partial"}


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
