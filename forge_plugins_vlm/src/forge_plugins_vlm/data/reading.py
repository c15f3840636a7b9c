"""Images, decoded when they are needed, and what becomes of the ones that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
from PIL import Image

from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import ImageProcessor, Processed
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.document import Document, Placed
from forge_plugins_vlm.data.references import UnreadableError
from forge_plugins_vlm.data.video import open_images


class ImageReader:
    """Reads the images of documents. It is safe from threads.

    Args:
        told: sentences for whoever watches.
    """

    def __init__(self, config: ImageTextConfig, processor: ImageProcessor, told: Sequence[str]) -> None:
        self._config = config
        self._processor = processor
        self._lock = Lock()
        self._waiting = [*told]
        self._report: Callable[[str], None] | None = None
        self._unreadable: dict[str, str] = {}

    @property
    def unreadable(self) -> Sequence[str]:
        """A sentence for each document whose images could not be read so far."""
        with self._lock:
            return [*self._unreadable.values()]

    def __call__(self, document: Document) -> tuple[Document, Sequence[Processed]]:
        """A document with its images; one that cannot be read has no targets, and blank tiles.

        Raises:
            ConfigError: an image cannot be read, if those are refused; or it is another one than when the data were
                opened.
        """
        try:
            at_least = self._config.processor_config.at_least
            pictures = open_images([image.reference for image in document.images], at_least)
            return document, [self._processed(*one, document) for one in zip(document.images, pictures, strict=True)]
        except UnreadableError as error:
            sentence = f"{document.where}: {error}"
            if self._config.on_error == "refuse":
                raise ConfigError(f'{sentence}; mend or remove it, or set on_error = "skip"') from error
            self.tell(document.where, sentence, "it has no targets")
            return document.unlearned(), [self._blank(image) for image in document.images]

    def watch(self, report: Callable[[str], None]) -> None:
        """From now on, ``report`` is told of each document whose images cannot be read."""
        with self._lock:
            self._report, waiting, self._waiting = report, self._waiting, []
        for sentence in waiting:
            report(sentence)

    def _processed(self, image: Placed, picture: Image.Image, document: Document) -> Processed:
        found = self._processor(picture, self._config.token_grid)
        if len(found.tiles) != image.layout.n_tiles or not np.array_equal(found.slots, image.layout.slots):
            raise ConfigError(
                f"{document.where}: the image {image.reference.where} has {len(found.slots)} tokens in "
                f"{len(found.tiles)} tiles, and had {len(image.layout.slots)} in {image.layout.n_tiles} when the data "
                "were opened; files must not change while a run reads them"
            )
        return found

    def _blank(self, image: Placed) -> Processed:
        n_tiles, size = image.layout.n_tiles, self._config.processor_config.tile_size
        sizes = np.tile(np.array(size), (n_tiles, 1)) if self._config.processor_config.pads else None
        return Processed(np.zeros((n_tiles, 3, *size), dtype=np.uint8), image.layout.slots, sizes)

    def tell(self, key: str, sentence: str, outcome: str) -> None:
        """Tell whoever watches of a document with images that cannot be read, once.

        Args:
            key: tells the document from others.
            outcome: what becomes of it.
        """
        with self._lock:
            if key in self._unreadable:
                return
            self._unreadable[key] = sentence
            said = f"{sentence}; {outcome}, the {len(self._unreadable)}. such of this process"
            report = self._report
            if report is None:
                self._waiting.append(said)
        if report is not None:
            report(said)
