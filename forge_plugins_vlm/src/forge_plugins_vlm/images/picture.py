"""Pictures: opened, upright, in RGB, resized, as arrays."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile

from forge_plugins_vlm.contracts.image_processor import AtLeast
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.config import OfSeveralTiles, Resample

_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations of EXIF in which height and width change places."""
_FLIP = Image.Transpose
_UPRIGHT = {
    2: _FLIP.FLIP_LEFT_RIGHT,
    3: _FLIP.ROTATE_180,
    4: _FLIP.FLIP_TOP_BOTTOM,
    5: _FLIP.TRANSPOSE,
    6: _FLIP.ROTATE_270,
    7: _FLIP.TRANSVERSE,
    8: _FLIP.ROTATE_90,
}
"""By orientations. Those of ``ImageOps.exif_transpose``, which also writes down all of EXIF anew, and fails where a
part of it is odd."""
_DAMAGE = (
    *(ValueError, TypeError, SyntaxError, EOFError, LookupError, ArithmeticError, RuntimeError, struct.error),
    Image.DecompressionBombError,
)
"""PIL raises these beside OSError."""
_UNKNOWN = "it is no picture of a known format"
_SIGNATURE = 8
"""Bytes before the first chunk of a PNG."""
_WHITE = (255, 255, 255, 255)
FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def open_picture(content: bytes, at_least: AtLeast | None = None) -> Image.Image:
    """The picture of a file's content, decoded, and upright as its EXIF says.

    Args:
        at_least: by which a JPEG may be decoded at a half, a quarter or an eighth of its size; ``None``: it is not.

    Raises:
        OSError: it is no picture, or damaged, or its pixels are floating-point numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its metadata
            image = Image.open(io.BytesIO(content))
            orientation = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)  # Pillow turns a TIFF
            if at_least is not None and not _drafted(image, at_least, is_turned=orientation in _TURNED):
                image = Image.open(io.BytesIO(content))
            _refuse_floats(image)
            image.load()
            return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
    except UnidentifiedImageError as error:  # of which the message shows an object of Python
        raise OSError(_UNKNOWN) from error
    except _DAMAGE as error:
        raise OSError(str(error)) from error


def _drafted(image: Image.Image, at_least: AtLeast, *, is_turned: bool) -> bool:
    """Have a picture decoded no larger than it has to be. Return whether what it will be is as good."""

    def upright() -> Grid:
        width, height = image.size
        return (width, height) if is_turned else (height, width)

    wanted = at_least(upright())
    if wanted is None:
        return True
    height, width = wanted
    image.draft(None, (height, width) if is_turned else (width, height))
    return at_least(upright()) == wanted


def size_of(source: bytes | Path) -> Grid:
    """Height and width of a picture when it is upright, from the beginning of its file alone.

    Raises:
        OSError: it is no picture, or its pixels are floating-point numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:
                _refuse_floats(image)
                # Pillow decodes a PNG first, as EXIF may stand behind the pixels
                exif = Image.Image.getexif(image) if _ends_with_pixels(image) else image.getexif()
                # of a TIFF, some versions of Pillow have turned the size already
                width, height = (exif[_WIDTH], exif[_HEIGHT]) if image.format == "TIFF" else image.size
                return (width, height) if exif.get(_ORIENTATION, 1) in _TURNED else (height, width)
    except UnidentifiedImageError as error:  # of which the message shows an object of Python
        raise OSError(_UNKNOWN) from error
    except _DAMAGE as error:
        raise OSError(str(error)) from error


def _refuse_floats(image: Image.Image) -> None:
    """A file does not say what is white in it; taken as it is, a picture from 0 to 1 would be black."""
    if image.mode == "F":
        raise OSError("its pixels are floating-point numbers, of unknown range; write it with 8 or 16 bits")


def _ends_with_pixels(image: Image.Image) -> bool:
    """Return whether it is a PNG with nothing behind its pixels."""
    if not isinstance(image, PngImageFile) or image.fp is None:
        return False
    kind = b""
    image.fp.seek(_SIGNATURE)
    while len(head := image.fp.read(8)) == 8:
        before, (length, kind) = kind, struct.unpack(">I4s", head)
        if before == b"IDAT" and kind not in (b"IDAT", b"IEND"):
            break
        image.fp.seek(length + 4, io.SEEK_CUR)  # a sum is behind its content
    return kind in (b"IDAT", b"IEND")


def as_rgb(image: Image.Image) -> Image.Image:
    """In RGB: what is transparent is put on white, and 16 bits become 8."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "I":
        return Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, _WHITE), over).convert("RGB")
    return image.convert("RGB")


def resized(image: Image.Image, size: Grid, resample: Resample) -> Image.Image:
    """A picture of this height and width."""
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), FILTERS[resample])


def resizing(image: Image.Image, config: OfSeveralTiles) -> Callable[[Grid], np.ndarray]:
    """A function from a height and a width to the pixels of the picture ``(3, H, W)`` uint8 in that size.

    Args:
        image: in RGB.
    """
    if config.resampler == "pillow":
        return lambda size: pixels_of(resized(image, size, config.resample))
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # (1, 3, H, W), in memory as Pillow has them
    return lambda size: interpolate(pixels, size, mode=config.resample, antialias=True)[0].contiguous().numpy()


def pixels_of(image: Image.Image) -> np.ndarray:
    """The pixels of a picture in RGB, ``(3, H, W)`` uint8."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def cut_into_tiles(pixels: np.ndarray, tile: int) -> np.ndarray:
    """``(3, R · tile, C · tile)`` to tiles, row by row, ``(R · C, 3, tile, tile)``."""
    _, height, width = pixels.shape
    grid = pixels.reshape(3, height // tile, tile, width // tile, tile)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, 3, tile, tile)
