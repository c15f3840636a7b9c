"""Videos: frames at equal distances, of a folder of images or a file."""

from __future__ import annotations

import importlib
import io
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image

from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import AtLeast
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.references import EncodedPicture, PictureFile, Reference, UnreadableError

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_UNSTAMPED = "its frames have no timestamps; put it into a container that has them, such as Matroska"


def frames_of(
    video: Path | EncodedPicture, part: Mapping[str, Any], where: str, config: ImageTextConfig
) -> Sequence[Reference]:
    """The frames of a video that are read: n of them, at equal distances, the first and the last among them.

    n = clip(round(duration · frames_per_second), min_frames, max_frames), and no more than there are.

    Args:
        video: a folder of images in the order of their names, a file, or what has the bytes of one.
        part: of a message, or a row; for a folder, ``fps`` says how many frames a second it has, by default one.

    Returns:
        A single ``BrokenVideo`` for a folder without images, or a file that cannot be read.

    Raises:
        ConfigError: there is no decoder for a file, or ``fps`` is no number above 0.
    """
    if isinstance(video, EncodedPicture):
        return _frames_of_file(video, where, config)
    try:
        if not video.is_dir():
            return _frames_of_file(PictureFile(video, video.name), where, config)
        files = sorted(file for file in video.iterdir() if file.suffix.lower() in _ENDINGS)
    except OSError as error:  # no file can be called so, or it may not be looked at
        return [BrokenVideo(str(video), _words(error))]
    if not files:
        return [BrokenVideo(str(video), "it is a folder without images")]
    rate = part.get("fps", 1.0)
    if not isinstance(rate, (int, float)) or not rate > 0:  # which NaN is not either
        raise ConfigError(f"{where}: 'fps' must be a number above 0, it is {rate!r}")
    chosen = uniform(len(files), n_frames(len(files) / rate, config))
    return [PictureFile(files[index], f"{video.name}/{files[index].name}") for index in chosen]


def n_frames(duration: float, config: ImageTextConfig) -> int:
    """How many frames of a video of so many seconds are read."""
    wanted = min(duration * config.frames_per_second, config.max_frames)  # a duration may be infinite
    return max(round(wanted), config.min_frames)


def uniform(there: int, wanted: int) -> list[int]:
    """Which of the frames that are there are read, at equal distances, the first and the last among them."""
    return [round(float(place)) for place in np.linspace(0, there - 1, min(there, wanted))]


def open_images(references: Sequence[Reference], at_least: AtLeast | None = None) -> Iterator[Image.Image]:
    """Decode images, in order. Frames of a video that follow each other are decoded together, each part of its file
    once.

    Args:
        at_least: as ``Reference.open`` takes it.

    Raises:
        UnreadableError: one of them cannot be read.
    """
    for file, group in groupby(references, lambda one: one.file if isinstance(one, VideoFrame) else None):
        if file is None:
            yield from (_opened(one, at_least) for one in group)
            continue
        frames = [one for one in group if isinstance(one, VideoFrame)]
        by_time = {frame.until: frame for frame in sorted(frames, key=lambda frame: frame.until)}
        found: dict[int, Image.Image] = {}
        try:
            found.update(decoded(file, [*by_time]))
        except OSError as error:
            failed = next(frame for time, frame in by_time.items() if time not in found)
            raise UnreadableError(failed, error) from error
        yield from (found[frame.until] for frame in frames)


