"""Videos: frames at equal distances, of a folder of images or a file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image

from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.references import PictureFile, Reference

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def frames_of(video: Path, part: Mapping[str, Any], where: str, config: ImageTextConfig) -> Sequence[Reference]:
    """The frames of a video that are read: n of them, at equal distances, the first and the last among them.

    n = clip(round(duration · frames_per_second), min_frames, max_frames), and no more than there are.

    Args:
        video: a folder of images in the order of their names, or a file.
        part: of a message; for a folder, ``fps`` says how many frames a second it has, by default one.

    Returns:
        A single ``BrokenVideo`` for a folder without images, or a file that cannot be read.

    Raises:
        ConfigError: there is no decoder for a file, or ``fps`` is no number above 0.
    """
    if not video.is_dir():
        return _frames_of_file(video, where, config)
    files = sorted(file for file in video.iterdir() if file.suffix.lower() in _ENDINGS)
    if not files:
        return [BrokenVideo(video, "it is a folder without images")]
    rate = part.get("fps", 1.0)
    if not isinstance(rate, (int, float)) or rate <= 0:
        raise ConfigError(f"{where}: 'fps' must be a number above 0, it is {rate!r}")
    chosen = uniform(len(files), n_frames(len(files) / rate, config))
    return [PictureFile(files[index], f"{video.name}/{files[index].name}") for index in chosen]


def n_frames(duration: float, config: ImageTextConfig) -> int:
    """How many frames of a video of so many seconds are read."""
    return int(np.clip(round(duration * config.frames_per_second), config.min_frames, config.max_frames))


def uniform(there: int, wanted: int) -> list[int]:
    """Which of the frames that are there are read, at equal distances, the first and the last among them."""
    return [round(float(place)) for place in np.linspace(0, there - 1, min(there, wanted))]


@attrs.frozen
class BrokenVideo(Reference):
    """A video of which no frame can be read."""

    kind = "video"
    path: Path
    reason: str

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        raise OSError(self.reason)

    def open(self, at_least: Grid | None = None) -> Image.Image:
        raise OSError(self.reason)

    def size(self) -> Grid:
        raise OSError(self.reason)


@attrs.frozen
class VideoFrame(Reference):
    """A frame of a file."""

    path: Path
    index: int
    """Its number, from 0."""

    @property
    def where(self) -> str:
        return f"frame {self.index + 1} of {self.path}"

    @property
    def identity(self) -> str:
        return f"{self.path.name}:{self.path.stat().st_size}:{self.index}"

    def open(self, at_least: Grid | None = None) -> Image.Image:
        av = _decoder(str(self.path))
        try:
            with av.open(str(self.path)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    if number == self.index:
                        image: Image.Image = frame.to_image()
                        return image
        except av.FFmpegError as error:
            raise OSError(str(error)) from error
        raise OSError("the video ends before it")

    def size(self) -> Grid:
        image = self.open()
        return image.height, image.width


def _frames_of_file(video: Path, where: str, config: ImageTextConfig) -> Sequence[Reference]:
    av = _decoder(where)
    try:
        with av.open(str(video)) as container:
            stream = container.streams.video[0]
            there = stream.frames or sum(1 for _ in container.decode(stream))
            rate = float(stream.average_rate or 1)
    except (av.FFmpegError, IndexError, OSError) as error:
        return [BrokenVideo(video, str(error))]
    return [VideoFrame(video, index) for index in uniform(there, n_frames(there / rate, config))]


def _decoder(where: str) -> Any:
    try:
        return importlib.import_module("av")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: a video file needs the package av, which is not installed: "
            'pip install "forge-plugins-vlm[video]"; a folder of frames needs nothing'
        ) from error
