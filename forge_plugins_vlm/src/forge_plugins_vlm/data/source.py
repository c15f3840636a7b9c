"""The data source ``image_text``: images and videos among text, of which the answers are learned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers import tokenizer_of
from forge_plugins_data.chat import template_of
from forge_plugins_vlm.answer_end import AnswerEnd
from forge_plugins_vlm.contracts.image_processor import ImageProcessor
from forge_plugins_vlm.data.collation import Shape, collate
from forge_plugins_vlm.data.config import ImageTextConfig, entries_of
from forge_plugins_vlm.data.document import Document, Encoder, forbidden_ids
from forge_plugins_vlm.data.documents import DocumentMaker, Opened, open_documents
from forge_plugins_vlm.data.guard import refuse_copies
from forge_plugins_vlm.data.packing import one_each, pack
from forge_plugins_vlm.data.reading import ImageReader
from forge_plugins_vlm.data.writing import writer

LOOKED_AT = 8
"""Samples that are read when a source is opened."""


def open_image_text(
    config: ImageTextConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> ImageText:
    """Read and tokenise the conversations of a split; images stay where they are.

    Raises:
        ConfigError: no such files, or data set; by file and line, what is not in the format, has no answer, has the
            placeholder in a text, or is too long or has too many images, if those are refused; images that cannot be
            read, if they are refused, or none that can; targets that are not shifted; nothing to learn.
    """
    tokenizer = tokenizer_of(config, build)
    processor: ImageProcessor = build(config.processor)
    make = DocumentMaker(config, seq_len, writer(config, tokenizer), encoder_of(config, tokenizer), processor)
    opened = open_documents(config, split, seq_len, make)
    source = ImageText(config, opened, tokenizer, processor, seq_len)
    source.refuse_unusable()
    return source


def encoder_of(config: ImageTextConfig, tokenizer: Tokenizer) -> Encoder:
    """What turns conversations into tokens, as a configuration has it."""
    rows, columns = config.token_grid
    return Encoder(
        tokenizer,
        placeholder=config.placeholder,
        tokens_a_tile=rows * columns,
        one_token_an_image=config.one_token_an_image,
    )


def shape_of(config: ImageTextConfig, tokenizer: Tokenizer, seq_len: int) -> Shape:
    """The batches of a configuration."""
    rows, columns = config.token_grid
    return Shape(
        seq_len=seq_len,
        fill=tokenizer.end_of_document,
        processor=config.processor_config,
        tokens_a_tile=rows * columns,
        packed=config.packing,
    )


def answer_end_of(config: ImageTextConfig, tokenizer: Tokenizer) -> AnswerEnd:
    """Where an answer ends, as a configuration writes it."""
    return AnswerEnd(tokenizer, template_of(config, tokenizer) if config.chat_template else None)


def identity_of(config: ImageTextConfig, tokenizer: Tokenizer) -> list[Any]:
    """What decides how conversations and images become samples, for a fingerprint."""
    return [
        "image_text",
        tokenizer.fingerprint,
        config.packing,
        config.token_grid,
        config.one_token_an_image,
        [config.processor.qualified_name, attrs.asdict(config.processor_config)],
    ]


class ImageText:
    """An indexed source of samples of one conversation, or of several that are packed.

    Attributes:
        counts: how many conversations there are, and how many of them are ``cut``, ``skipped`` as too long, or
            ``unreadable``, as far as images had to be looked at.
        forbidden: token ids that stand for images alone, which no answer has.
        answer_end: where an answer ends.
    """

    def __init__(
        self, config: ImageTextConfig, opened: Opened, tokenizer: Tokenizer, processor: ImageProcessor, seq_len: int
    ) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.answer_end = answer_end_of(config, tokenizer)
        self.counts = opened.counts
        self._config = config
        self._documents = opened.documents
        self.forbidden = forbidden_ids(tokenizer, config.placeholder)
        self._shape = shape_of(config, tokenizer, seq_len)
        packed = pack(self._documents, seq_len, config.max_images) if config.packing else one_each(self._documents)
        self._order, self._bounds = packed
        self._images = ImageReader(config, processor, _told(opened))
        self.fingerprint = self._fingerprint(opened, tokenizer)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return entries_of(self._config.processor_config, None)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``. A conversation with an image that cannot be read, if such are skipped, keeps its
        place, without targets and with blank tiles.

        Raises:
            ConfigError: an image cannot be read, if those are refused; or it is another one than when the data were
                opened.
        """
        rows = [[self._images(document) for document in self.documents(index)] for index in indices.tolist()]
        return collate(rows, self._shape)

    def n_tiles(self, indices: np.ndarray) -> np.ndarray:
        """How many tiles each of these samples has, ``(n,)`` int64. No image is decoded."""
        return np.array([sum(document.n_tiles for document in self.documents(index)) for index in indices.tolist()])

    def documents(self, index: int) -> Sequence[Document]:
        """The conversations of a sample."""
        return [self._documents[one] for one in self._order[self._bounds[index] : self._bounds[index + 1]].tolist()]

    def refuse_damaged(self) -> None:
        """Same as ``CheckedSource.refuse_damaged``: images are looked at when they are read."""

    def watch(self, report: Callable[[str], None]) -> None:
        """Same as ``CheckedSource.watch``."""
        self._images.watch(report)

    def refuse_unusable(self) -> None:
        """Read a few samples.

        Raises:
            ConfigError: none of their images can be read; targets are not shifted.
        """
        first = np.unique(np.linspace(0, len(self) - 1, LOOKED_AT).astype(np.int64))
        batch = self.read(first)
        looked_at = [document for index in first.tolist() for document in self.documents(index)]
        with_images = sum(bool(document.images) for document in looked_at)
        if with_images and len(unreadable := self._images.unreadable) == with_images:
            raise ConfigError(
                f"{self._config.place}: none of {with_images} conversations that were looked at has images to read; "
                f"{unreadable[0]}"
            )
        refuse_copies(batch["tokens"], batch["targets"])

    def _fingerprint(self, opened: Opened, tokenizer: Tokenizer) -> str:
        digest = hashlib.sha256()
        for document in self._documents:
            for array in (document.tokens, document.learned, document.slots):
                digest.update(array.tobytes())
        digest.update(self._order.tobytes() + self._bounds.tobytes())
        facts = [identity_of(self._config, tokenizer), self._shape.seq_len, opened.identities]
        digest.update(json.dumps(facts).encode())
        return digest.hexdigest()


def _told(opened: Opened) -> Sequence[str]:
    if opened.first_unreadable is None:
        return ()
    n_unreadable, total = opened.counts["unreadable"], opened.counts["conversations"]
    return [f"{n_unreadable} of {total} conversations are left out, as of the first: {opened.first_unreadable}"]
