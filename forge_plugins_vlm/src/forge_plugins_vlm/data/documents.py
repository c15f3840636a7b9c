"""The documents of a configuration: its rows written, tokenised and cut, with the layouts of their images."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import ImageProcessor, Layout
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.document import Document, Encoder
from forge_plugins_vlm.data.formats import sample_of
from forge_plugins_vlm.data.references import Reference, UnreadableError
from forge_plugins_vlm.data.rows import chosen_rows
from forge_plugins_vlm.data.sample import Sample
from forge_plugins_vlm.data.writing import Write


@attrs.frozen
class Opened:
    """What a split has."""

    documents: Sequence[Document]
    identities: Sequence[str]
    """Of their images, in order."""
    counts: dict[str, int]
    """``conversations``, and how many of them are ``cut``, ``skipped`` as too long, or ``unreadable``."""
    first_unreadable: str | None
    """A sentence about the first image that cannot be read."""


class DocumentMaker:
    """Makes documents of conversations, as a configuration wants them."""

    def __init__(
        self, config: ImageTextConfig, seq_len: int, write: Write, encode: Encoder, processor: ImageProcessor
    ) -> None:
        self._config, self._seq_len = config, seq_len
        self._write, self._encode, self._processor = write, encode, processor

    def __call__(self, sample: Sample) -> Document | None:
        """The document; nothing, if it is too long, or has too many images, and such are skipped.

        Raises:
            ConfigError: it is too long, or has too many images, and those are refused; what ``Encoder`` refuses.
            UnreadableError: the size of an image must be known, and it cannot be read.
        """
        images = _with_layouts(sample.references, self._config, self._processor)
        document = self._encode(self._write(sample), images, sample.where)
        return _kept(document, self._config, self._seq_len)


def open_documents(config: ImageTextConfig, split: Split, seq_len: int, make: DocumentMaker) -> Opened:
    """Read and tokenise the conversations of a split.

    Raises:
        ConfigError: a row is not in the format; it is too long, or has too many images, if those are refused; an image
            cannot be read, if those are refused; nothing is left.
    """
    documents: list[Document] = []
    identities: list[str] = []
    counts = {"conversations": 0, "cut": 0, "skipped": 0, "unreadable": 0}
    first_unreadable = None
    for row in chosen_rows(config, split):
        sample = sample_of(row, config)
        counts["conversations"] += 1
        try:
            own = [_identity(reference) for reference in sample.references]
            document = make(sample)
        except UnreadableError as error:
            first_unreadable = first_unreadable or sentence_or_refusal(sample, error, config)
            counts["unreadable"] += 1
            continue
        if document is None:
            counts["skipped"] += 1
            continue
        counts["cut"] += document.is_cut
        documents.append(document)
        identities += own
    if not documents:
        raise ConfigError(_nothing(config, split, seq_len, counts, first_unreadable))
    return Opened(documents, identities, counts, first_unreadable)


def sentence_or_refusal(sample: Sample, error: UnreadableError, config: ImageTextConfig) -> str:
    """What is said of a conversation that is left out.

    Raises:
        ConfigError: such are refused.
    """
    sentence = f"{sample.where}: {error}"
    if config.on_error == "refuse":
        raise ConfigError(f'{sentence}; mend or remove it, or set on_error = "skip"') from error
    return sentence


def _identity(reference: Reference) -> str:
    try:
        return reference.identity
    except OSError as error:
        raise UnreadableError(reference, error) from error


def _with_layouts(
    references: Sequence[Reference], config: ImageTextConfig, processor: ImageProcessor
) -> list[tuple[Reference, Layout]]:
    """
    Raises:
        UnreadableError: one has to be read for it, and cannot be.
    """
    found = []
    for reference in references:
        size = config.processor_config.tile_size
        if config.processor_config.depends_on_size:
            try:
                size = reference.size()
            except OSError as error:
                raise UnreadableError(reference, error) from error
        found.append((reference, processor.layout(size, config.token_grid)))
    return found


def _kept(document: Document, config: ImageTextConfig, seq_len: int) -> Document | None:
    """The document, or its beginning if it is too long and such are cut, or nothing.

    Raises:
        ConfigError: it is too long, or has too many images, and those are refused.
    """
    length, n_images = len(document.tokens), len(document.images)
    if length <= seq_len + 1 and n_images <= config.max_images:
        return document
    if config.too_long == "refuse":
        what = 'or set too_long to "cut" or "skip"'
        if n_images > config.max_images:
            raise ConfigError(
                f"{document.where} has {n_images} images, and max_images = {config.max_images}; raise it, {what}"
            )
        taken = sum(image.length for image in document.images)
        images = f", of which its {n_images} image{'s' * (n_images > 1)} take {taken:,}" if n_images else ""
        raise ConfigError(
            f"{document.where} has {length:,} tokens{images}, and a sample takes train.seq_len + 1 = {seq_len + 1:,}; "
            f"raise train.seq_len, {what}"
        )
    cut = None if config.too_long == "skip" else document.cut(seq_len + 1, config.max_images)
    return None if cut is None else attrs.evolve(cut, is_cut=True)


def _nothing(
    config: ImageTextConfig, split: Split, seq_len: int, counts: dict[str, int], first_unreadable: str | None
) -> str:
    if first_unreadable is not None and counts["unreadable"] == counts["conversations"]:
        return (
            f"{config.place}: none of its {counts['unreadable']} conversations has images to read; {first_unreadable}"
        )
    part = "" if split == "all" else f"the {split} part of "
    said = f"{counts['skipped']} are too long for train.seq_len = {seq_len}, and the images of {counts['unreadable']}"
    left = f", as of {counts['conversations']} conversations {said} cannot be read" if counts["conversations"] else ""
    return f"{config.place}: {part}the data has nothing to learn{left}"
