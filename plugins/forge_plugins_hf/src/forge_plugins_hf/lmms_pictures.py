"""The images of lmms-eval's questions, each read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from PIL import Image

from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import AtLeast, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.data.prompts import PromptReader
from forge_plugins_vlm.data.references import DecodedPicture, PlacedPicture, Reference

MOST_KEPT = 2**31
"""Bytes of tiles that a process keeps."""

_Key = tuple[str, str, int]
"""Task, split and number of a question."""


@attrs.frozen(eq=False)
class Pictures:
    """Those of a question."""

    where: str
    """The question, for messages."""
    references: Sequence[Reference]
    """Their sizes; they cannot be decoded again."""
    tiles: Sequence[Processed]


class PictureReader:
    """Reads the images of questions, those of a video being its frames.

    A question is asked for its length, and then for its answer, and has several choices. Its images are decoded and
    preprocessed once, and their tiles kept, until all that are kept have ``MOST_KEPT`` bytes; the images of further
    questions are read again each time, but for the last question's.

    Args:
        data: the data sets of tasks, by task and split.
    """

    def __init__(self, reader: PromptReader, data: Mapping[str, Any]) -> None:
        self._reader, self._data = reader, data
        self._kept: dict[_Key, Pictures] = {}
        self._n_bytes = 0
        self._last: tuple[_Key, Pictures] | None = None
        self._last_row: tuple[_Key, Any] | None = None

    def __call__(self, visual: Any, document: int, task: str, split: str) -> Pictures:
        """The images of a question.

        Args:
            visual: gives them, of a row.

        Raises:
            ConfigError: it has something else; one of them cannot be read.
        """
        key = task, split, document
        if key in self._kept:
            return self._kept[key]
        if self._last is None or self._last[0] != key:
            self._last = key, self._read(visual, document, task, split)
        found = self._last[1]
        if self._n_bytes < MOST_KEPT:
            self._kept[key] = found
            self._n_bytes += sum(one.tiles.nbytes for one in found.tiles)
        return found

    def row(self, document: int, task: str, split: str) -> Any:
        """A row of a data set, which decodes its images. The last one is kept."""
        key = task, split, document
        if self._last_row is None or self._last_row[0] != key:
            self._last_row = key, self._data[task][split][document]
        return self._last_row[1]

    def _read(self, visual: Any, document: int, task: str, split: str) -> Pictures:
        where = f"question {document} of {task}"
        visuals = visual(self.row(document, task, split)) if callable(visual) else []
        pictures: list[Reference] = []
        for one in _flat(visuals or ()):
            if isinstance(one, Image.Image):
                pictures.append(DecodedPicture(f"image {len(pictures) + 1} of {where}", one))
            elif isinstance(one, str | Path):
                if not Path(one).exists():
                    raise ConfigError(f"lmms_eval: {where} has the video {str(one)!r}, and there is no such file")
                pictures += self._reader.frames(Path(one), f"lmms_eval: {where}")
            else:
                raise ConfigError(
                    f"lmms_eval: {where} has a {type(one).__name__} where an image or the path of a video should be"
                )
        if not pictures:
            return Pictures(where, (), ())
        read = self._reader(self._reader.usual_text(len(pictures)), pictures, f"lmms_eval: {where}")
        return Pictures(where, [_Seen(one.where, one.size()) for one in pictures], read.images)


@attrs.frozen(eq=False)
class _Seen(PlacedPicture):
    """An image that was decoded before, and is not kept."""

    shape: Grid

    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        raise OSError("it is not kept")

    def size(self) -> Grid:
        return self.shape


def _flat(visuals: Sequence[Any]) -> Iterator[Any]:
    """Images and videos, those of arrays within one by one."""
    for one in visuals:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        elif one is not None:
            yield one
