"""The documents of a configuration: its rows written, tokenised and cut, with the layouts of their images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def open_documents(
    config: ImageTextConfig, split: Split, seq_len: int, write: Write, encoder: Encoder, processor: ImageProcessor
) -> Opened:
    """Read and tokenise the conversations of a split.

    Raises:
        ConfigError: a row is not in the format; it is too long, or has too many images, if those are refused; an image
            cannot be read, if those are refused; nothing is left.
    """
    documents: list[Document] = []
    identities: list[str] = []
    counts = {"conversations": 0, "cut": 0, "skipped": 0, "unreadable": 0}
    first_unreadable = None
    for sample in _samples(config, split):
        counts["conversations"] += 1
        try:
            own = [_identity(reference) for reference in sample.references]
            images = _with_layouts(sample.references, config, processor)
        except UnreadableError as error:
            sentence = f"{sample.where}: {error}"
            if config.on_error == "refuse":
                raise ConfigError(f'{sentence}; mend or remove it, or set on_error = "skip"') from error
            first_unreadable = first_unreadable or sentence
            counts["unreadable"] += 1
            continue
        document = encoder(write(sample), images, sample.where)
        kept = _kept(document, config, seq_len)
        if kept is None:
            counts["skipped"] += 1
            continue
        counts["cut"] += kept is not document
        documents.append(kept)
        identities += own
    if not documents:
        raise ConfigError(_nothing(config, split, seq_len, counts, first_unreadable))
    return Opened(documents, identities, counts, first_unreadable)


def _samples(config: ImageTextConfig, split: Split) -> Iterator[Sample]:
    return (sample_of(row, config) for row in chosen_rows(config, split))


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
    return None if config.too_long == "skip" else document.cut(seq_len + 1, config.max_images)


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
