"""Conformance of image processors (contract: ``forge_plugins_vlm.contracts.image_processor``)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import NEWLINE, ImageProcessorConfig, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_testing.component_case import ComponentCase

_MODES = ("1", "CMYK", "I", "I;16", "L", "LA", "P", "RGBA")


class ImageProcessorConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "image_processor"
    sizes: ClassVar[Sequence[Grid]] = ((32, 32), (48, 20), (20, 48), (33, 31), (1, 1), (1, 300), (300, 2), (480, 640))
    """Heights and widths of pictures to try."""
    grids: ClassVar[Sequence[Grid]] = ((2, 2), (2, 3), (1, 1))
    """Rows and columns of tokens of a tile to try."""

    def test_its_configuration_has_the_base(self) -> None:
        config = self.use().config

        assert isinstance(config, ImageProcessorConfig), (
            f"{type(config).__qualname__} does not extend ImageProcessorConfig"
        )
        assert min(config.tile_size) > 0, f"tile_size is {config.tile_size}, and a tile has pixels"

    def test_a_layout_is_what_a_call_gives(self) -> None:
        processor = self.make()
        for size in self.sizes:
            for grid in self.grids:
                layout, found = processor.layout(size, grid), processor(picture(size), grid)

                words = f"a picture of {size[0]} × {size[1]} pixels with {grid[0]} × {grid[1]} tokens a tile"
                assert layout.n_tiles == len(found.tiles), (
                    f"{words}: layout says {layout.n_tiles} tiles, and a call gives {len(found.tiles)}"
                )
                assert np.array_equal(layout.slots, found.slots), f"{words}: layout has other slots than a call gives"

    def test_tiles_are_those_that_it_says(self) -> None:
        for size, found in self._called():
            config = self.use().config
            n_tiles, wanted = len(found.tiles), (3, *config.tile_size)
            assert found.tiles.dtype == np.uint8, f"tiles must be uint8, got {found.tiles.dtype}"
            assert found.tiles.shape[1:] == wanted, f"tiles must be {wanted}, got {found.tiles.shape[1:]}"
            assert 1 <= n_tiles <= config.most_tiles, (
                f"a picture of {size[0]} × {size[1]} pixels becomes {n_tiles} tiles, and most_tiles is "
                f"{config.most_tiles}"
            )

    def test_slots_are_tokens_of_its_tiles(self) -> None:
        has_newlines, ended = self.use().config.has_newlines, False
        for grid in self.grids:
            for _, found in self._called(grid):
                tokens = len(found.tiles) * grid[0] * grid[1]
                slots = found.slots
                assert slots.ndim == 1, f"slots must be (L,), got {slots.shape}"
                assert np.issubdtype(slots.dtype, np.integer), f"slots must be int64, got {slots.dtype}"
                own = slots[slots != NEWLINE]
                assert len(own), "a picture has no token"
                assert ((own >= 0) & (own < tokens)).all(), (
                    f"slots must be 0 to {tokens - 1}, of {len(found.tiles)} tiles, or {NEWLINE}; got {own.min()} to "
                    f"{own.max()}"
                )
                ended = ended or len(own) < len(slots)
        assert has_newlines or not ended, "rows end in NEWLINE, and has_newlines is false"
        assert ended or not has_newlines, "has_newlines is true, and no row of the sizes that were tried ends in one"

    def test_sizes_are_there_where_it_pads(self) -> None:
        pads, (high, wide) = self.use().config.pads, self.use().config.tile_size
        for _, found in self._called():
            if not pads:
                assert found.sizes is None, "it gives sizes, and pads is false"
                continue
            assert found.sizes is not None, "pads is true, and it gives no sizes"
            wanted = (len(found.tiles), 2)
            assert found.sizes.shape == wanted, f"sizes must be {wanted}, got {found.sizes.shape}"
            fits = (found.sizes >= 1) & (found.sizes <= np.array([high, wide]))
            assert fits.all(), f"sizes must be 1 to {high} and 1 to {wide}, got {found.sizes.tolist()}"

    def test_pictures_of_all_sizes_have_one_layout_where_it_says_so(self) -> None:
        if self.use().config.depends_on_size:
            pytest.skip("it says that layouts depend on the picture's size")
        layouts = [self.make().layout(size, self.grids[0]) for size in self.sizes]

        for size, layout in zip(self.sizes, layouts, strict=True):
            same = layout.n_tiles == layouts[0].n_tiles and np.array_equal(layout.slots, layouts[0].slots)
            assert same, f"depends_on_size is false, and a picture of {size[0]} × {size[1]} has another layout"

    def test_pictures_that_may_be_decoded_smaller_have_the_layout_of_the_whole(self) -> None:
        config, processor, grid = self.use().config, self.make(), self.grids[0]
        for size in [(4 * height, 4 * width) for height, width in self.sizes]:
            wanted, whole = config.at_least(size), processor.layout(size, grid)
            for part in (2, 4, 8):
                smaller = -(-size[0] // part), -(-size[1] // part)
                if wanted is None or config.at_least(smaller) != wanted or not _contains(smaller, wanted):
                    continue
                layout = processor.layout(smaller, grid)
                same = layout.n_tiles == whole.n_tiles and np.array_equal(layout.slots, whole.slots)
                assert same, (
                    f"at_least says {wanted[0]} × {wanted[1]} of pictures of {size[0]} × {size[1]} and of "
                    f"{smaller[0]} × {smaller[1]}, and these have different layouts"
                )

    @pytest.mark.parametrize("mode", _MODES)
    def test_takes_pictures_of_every_mode(self, mode: str) -> None:
        size = self.sizes[0]

        found, plain = self.make()(_in_mode(mode, size), self.grids[0]), self.make()(picture(size), self.grids[0])

        assert found.tiles.dtype == np.uint8, f"tiles of a picture in {mode} are {found.tiles.dtype}"
        same = found.tiles.shape == plain.tiles.shape
        assert same, f"a picture in {mode} becomes {found.tiles.shape}, and one in RGB {plain.tiles.shape}"

    def test_sees_the_picture(self) -> None:
        size, grid = self.sizes[0], self.grids[0]
        black, white = (Image.new("RGB", size[::-1], (level,) * 3) for level in (0, 255))

        dark, light = (self.make()(one, grid).tiles.mean() for one in (black, white))

        assert dark < light, f"tiles of a black picture have the mean {dark:.1f}, and those of a white one {light:.1f}"

    def test_threads_give_what_one_does(self) -> None:
        processor, grid = self.make(), self.grids[0]
        pictures = [picture(size, seed) for seed, size in enumerate(self.sizes)] * 3
        alone = [processor(one.copy(), grid) for one in pictures]

        with ThreadPoolExecutor(4) as pool:
            together = [*pool.map(lambda one: processor(one.copy(), grid), pictures)]

        same = all(_are_equal(one, other) for one, other in zip(alone, together, strict=True))
        assert same, "four threads give other tiles than one"

    def test_leaves_the_picture_as_it_is(self) -> None:
        for size in self.sizes:
            given = picture(size)
            before = given.mode, given.size, given.tobytes()

            self.make()(given, self.grids[0])

            assert (given.mode, given.size, given.tobytes()) == before, "it changes the picture that it is given"

    def _called(self, grid: Grid | None = None) -> list[tuple[Grid, Processed]]:
        """A picture of each size, processed."""
        processor = self.make()
        return [(size, processor(picture(size), grid or self.grids[0])) for size in self.sizes]


def _contains(size: Grid, other: Grid) -> bool:
    return size[0] >= other[0] and size[1] >= other[1]


def picture(size: Grid, seed: int = 0) -> Image.Image:
    """Noise of this height and width, in RGB."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _in_mode(mode: str, size: Grid) -> Image.Image:
    grey = picture(size).convert("L")
    if mode.startswith("I"):
        wide: Any = np.asarray(grey).astype(np.uint16 if mode == "I;16" else np.int32) * 257
        return Image.fromarray(wide)
    return picture(size).convert(mode)


def _are_equal(one: Processed, other: Processed) -> bool:
    sizes = one.sizes is other.sizes if one.sizes is None or other.sizes is None else (one.sizes == other.sizes).all()
    return bool(np.array_equal(one.tiles, other.tiles) and np.array_equal(one.slots, other.slots) and sizes)
