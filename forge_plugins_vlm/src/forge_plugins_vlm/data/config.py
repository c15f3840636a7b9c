"""The keys of images among text. Nothing here may import PIL or torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt, min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.batch import Entry
from forge_core.errors import ConfigError
from forge_plugins_data.answers_config import AnswersConfig, is_date
from forge_plugins_data.config import missing_paths
from forge_plugins_data.dataset_config import not_empty
from forge_plugins_vlm.contracts.entries import ENTRIES
from forge_plugins_vlm.contracts.image_processor import ImageProcessorConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid

Format = Literal["captions", "interleaved", "llava", "messages", "turns", "webvid"]
OnError = Literal["refuse", "skip"]

PLAIN = "{prompt} {answer}"
"""The prompt template unless another is asked for."""
_MOST_FILES = 10**6
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expanded(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    """Paths with their braces written out: ``a-{000..002}.tar`` is three.

    Raises:
        ConfigError: they are more files than any data set has.
    """
    found: list[str] = []
    for path in (paths,) if isinstance(paths, str) else paths:
        if match := _BRACES.search(path):
            first, last = match.groups()
            if len(found) + int(last) - int(first) >= _MOST_FILES:
                raise ConfigError(f"path: {path!r} would be more than {_MOST_FILES:,} files")
            numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
            found += expanded(tuple(path[: match.start()] + one + path[match.end() :] for one in numbers))
        else:
            found.append(path)
    return tuple(found)


def _of_captions(config: ImageTextConfig, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value != attribute.default and config.format != "captions":
        raise ValueError(f'is about format = "captions", and has no effect with {config.format!r}; remove it')


def _of_files(config: ImageTextConfig, _: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and config.dataset is not None:
        raise ValueError("is where the pictures of files are, and has no effect beside dataset; remove it")


def _template(config: ImageTextConfig, _: attrs.Attribute[Any], value: str) -> None:
    if value.count("{prompt}") != 1 or value.count("{answer}") != 1 or not value.endswith("{answer}"):
        raise ValueError(
            f'must have one "{{prompt}}" and end with its one "{{answer}}", as {PLAIN!r} has; it is {value!r}'
        )
    if config.placeholder and config.placeholder in value:
        raise ValueError(
            f"has the placeholder {config.placeholder!r}, which stands for images of the prompt; remove it"
        )
    if config.chat_template and value != PLAIN:
        raise ValueError("has no effect with chat_template = true; remove one of the two")


def _of_chats(config: ImageTextConfig, _: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and not config.chat_template:
        raise ValueError("is for templates that write down today's, and has no effect without chat_template = true")


def from_one(_: object, attribute: attrs.Attribute[Any], value: Grid) -> None:
    """Validate a grid of at least one row and column.

    Raises:
        ValueError: it has none.
    """
    if min(value) < 1:
        raise ValueError(f"'{attribute.name}' must be rows and columns from 1 on, it is {list(value)}")


def _in_order(config: ImageTextConfig, _: attrs.Attribute[Any], value: int) -> None:
    if value < config.min_frames:
        raise ValueError(f"must be at least min_frames = {config.min_frames}, it is {value}")


@attrs.frozen(kw_only=True)
class ImageTextConfig(AnswersConfig):
    """Images and videos among text, of which the answers are learned, from files or a data set of ``datasets``.

    Text is tokenised in memory by every process when it starts; images are decoded when they are read, by ``workers``
    threads. An image has as many positions as it has tokens, all without targets; prompts have none either.
    ``validation`` holds out lines, rows or members, chosen by a hash of the file's relative path and their number.
    """

    path: str | tuple[str, ...] | None = attrs.field(default=None, validator=optional(not_empty))
    """A folder, a file or a glob (``**`` crosses folders), or an array of them: ``.json``, ``.jsonl`` (also ``.gz`` and
    ``.zst``), ``.csv``, ``.parquet`` with the bytes of images, ``.tar`` as WebDataset has them (``{000..009}`` stands
    for ten), and, for captions, images with a ``.txt`` of the same name. Relative to the working directory; ``~`` is
    the home directory."""
    pattern: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which files to take from a folder, by default those with endings that ``path`` has listed, and images where there
    are no others; ``**`` crosses folders."""
    format: Format = "messages"
    """What a line, a row or a member has: ``captions`` an image and a text; ``llava`` conversations of LLaVA;
    ``messages`` roles with texts, images and videos; ``turns`` arrays of images and of questions with answers (The
    Cauldron, FineVision); ``interleaved`` arrays of images and of texts, either of them null (OBELICS); ``webvid`` a
    ``videoid`` and, as ``name``, its caption (WebVid-10M)."""
    max_rows: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """Read so many lines, rows or members, the first ones, and no more; by default all."""
    images: str | None = attrs.field(default=None, validator=[optional(min_len(1)), _of_files])
    """The folder that names of images and videos are relative to, by default that of the file that has them."""
    image_field: str = attrs.field(default="image", validator=[min_len(1), _of_captions])
    """Of captions: the key or column of the image."""
    video_field: str | None = attrs.field(default=None, validator=[optional(min_len(1)), _of_captions])
    """Of captions: the key or column of a video, behind the image if a row has both."""
    caption_field: str = attrs.field(default="caption", validator=[min_len(1), _of_captions])
    """Of captions: the key or column of the text."""
    prompt_field: str | None = attrs.field(default=None, validator=[optional(min_len(1)), _of_captions])
    """Of captions: the key or column of what is asked, such as ``question``, which stands behind the image in
    ``{prompt}`` of ``prompt_template``, and is not learned."""
    processor: Annotated[ComponentRef, Slot("image_processor", default="square")]
    """What makes tiles of images. Its tiles are the ones that the model's encoder takes."""
    token_grid: Grid = attrs.field(validator=from_one)
    """Rows and columns of the tokens that the model's connector gives for a tile."""
    one_token_an_image: bool = False
    """An image is a single token of the text, as cross-attention has it, and not one for each of its own."""
    placeholder: str = attrs.field(default="<image>", validator=min_len(1))
    """The token at the positions of images: the tokenizer's, if it has it, and else its end of document. No text may
    have it."""
    max_images: int = attrs.field(default=8, validator=ge(1))
    """The most images of a sample, a frame of a video being one. ``too_long`` says what becomes of others."""
    on_error: OnError = "refuse"
    """What to do with what has an image or a video that cannot be read: ``refuse`` it with an error, or ``skip`` it,
    and tell how many there are. What is found when it is read keeps its place, without targets."""
    prompt_template: str = attrs.field(default=PLAIN, validator=_template)
    """How a prompt and its answer are written, an end of document behind them. An answer without a prompt stands
    alone."""
    chat_template: bool = False
    """Write conversations by the tokenizer's chat template, which is given images as placeholders."""
    date: str | None = attrs.field(default=None, validator=[optional(is_date), _of_chats])
    """The day, as in ``2026-01-31``, for a chat template that writes down today's. Without it, such one is refused."""
    packing: bool = False
    """Put several conversations into a sample, by best fit, up to ``max_images``; attention does not cross, and a
    conversation sees its own images alone. Otherwise each is a sample, and padding follows."""
    frames_per_second: float = attrs.field(default=1.0, validator=gt(0.0))
    """Frames that are taken of videos, at equal distances, the first and the last among them."""
    min_frames: int = attrs.field(default=1, validator=ge(1))
    """The fewest frames of a video, if it has them."""
    max_frames: int = attrs.field(default=8, validator=[ge(1), _in_order])
    """The most frames of a video."""

    @property
    def document_mask(self) -> bool:
        """With packing, conversations of a sample are kept apart."""
        return self.packing

    @property
    def processor_config(self) -> ImageProcessorConfig:
        """That of ``processor``."""
        config: ImageProcessorConfig = self.processor.config
        return config

    def missing(self) -> Iterable[str]:
        """Paths that are not there, or what the data set needs."""
        if self.dataset is not None:
            yield from self.dataset.missing()
        if self.path is not None:
            yield from missing_paths(expanded(self.path))
        if self.images is not None:
            yield from missing_paths(self.images)

    def entries(self) -> Mapping[str, Entry]:
        """With as many tiles as ``max_images`` may have."""
        return entries_of(self.processor_config, self.processor_config.most_tiles * self.max_images)


def entries_of(processor: ImageProcessorConfig, n_tiles: int | None) -> Mapping[str, Entry]:
    """The entries of batches.

    Args:
        n_tiles: of a sample, if that is known.
    """
    sizes = {"pixels": (None, n_tiles, 3, *processor.tile_size), "tile_sizes": (None, n_tiles, 2)}
    return {
        name: attrs.evolve(entry, sizes=sizes.get(name, (None, None, 3)[: len(entry.dims)]))
        for name, entry in ENTRIES.items()
        if name != "tile_sizes" or processor.pads
    }
