"""The data source ``image_text_streaming``: images among text of a data set, read from its beginning on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers import tokenizer_of
from forge_plugins_data.hub_dataset import load_streams, local_files
from forge_plugins_data.streamed_rows import BlockPlace, StreamedRows, epochs
from forge_plugins_vlm.contracts.image_processor import ImageProcessor
from forge_plugins_vlm.data.collation import collate
from forge_plugins_vlm.data.config import entries_of
from forge_plugins_vlm.data.document import Document, forbidden_ids
from forge_plugins_vlm.data.documents import DocumentMaker, sentence_or_refusal
from forge_plugins_vlm.data.formats import sample_of
from forge_plugins_vlm.data.guard import refuse_copies
from forge_plugins_vlm.data.packing import one_each, pack
from forge_plugins_vlm.data.reading import ImageReader
from forge_plugins_vlm.data.references import PictureInMemory, UnreadableError
from forge_plugins_vlm.data.rows import Row
from forge_plugins_vlm.data.source import LOOKED_AT, encoder_of, identity_of, shape_of
from forge_plugins_vlm.data.streaming_config import ImageTextStreamingConfig
from forge_plugins_vlm.data.writing import writer

if TYPE_CHECKING:
    from datasets import IterableDataset  # type: ignore[import-untyped]  # it has no types


def open_image_text_streaming(
    config: ImageTextStreamingConfig, /, *, seq_len: int, split: Split, build: Builder, seed: int, **_: object
) -> ImageTextStreams:
    """Open a data set, and read its first samples.

    Raises:
        ConfigError: the data set cannot be loaded; it is to be evaluated; in the first samples of a stream, what
            ``open_image_text`` refuses.
    """
    if split != "train":
        raise ConfigError("'image_text_streaming' holds nothing out and has no end; name other data under [eval.data]")
    assert config.dataset is not None, "the configuration has it"
    dataset: Any = load_streams(config.dataset, config.streams)
    tokenizer, processor = tokenizer_of(config, build), build(config.processor)
    source = ImageTextStreams(config, dataset.decode(False), tokenizer, processor, seq_len=seq_len, seed=seed)
    source.refuse_unusable()
    return source


@attrs.frozen
class _Place(BlockPlace):
    """Where a sample begins."""

    sample: int = 0
    """Number in the block, after it was packed and shuffled."""


class ImageTextStreams:
    """The ``StreamedSource``.

    The rows of a block are shuffled, made into documents, put into samples as those of ``ImageText`` are, and these
    shuffled again, as packing puts the longest first.

    Attributes:
        forbidden: token ids that stand for images alone, which no answer has.
    """

    def __init__(
        self,
        config: ImageTextStreamingConfig,
        dataset: IterableDataset,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        *,
        seq_len: int,
        seed: int,
    ) -> None:
        self.vocab_size, self.n_streams = tokenizer.vocab_size, config.streams
        self.tokenizer: Tokenizer | None = tokenizer
        self.forbidden = forbidden_ids(tokenizer, config.placeholder)
        self._config, self._seq_len = config, seq_len
        self._shape = shape_of(config, tokenizer, seq_len)
        self._make = DocumentMaker(config, seq_len, writer(config, tokenizer), encoder_of(config, tokenizer), processor)
        self._images = ImageReader(config, processor, ())
        order = f"forge.image_text_streaming/{seed}"
        self._rows = StreamedRows(dataset, config.streams, config.shuffle_buffer, order)
        self.fingerprint = _fingerprint(config, dataset.num_shards, tokenizer, seq_len)

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return entries_of(self._config.processor_config, None)

    def open(
        self, stream: int, state: Mapping[str, Any] | None
    ) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Same as ``StreamedSource.open``. A conversation whose images cannot be read, if such are skipped, is left
        out, or keeps its place without targets and with blank tiles, if its tokens did not depend on them.

        Raises:
            ConfigError: an epoch has not a single sample; what ``open_image_text`` refuses of a row.
        """
        place = _Place() if state is None else _Place(**state)
        nothing = (
            f"data: {self._words} has nothing to learn in stream {stream} of {self.n_streams} (from 0); use fewer "
            "streams, or more data"
        )
        return epochs(partial(self._samples, stream), place, nothing)

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
        samples = [sample for sample, _ in islice(self.open(0, None), LOOKED_AT)]
        tokens, targets = (np.stack([sample[name] for sample in samples]) for name in ("tokens", "targets"))
        unreadable = self._images.unreadable
        if unreadable and not (targets != IGNORED).any():
            raise ConfigError(f"{self._words}: none of the first samples has images to read; {unreadable[0]}")
        refuse_copies(tokens, targets)

    def _samples(self, stream: int, place: _Place) -> Iterator[tuple[dict[str, np.ndarray], _Place]]:
        """Those of an epoch from ``place`` on, each with the place after it."""
        config = self._config
        for start, block in self._rows.blocks(stream, attrs.evolve(place, sample=0)):
            documents = self._documents(stream, block)
            packed = pack(documents, self._seq_len, config.max_images) if config.packing else one_each(documents)
            own = [packed[0][first:stop].tolist() for first, stop in zip(packed[1], packed[1][1:], strict=False)]
            first = place.sample if start.block == place.block else 0
            for number, index in [*enumerate(self._rows.order(len(own), stream, start), 1)][first:]:
                row = [self._images(documents[one]) for one in own[index]]
                batch = collate([row], self._shape)
                yield {name: values[0] for name, values in batch.items()}, attrs.evolve(start, sample=number)

    def _documents(self, stream: int, block: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Document]:
        """Those of the rows of a block, without what is skipped."""
        found = []
        for number, record in block:
            where = f"{self._words}, stream {stream}, row {number} (from 0)"
            sample = sample_of(Row(_with_pictures(record, where), where, where, Path), self._config)
            try:
                document = self._make(sample)
            except UnreadableError as error:
                self._images.tell(where, sentence_or_refusal(sample, error, self._config), "it is left out")
                continue
            if document is not None:
                found.append(document)
        return found

    @property
    def _words(self) -> str:
        assert self._config.dataset is not None, "the configuration has it"
        return self._config.dataset.words


def _with_pictures(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row whose cells of images, or arrays of them, are references."""
    return {name: _referred(value, f"{where}, column {name}") for name, value in record.items()}


def _referred(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_referred(one, f"{place}, image {number}") for number, one in enumerate(value, 1)]
    is_image = isinstance(value, bytes) or (isinstance(value, dict) and value.keys() == {"bytes", "path"})
    return PictureInMemory(value, place) if is_image else value


_DECIDING = (
    *("format", "image_field", "caption_field", "placeholder", "max_images", "too_long", "prompt_template"),
    *("chat_template", "date", "frames_per_second", "min_frames", "max_frames"),
)
"""Keys that decide what samples there are. ``on_error`` is not among them: a run that met an image that cannot be read
may go on without it."""
_DECIDING_IF_SET = ("prompt_field", "video_field")
"""The same, of later versions: runs without them go on."""


def _fingerprint(config: ImageTextStreamingConfig, n_files: int, tokenizer: Tokenizer, seq_len: int) -> str:
    dataset = config.dataset
    assert dataset is not None, "the configuration has it"
    keys: list[Any] = [dataset.subset, dataset.split, dataset.revision, dataset.data_files]
    dealt = [config.streams, config.shuffle_buffer, n_files]
    keys += [getattr(config, name) for name in _DECIDING]
    keys += [[name, value] for name in _DECIDING_IF_SET if (value := getattr(config, name)) is not None]
    facts = [local_files(dataset) or dataset.path, keys, dealt, seq_len, identity_of(config, tokenizer)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
