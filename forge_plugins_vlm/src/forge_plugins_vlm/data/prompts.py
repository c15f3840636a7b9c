"""Prompts with images, as a model that was trained on ``image_text`` reads them.

Shapes: B = prompts, S = tokens of the longest, N = the most tiles of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.chat import clock, template_of
from forge_plugins_vlm.contracts.image_processor import ImageProcessor, Processed
from forge_plugins_vlm.data.collation import collate
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.document import TEXT, Document, forbidden_ids
from forge_plugins_vlm.data.reading import ImageReader
from forge_plugins_vlm.data.references import Reference, UnreadableError
from forge_plugins_vlm.data.source import answer_end_of, encoder_of, shape_of
from forge_plugins_vlm.data.video import frames_of
from forge_plugins_vlm.data.writing import Written


@attrs.frozen(eq=False)
class Prompt:
    """A text with its images, tokenised."""

    text: str
    document: Document
    images: Sequence[Processed]

    @property
    def tokens(self) -> list[int]:
        """Token ids, those at positions of images included."""
        ids: list[int] = self.document.tokens.tolist()
        return ids


class PromptReader:
    """Makes prompts of texts and images, by the keys of the data that a model was trained on.

    Attributes:
        tokenizer: the data's.
        answer_end: where what follows a prompt ends.
    """

    def __init__(self, config: ImageTextConfig, tokenizer: Tokenizer, processor: ImageProcessor) -> None:
        self._config, self.tokenizer, self._processor = config, tokenizer, processor
        self.answer_end = answer_end_of(config, tokenizer)
        self._encode = encoder_of(config, tokenizer)
        self._read = ImageReader(attrs.evolve(config, on_error="refuse"), processor, ())

    @property
    def forbidden(self) -> list[int]:
        """Token ids that stand for images alone."""
        return forbidden_ids(self.tokenizer, self._config.placeholder)

    def usual_text(self, n_images: int) -> str:
        """The prompt of so many images and no words."""
        return self.asked("", n_images)

    def asked(self, question: str, n_images: int) -> str:
        """The prompt of a question behind so many images."""
        said = self._config.placeholder * n_images + question
        if self._config.chat_template:
            return said
        return self._config.prompt_template.removesuffix("{answer}").replace("{prompt}", said)

    def __call__(self, text: str, images: Sequence[Reference], where: str) -> Prompt:
        """Read one.

        Args:
            text: with a placeholder for each image. With a chat template it is the user's turn.
            where: names it in messages.

        Raises:
            ConfigError: placeholders and images differ in number; an image cannot be read; it is empty.
        """
        document, tiles = self._read(self.document(text, images, where))
        return Prompt(text, document, tiles)

    def frames(self, video: Path, where: str) -> Sequence[Reference]:
        """The frames of a video, a file or a folder of images, that a model sees of it, as the data's keys have it."""
        return frames_of(video, {}, where, self._config)

    def document(self, text: str, images: Sequence[Reference], where: str) -> Document:
        """What a prompt is as tokens; images are not decoded. Arguments and errors are those of a call.

        Raises:
            ConfigError: as a call.
        """
        if not text:
            raise ConfigError(f"{where} is empty; give it at least one character")
        written = self._in_a_turn(text) if self._config.chat_template else text
        placed = []
        for image in images:
            try:
                size = image.size()
            except OSError as error:
                raise ConfigError(f"{where}: {UnreadableError(image, error)}") from error
            placed.append((image, self._processor.layout(size, self._config.token_grid)))
        return self._encode(Written(written, ()), placed, where, is_prompt=True)

    def entries(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """The entries of a batch beside tokens: text is padded on the left, tiles with zeros behind.

        Returns:
            ``pixels`` ``(B, N, 3, H, W)`` uint8, ``image_slots`` ``(B, S)``, ``image_range`` ``(B, S, 3)`` and, where
            tiles are padded, ``tile_sizes`` ``(B, N, 2)``.
        """
        size, width = len(prompts), max(len(one.tokens) for one in prompts)
        n_tiles = max(1, *(one.document.n_tiles for one in prompts))
        shape = self._config.processor_config.tile_size
        pixels = np.zeros((size, n_tiles, 3, *shape), np.uint8)
        sizes = np.zeros((size, n_tiles, 2), np.int64)
        slots, bounds = np.full((size, width), TEXT, np.int64), np.zeros((size, width, 3), np.int64)
        for row, prompt in enumerate(prompts):
            start, tile = width - len(prompt.tokens), 0
            slots[row, start:], bounds[row, start:] = prompt.document.slots, prompt.document.ranges()
            for image in prompt.images:
                these = slice(tile, tile + len(image.tiles))
                pixels[row, these] = image.tiles
                if image.sizes is not None:
                    sizes[row, these] = image.sizes
                tile += len(image.tiles)
        entries = {"pixels": pixels, "image_slots": slots, "image_range": bounds}
        if self._config.processor_config.pads:
            entries["tile_sizes"] = sizes
        return {name: torch.from_numpy(entry) for name, entry in entries.items()}

    def collated(self, prompts: Sequence[Prompt], seq_len: int) -> dict[str, np.ndarray]:
        """Prompts as a batch of training has them: text is padded on the right, to a length."""
        shape = attrs.evolve(shape_of(self._config, self.tokenizer, seq_len), packed=False)
        return collate([[(one.document, one.images)] for one in prompts], shape)

    def _in_a_turn(self, text: str) -> str:
        template = template_of(self._config, self.tokenizer)
        said = [{"role": "user", "content": text}]
        return template.render(said, add_generation_prompt=True, now=clock(self._config.date)).text
