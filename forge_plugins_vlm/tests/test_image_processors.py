"""Image processors: pictures become tiles and tokens as transformers has them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, features
from transformers.image_processing_utils import select_best_resolution
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from forge_plugins_vlm.contracts.image_processor import NEWLINE
from forge_plugins_vlm.images.anyres import Anyres
from forge_plugins_vlm.images.best_grid import best_resolution
from forge_plugins_vlm.images.config import AnyresConfig, NaflexConfig, SquareConfig, TilesConfig
from forge_plugins_vlm.images.naflex import Naflex
from forge_plugins_vlm.images.patched_size import patched_size
from forge_plugins_vlm.images.picture import as_rgb, open_picture, size_of
from forge_plugins_vlm.images.square import Square
from forge_plugins_vlm.images.tiles import Tiles

SIZES = [(32, 32), (48, 20), (20, 48), (100, 37), (7, 90), (33, 31), (640, 480)]
ALL = [
    Square(SquareConfig(size=16)),
    Square(SquareConfig(size=16, fit="crop")),
    Square(SquareConfig(size=16, fit="pad")),
    Anyres(AnyresConfig(size=16)),
    Tiles(TilesConfig(size=16, longest=3)),
    Naflex(NaflexConfig(size=64, patch=4, max_patches=40)),
]


def noise(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def smooth(height, width):
    """A picture as photographs are, without a pixel that is unlike all around it."""
    return noise(max(1, height // 16), max(1, width // 16)).resize((width, height), Image.Resampling.BICUBIC)


def written(image, form="PNG", **keys):
    stream = io.BytesIO()
    image.save(stream, form, **keys)
    return stream.getvalue()


@pytest.mark.parametrize("processor", ALL, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("size", SIZES)
def test_the_layout_is_known_from_the_size_alone(processor, size):
    layout, found = processor.layout(size, (2, 3)), processor(noise(*size), (2, 3))

    assert layout.n_tiles == len(found.tiles) <= processor._config.most_tiles
    assert found.tiles.shape[1:] == (3, *processor._config.tile_size)
    assert found.tiles.dtype == np.uint8
    assert np.array_equal(layout.slots, found.slots)
    assert ((found.slots >= NEWLINE) & (found.slots < layout.n_tiles * 6)).all()
    assert (found.sizes is not None) == processor._config.pads


def test_a_square_is_stretched_cropped_or_padded():
    image = Image.new("RGB", (8, 4), (255, 0, 0))
    image.paste((0, 0, 255), (2, 0, 6, 4))

    stretched, cropped, padded = (
        Square(SquareConfig(size=8, fit=fit))(image, (1, 1)).tiles[0].transpose(1, 2, 0)
        for fit in ("stretch", "crop", "pad")
    )

    expected = np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC))
    assert np.array_equal(stretched, expected)
    assert (cropped[:, 1:7, 2] > 200).all()
    assert (padded[:2] == 127).all()
    assert (padded[6:] == 127).all()
    assert np.array_equal(padded[2:6], np.asarray(image))


@pytest.mark.parametrize("size", [*SIZES, (5, 9)])
@pytest.mark.parametrize("resample", ["bicubic", "lanczos"])
def test_a_padded_square_is_that_of_pillow(size, resample):
    image, method = noise(*size), Image.Resampling[resample.upper()]
    expected = ImageOps.pad(image, (16, 16), method, color=(127, 127, 127))

    found = Square(SquareConfig(size=16, fit="pad", resample=resample))(image, (1, 1)).tiles[0]

    assert np.array_equal(found.transpose(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize("size", [(1, 200), (200, 1)])
def test_a_line_is_still_there_in_a_padded_square(size):
    """It was rounded to no pixels: a grey tile, of which its answers were learned."""
    line = Image.new("RGB", size, (255, 0, 0))

    found = Square(SquareConfig(size=16, fit="pad"))(line, (1, 1)).tiles[0]

    assert (found.transpose(1, 2, 0) == (255, 0, 0)).all(-1).sum() == 16


@pytest.mark.parametrize("size", SIZES)
def test_anyres_has_the_tiles_of_transformers(size):
    grids = AnyresConfig(size=16).grids
    theirs = LlavaNextImageProcessorPil(
        size={"height": 16, "width": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[rows * 16, columns * 16] for rows, columns in grids],
        do_normalize=False,
        do_rescale=False,
    )
    expected = theirs([noise(*size)], return_tensors="np")["pixel_values"][0]

    found = Anyres(AnyresConfig(size=16))(noise(*size), (2, 2)).tiles

    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
def test_anyres_has_the_order_of_tokens_of_transformers(size):
    grids, high, wide = AnyresConfig(size=16).grids, 4, 4
    rows, columns = select_best_resolution(size, [(16 * one, 16 * other) for one, other in grids])
    rows, columns = rows // 16, columns // 16
    # as LlavaNextModel.pack_image_features, with a feature that is its own number
    features = torch.arange((1 + rows * columns) * 16).reshape(1 + rows * columns, 16, 1)
    tiles = features[1:].view(rows, columns, high, wide, 1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
    tiles = unpad_image(tiles, size)
    ended = torch.cat((tiles, torch.full((1, tiles.shape[1], 1), NEWLINE)), dim=-1)
    expected = torch.cat((features[0, :, 0], ended.flatten()))

    assert Anyres(AnyresConfig(size=16)).layout(size, (high, wide)).slots.tolist() == expected.tolist()


def test_the_best_resolution_is_that_of_transformers():
    rng = np.random.default_rng(0)
    resolutions = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
    for size in rng.integers(10, 2000, (500, 2)).tolist():
        assert best_resolution(size, resolutions) == select_best_resolution(size, resolutions)


def test_tiles_stand_row_by_row_with_the_whole_behind_them():
    image = noise(40, 60)

    found = Tiles(TilesConfig(size=16, longest=4))(image, (1, 1))

    whole = np.asarray(image.resize((64, 48), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert found.slots.tolist() == [0, 1, 2, 3, NEWLINE, 4, 5, 6, 7, NEWLINE, 8, 9, 10, 11, NEWLINE, 12]
    assert np.array_equal(found.tiles[5], whole[:, 16:32, 16:32])
    assert np.array_equal(
        found.tiles[12], np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    )


def test_tiles_that_fill_their_grid_are_those_of_idefics():
    image = noise(32, 64)
    theirs = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 16}, do_normalize=False, do_rescale=False, resample=3
    )
    expected = theirs([[image]], return_tensors="np")["pixel_values"][0]

    found = Tiles(TilesConfig(size=16))(image, (1, 1)).tiles

    assert np.array_equal(found, expected)


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("kind", "config"), [(Anyres, AnyresConfig), (Tiles, TilesConfig)])
@pytest.mark.parametrize("size", SIZES)
def test_torch_resizes_as_pillow_does_but_for_its_rounding(kind, config, size, resample):
    image = smooth(*size)  # of noise they cut off other overshoots, as torch may resize height before width

    pillows, torchs = (
        kind(config(size=32, resample=resample, resampler=one))(image, (2, 2)) for one in ("pillow", "torch")
    )

    assert np.array_equal(torchs.slots, pillows.slots)
    apart = np.abs(torchs.tiles.astype(int) - pillows.tiles)
    assert apart.max() <= 2
    assert (apart > 0).mean() < 0.05


def test_torch_is_asked_to_resize():
    tiles = [Tiles(TilesConfig(size=224, resampler=one))(noise(480, 640), (2, 2)).tiles for one in ("pillow", "torch")]

    assert not np.array_equal(*tiles)


def test_naflex_has_the_sizes_of_transformers():
    rng = np.random.default_rng(0)
    for size in rng.integers(10, 2000, (200, 2)).tolist():
        height, width = patched_size(size, 16, 256, 10**6)
        assert (height, width) == get_image_size_for_max_num_patches(*size, 16, 256)
        assert (height // 16) * (width // 16) <= 256


def test_naflex_puts_the_picture_at_the_upper_left_and_gives_tokens_to_it_alone():
    found = Naflex(NaflexConfig(size=64, patch=8, max_patches=32))(noise(50, 100), (8, 8))

    ((height, width),) = found.sizes.tolist()
    assert (height, width) == (32, 64)
    assert (found.tiles[0, :, height:] == 0).all()
    assert found.slots.tolist() == list(range(32))


def test_a_long_picture_does_not_leave_the_tile():
    height, width = patched_size((10, 1000), 8, 32, 64)

    assert width == 64
    assert height == 8


def test_what_is_transparent_is_white():
    alpha = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    alpha.putpixel((1, 0), (255, 0, 0, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 8, 7, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    palette.info["transparency"] = 1

    colour = Image.new("RGB", (2, 1), (255, 0, 0))
    colour.putpixel((1, 0), (1, 2, 3))
    of_file = open_picture(written(colour, transparency=(1, 2, 3)))

    assert np.asarray(as_rgb(alpha)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert np.asarray(as_rgb(of_file)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert np.asarray(as_rgb(palette)).tolist() == [[[9, 8, 7], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I"])
def test_every_mode_becomes_rgb(mode):
    image = Image.fromarray(np.full((3, 4), 40_000, np.uint16)) if mode == "I;16" else Image.new(mode, (4, 3))

    assert as_rgb(image).mode == "RGB"
    if mode == "I;16":
        assert np.asarray(as_rgb(image))[0, 0].tolist() == [40_000 >> 8] * 3


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(tmp_path, orientation, form):
    """A TIFF was turned twice: Pillow does it when it decodes one."""
    image, path = noise(8, 16), tmp_path / "a"
    exif = Image.Exif()
    exif[0x0112] = orientation
    path.write_bytes(content := written(image, form, exif=exif))
    by_png = Image.open(io.BytesIO(written(image, "PNG", exif=exif)))

    found = open_picture(content)

    assert (found.height, found.width) == size_of(content) == ((8, 16) if orientation < 5 else (16, 8))
    assert size_of(path) == size_of(content)
    assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(by_png)))


def test_a_jpeg_is_decoded_no_smaller_than_asked_for():
    content = written(noise(480, 640), "JPEG")

    assert open_picture(content).size == (640, 480)
    assert open_picture(content, lambda _: (200, 200)).size == (320, 240)
    assert open_picture(content, lambda _: (300, 300)).size == (640, 480)
    assert open_picture(content, lambda _: None).size == (640, 480)
    assert open_picture(content, lambda size: (100, size[1] // 8)).size == (640, 480)  # of a quarter it wants less


@pytest.mark.parametrize(("size", "opened"), [((300, 400), (150, 200)), ((1000, 128), (250, 32)), ((90, 70), (90, 70))])
def test_a_jpeg_for_tiles_becomes_what_all_of_it_would(size, opened):
    content, config = written(smooth(*size), "JPEG", quality=95), TilesConfig(size=32, longest=4)
    whole = Tiles(config)(open_picture(content), (2, 2))

    smaller = open_picture(content, config.at_least)
    found = Tiles(config)(smaller, (2, 2))

    assert (smaller.height, smaller.width) == opened
    assert np.array_equal(found.slots, whole.slots)
    assert np.abs(found.tiles.astype(int) - whole.tiles).mean() < 1


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("size", "opened"),
    [
        ((300, 400), (75, 100)),
        ((1200, 1600), (150, 200)),  # an eighth, which is as much as a JPEG gives
        ((302, 400), (151, 200)),  # a quarter of it is no whole number of pixels
        ((301, 400), (301, 400)),
        ((1024, 128), (256, 32)),  # of an eighth, the whole would have no 32 pixels on a side
        ((90, 70), (90, 70)),
    ],
)
def test_a_jpeg_for_anyres_becomes_what_all_of_it_would(size, opened, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content, config = written(smooth(*size), "JPEG", quality=95, exif=exif), AnyresConfig(size=32)
    whole = Anyres(config)(open_picture(content), (6, 6))

    smaller = open_picture(content, config.at_least)
    found = Anyres(config)(smaller, (6, 6))

    assert (smaller.height, smaller.width) == (opened if orientation == 1 else opened[::-1])
    assert np.array_equal(found.slots, whole.slots)
    assert np.abs(found.tiles.astype(int) - whole.tiles).mean() < 1


def test_halves_of_a_picture_have_the_tokens_of_the_whole_in_anyres():
    rng, config = np.random.default_rng(0), AnyresConfig()
    sizes = [(height, width) for height, width in rng.integers(10, 3000, (500, 2)) * 2]
    halved = [size for size in sizes if config.at_least(size) != size]

    assert len(halved) > 200
    for size in halved:
        height, width = config.at_least(size)
        assert config.at_least((height, width)) == (height, width)
        assert np.array_equal(
            Anyres(config).layout((height, width), (16, 16)).slots, Anyres(config).layout(size, (16, 16)).slots
        )


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(480, 640), (427, 640), (1000, 750), (301, 299), (1000, 61), (90, 70)])
def test_a_jpeg_for_naflex_becomes_what_all_of_it_would(size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = written(smooth(*size), "JPEG", quality=95, exif=exif)
    config = NaflexConfig()
    whole = Naflex(config)(open_picture(content), (32, 32))

    opened = open_picture(content, config.at_least)
    found = Naflex(config)(opened, (32, 32))

    high, wide = found.sizes[0]
    assert found.sizes.tolist() == whole.sizes.tolist()
    assert np.array_equal(found.slots, whole.slots)
    rounds = any(side % 2 for side in size)  # the half of an odd side is rounded up: a pixel is stretched
    assert np.abs(found.tiles.astype(int) - whole.tiles)[..., :high, :wide].mean() < (3 if rounds else 1)
    assert (max(opened.size) < max(size)) == (size in [(480, 640), (427, 640), (1000, 750)])


@pytest.mark.parametrize(
    "content", [b"", b"no picture", written(noise(9, 9))[:60], written(noise(90, 90), "JPEG")[:900]]
)
def test_a_damaged_picture_is_an_error_of_reading(content):
    with pytest.raises(OSError, match=r"."):
        open_picture(content)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AnyresConfig(grids=()), "at least one grid"),
        (lambda: AnyresConfig(grids=((1, 2), (1, 2))), "twice"),
        (
            lambda: TilesConfig(resample="lanczos", resampler="torch"),
            '"torch" has the filters "bicubic" and "bilinear"',
        ),
        (lambda: NaflexConfig(size=100, patch=16), "must divide size = 100"),
        (lambda: NaflexConfig(size=64, patch=16, max_patches=17), "holds 16 patches"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_tiff_whose_offsets_are_fractions_is_damaged():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "TIFF")
    content = bytearray(stream.getvalue())
    strip_offsets, rational = 273, 5
    entry = content.index(strip_offsets.to_bytes(2, "little"))
    content[entry + 2 : entry + 4] = rational.to_bytes(2, "little")

    with pytest.raises(OSError, match="cannot be interpreted as an integer"):
        open_picture(bytes(content))


@pytest.mark.parametrize("read", [open_picture, size_of])
def test_floating_point_pixels_are_refused(read):
    """From 0 to 1 they became a black picture, without a word."""
    content = written(Image.fromarray(np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)), "TIFF")

    with pytest.raises(OSError, match="floating-point numbers, of unknown range; write it with 8 or 16 bits"):
        read(content)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
@pytest.mark.parametrize("read", [open_picture, size_of])
def test_a_damaged_avif_is_an_error_of_reading(read):
    content = written(noise(40, 30), "AVIF").replace(b"iloc", b"iiii")

    with pytest.raises(OSError, match="Failed to decode image"):
        read(content)


def test_a_tiff_whose_offsets_are_too_large_is_damaged():
    content = bytearray(written(Image.new("RGB", (8, 8)), "TIFF"))
    strip_offsets, long8 = 273, 16
    entry = content.index(strip_offsets.to_bytes(2, "little"))
    content[entry + 2 : entry + 4] = long8.to_bytes(2, "little")
    content[entry + 8 : entry + 12] = len(content).to_bytes(4, "little")
    content += b"\xff" * 8

    with pytest.raises(OSError, match="too large"):
        open_picture(bytes(content))


def test_a_picture_is_turned_although_a_part_of_its_exif_is_odd():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "words"
    image = noise(8, 16)
    content = bytearray(written(image, "WEBP", lossless=True, exif=exif))
    description, a_float = content.index(b"\x01\x0e\x00\x02"), b"\x00\x0b\x00\x00\x00\x01"
    content[description + 2 : description + 8] = a_float

    turned = open_picture(bytes(content))

    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


def test_the_size_of_a_png_is_known_without_its_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = written(noise(9, 40)), written(noise(9, 40), exif=exif)

    for content, size in ((plain, (9, 40)), (turned, (40, 9))):
        assert size_of(content[:150]) == size


def test_a_png_is_upright_by_exif_behind_its_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = written(noise(8, 16), exif=exif)
    start = content.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(content[start : start + 4], "big")
    end = content.index(b"IEND") - 4
    behind = content[:start] + content[stop:end] + content[start:stop] + content[end:]

    found = open_picture(behind)

    assert size_of(behind) == (found.height, found.width) == (16, 8)