def decoded(file: EncodedPicture, times: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    """The last frame of a file until each of some times, with the time; the first one, if it is later.

    No frame is decoded twice, and none before the keyframe from which the first of a group of times is reached, or
    behind the last of the group and one more.

    Args:
        times: in units of the stream, from the earliest to the latest.

    Raises:
        OSError: it cannot be read.
    """
    av = _decoder(file.where)
    try:
        with av.open(_input(file)) as container:
            begins = [_keyframe(container, time) for time in times]
            if None not in begins:
                for begin, group in groupby(zip(begins, times, strict=True), key=lambda one: one[0]):
                    container.seek(begin, stream=container.streams.video[0])
                    yield from _forward(container, [time for _, time in group])
                return
        with av.open(_input(file)) as container:  # it cannot be entered where it should be
            yield from _forward(container, times)
    except (av.FFmpegError, IndexError) as error:
        raise OSError(_words(error)) from error


@attrs.frozen
class BrokenVideo(Reference):
    """A video of which no frame can be read."""

    kind = "video"
    place: str
    reason: str

    @property
    def where(self) -> str:
        return self.place

    @property
    def identity(self) -> str:
        raise OSError(self.reason)

    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        raise OSError(self.reason)

    def size(self) -> Grid:
        raise OSError(self.reason)


@attrs.frozen
class VideoFrame(Reference):
    """A frame of a file: the last one until a time."""

    kind = "video"
    file: EncodedPicture
    until: int
    """In units of the stream."""
    seconds: float
    """The same, from the beginning of the video."""
    shape: Grid
    """Height and width in pixels."""

    @property
    def where(self) -> str:
        return f"frame at {self.seconds:.2f} s of {self.file.where}"

    @property
    def identity(self) -> str:
        return f"{self.file.identity}:{self.until}"

    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        ((_, image),) = decoded(self.file, [self.until])
        return image

    def size(self) -> Grid:
        return self.shape


def _frames_of_file(video: EncodedPicture, where: str, config: ImageTextConfig) -> Sequence[Reference]:
    av = _decoder(where)
    try:
        with av.open(_input(video)) as container:
            stream = container.streams.video[0]
            rate, unit = float(stream.average_rate or 1), float(stream.time_base)
            first, last, n_packets = _span(container)
            there = stream.frames or n_packets or round((last - first) * unit * rate) + 1
            shape = stream.codec_context.height, stream.codec_context.width
    except (av.FFmpegError, IndexError, OSError, ValueError) as error:
        return [BrokenVideo(video.where, _words(error))]
    times = np.linspace(first, last, min(there, n_frames(there / rate, config)))
    between = 0.5 / (rate * unit)  # half of a frame: the nearest one is meant
    return [VideoFrame(video, math.floor(time + between), (time - first) * unit, shape) for time in times.tolist()]


def _input(video: EncodedPicture) -> str | io.BytesIO:
    """What a decoder opens."""
    return str(video.path) if isinstance(video, PictureFile) else io.BytesIO(video.content())


def _words(error: Exception) -> str:
    """The reason, without the decoder's number for it."""
    return getattr(error, "strerror", None) or str(error)


def _span(container: Any) -> tuple[int, int, int | None]:
    """The times of the first and of the last frame, in units of the stream; and how many frames there are, if all of
    them had to be looked at. None is decoded.

    Raises:
        ValueError: frames have no times.
    """
    stream = container.streams.video[0]
    first = stream.start_time
    if first is not None and container.duration is not None:
        end = (container.start_time or 0) + container.duration  # in microseconds, as a container counts
        container.seek(end, backward=True)
        times = _times(container)
        if times:
            return first, max(times), None
        container.seek(first, stream=stream)
    if not (times := _times(container)):
        raise ValueError(_UNSTAMPED)
    return min(times), max(times), len(times)


def _times(container: Any) -> list[int]:
    """Those of the frames from here on."""
    return [packet.pts for packet in container.demux(container.streams.video[0]) if packet.pts is not None]


def _keyframe(container: Any, time: int) -> int | None:
    """When the last keyframe is until a time; nothing, if the file does not say."""
    stream = container.streams.video[0]
    container.seek(time, stream=stream)
    packet = next(container.demux(stream))
    return packet.pts if packet.is_keyframe and packet.pts is not None and packet.pts <= time else None


def _forward(container: Any, times: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    """Same as ``decoded``, from where the container is."""
    waiting, before = deque(times), None
    for frame in container.decode(container.streams.video[0]):
        if frame.pts is None:
            continue
        while waiting and before is not None and frame.pts > waiting[0]:
            yield waiting.popleft(), before.to_image()
        if not waiting:
            return
        before = frame
    if before is None:
        raise OSError("it has no frame there")
    yield from ((time, before.to_image()) for time in waiting)


def _opened(reference: Reference, at_least: AtLeast | None) -> Image.Image:
    try:
        return reference.open(at_least)
    except OSError as error:
        raise UnreadableError(reference, error) from error


def _decoder(where: str) -> Any:
    try:
        return importlib.import_module("av")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: a video file needs the package av, which is not installed: "
            'pip install "forge-plugins-vlm[video]"; a folder of frames needs nothing'
        ) from error
