"""The keys of files of text, records and tokens. Nothing here may import torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import attrs
from attrs.validators import ge, gt, lt, optional

from forge_core.api import ComponentRef, Slot
from forge_core.config.sections import Job
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.errors import ConfigError
from forge_plugins_data.dataset_config import not_empty

EncodingErrors = Literal["strict", "replace", "skip"]
Packing = Literal["windows", "best_fit"]


@attrs.frozen(kw_only=True)
class HeldOutConfig(DataSourceConfig):
    """What sources have in common that can hold out a part."""

    validation: float = attrs.field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """The part that is held out for evaluation, 0 to 1."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Evaluation must have data, and what is held out must be used by somebody."""
        yield from check_held_out(self, job)


def missing_paths(path: str | tuple[str, ...]) -> Iterable[str]:
    """A sentence for each path that is not there."""
    from forge_plugins_data.file_selection import refuse_missing  # validation does not need it

    for one in (path,) if isinstance(path, str) else path:
        try:
            refuse_missing(one)
        except ConfigError as error:
            yield str(error)


@attrs.frozen(kw_only=True)
class FilesConfig(HeldOutConfig):
    """What sources of files have in common whose documents become samples in several ways."""

    path: str | tuple[str, ...] = attrs.field(validator=not_empty)
    """A folder, a file or a glob (``**`` crosses folders), or an array of them. Relative to the working directory;
    ``~`` is the home directory."""
    document_mask: bool = False
    """Keep documents that share a sample apart: attention does not cross from one into the next, positions start again
    at 0, and the first token of a document is no target. Otherwise a sample is plain text."""
    packing: Packing = "windows"
    """How documents become samples. ``windows`` cuts the text into samples wherever that falls. ``best_fit`` keeps
    documents whole that fit into a sample, and puts together what leaves the least room; what is left of a sample
    has no targets. It finds the documents when the source is opened, about a microsecond each."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Each path has to name something of its own, too: files are read once."""
        yield from check_held_out(self, job)
        known: dict[Path, str] = {}
        for one in self.path if isinstance(self.path, tuple) else ():
            place = _resolved(one)
            first = known.get(place)
            known[place] = one
            if first is not None:
                names = f"{one!r} twice" if first == one else f"{first!r} and {one!r}, which are the same"
                yield "path", f"has {names}; files are read once: remove one, or give it more weight in a mixture"

    def missing(self) -> Iterable[str]:
        """Paths that are not there."""
        yield from missing_paths(self.path)


def _resolved(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no such user, or links in a circle; the reader says so
        return Path(path)


class _HoldsOut(Protocol):
    @property
    def validation(self) -> float: ...


def check_held_out(config: _HoldsOut, job: Job) -> Iterable[tuple[str, str]]:
    """Problems of a source that holds out a part of itself, by key: it is not used, or there is nothing to evaluate."""
    evaluated = job.eval.data.config if job.eval.data is not None else None
    if config is evaluated and config.validation > 0:
        yield "validation", "has no effect here: data named under [eval.data] are evaluated whole; remove it"
    if job.data.config is config and evaluated is None and job.eval.interval > 0 and config.validation == 0:
        sentence = (
            "is 0 and there is no [eval.data], so that eval.interval has nothing to evaluate; "
            "hold something out (validation = 0.01), name data under [eval.data], or set eval.interval = 0"
        )
        yield "validation", sentence


@attrs.frozen(kw_only=True)
class TextFilesConfig(FilesConfig):
    """Text files, each one document, tokenised in memory by every process when it starts.

    Made for corpora of up to about a gigabyte; prepare larger ones with ``forge data prepare`` and use ``token_files``.
    In ``path``, ``{stdlib}`` stands for the folder of Python's standard library: text that every machine has.
    ``validation`` holds out whole files, chosen by a hash of their relative path, so that adding files moves no other
    one between training and validation; one file at least, if it is above 0.
    """

    pattern: str | None = attrs.field(default=None, validator=optional(attrs.validators.min_len(1)))
    """Which files to take from a folder, by default ``**/*.txt``; ``**`` crosses folders. Hidden files are never taken.
    For paths of which at least one is a folder."""
    exclude: tuple[str, ...] = ()
    """Files to leave out: globs for their path in the folder, such as ``"site-packages/**"`` or ``"**/tests/**"``."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens. ``bytes`` needs no file and reads any file as it is."""
    encoding_errors: EncodingErrors = "strict"
    """What to do with files that are not UTF-8: ``strict`` refuses to start, ``replace`` puts U+FFFD, ``skip`` leaves
    the file out. For tokenizers that read text; ``bytes`` decodes nothing."""
    binary: bool = False
    """Take the bytes of every file as they are. Otherwise ``.gz`` and ``.zst`` are unpacked, and what is no text is
    refused: JSON Lines, Parquet, archives, images, and any file with NUL bytes."""


@attrs.frozen(kw_only=True)
class RecordsConfig(FilesConfig):
    """Documents in JSON Lines (a line each; also ``.gz`` and ``.zst``) or Parquet (a row each), tokenised in memory by
    every process when it starts, as ``text_files`` does.

    ``validation`` holds out documents, chosen by a hash of the file's relative path and their number in it, so that
    more of them move no other one between training and validation. Documents without text are left out.
    """

    text_field: str = attrs.field(default="text", validator=attrs.validators.min_len(1))
    """The key of each line, or the column, that holds the text."""
    pattern: str | None = attrs.field(default=None, validator=optional(attrs.validators.min_len(1)))
    """Which files to take from a folder, by default those with the format's endings; ``**`` crosses folders."""
    exclude: tuple[str, ...] = ()
    """Files to leave out: globs for their path in the folder."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    encoding_errors: EncodingErrors = "strict"
    """What to do with lines that are not UTF-8: ``strict`` refuses to start, ``replace`` puts U+FFFD, ``skip`` leaves
    them out."""


def _for_documents(config: TokenFilesConfig, _: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and not config.document_mask and config.packing == "windows":
        raise ValueError('has no effect without document_mask = true or packing = "best_fit"; set one, or remove it')


@attrs.frozen(kw_only=True)
class TokenFilesConfig(FilesConfig):
    """Memory-mapped token ids: a folder written by ``forge data prepare``, its ``.bin`` files, or ``.npy`` of one row.
    Also what other programs have written: ``.bin`` with ``.idx`` (Megatron), ``.ds`` (nanotron, datatrove), a folder of
    chunks with an ``index.json`` (litgpt), and ``.bin`` that are nothing but ids of a ``dtype``.

    ``validation`` holds out the last windows of every file, or with ``best_fit`` documents at equal distances.
    """

    tokenizer: Annotated[ComponentRef | None, Slot("tokenizer")] = None
    """The tokenizer of files that do not carry theirs. Prepared folders do."""
    vocab_size: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """For files that do not say, without a ``tokenizer``: all ids are below this, which is checked by reading them."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """The type of little-endian ids in files that do not say it. Nothing is guessed from the size of a file."""
    end_of_document: int | None = attrs.field(default=None, validator=[optional(ge(0)), _for_documents])
    """For files that do not say, without a ``tokenizer``: the id that ends a document, for ``document_mask`` and
    ``best_fit``."""
    verify: Literal["before", "first_read", "never"] = "first_read"
    """When rank 0 compares files with the checksums that ``forge data prepare`` has noted: ``before`` the first step,
    which waits, and is refused if one is damaged; in the background from the ``first_read`` on, which tells; or
    ``never``."""
