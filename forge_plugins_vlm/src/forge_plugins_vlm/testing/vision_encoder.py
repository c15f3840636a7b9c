"""Conformance of vision encoders (contract: ``forge_plugins_vlm.contracts.vision_encoder``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from forge_core.contracts.observation import ObservableModule, Site
from forge_core.train.build import cast_parameters
from forge_plugins_vlm.contracts.vision_encoder import Grid, VisionEncoderConfig
from forge_plugins_vlm.testing.part_case import PartConformance
from forge_testing.module_state import assert_forward_is_pure, assert_gradients_everywhere, snapshot
from forge_testing.observable import assert_dims, observed


class VisionEncoderConformance(PartConformance):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "vision_encoder"
    prefix = "encoder."
    tile_sizes: ClassVar[Sequence[Grid]] = ()
    """Heights and widths of tiles to try; by default its ``tile_size``. Needed where that is ``None``."""

    def test_its_configuration_has_the_base(self) -> None:
        config = self.use().config

        assert isinstance(config, VisionEncoderConfig), (
            f"{type(config).__qualname__} does not extend VisionEncoderConfig"
        )
        assert config.dim > 0, f"dim is {config.dim}, and a feature has a width"

    def test_takes_its_usual_tile(self) -> None:
        config = self.use().config

        rows, columns = config.grid(*config.usual_tile)

        assert rows * columns > 0, f"its usual tile of {config.usual_tile} pixels has no features"

    def test_gives_the_grid_that_it_says(self) -> None:
        encoder, config = self.build_part().eval(), self.use().config
        for height, width in self._sizes():
            rows, columns = config.grid(height, width)

            features = encoder(_pixels(height, width))

            assert features.shape == (2, rows * columns, config.dim), (
                f"for tiles of {height} × {width} pixels it says {rows} × {columns} features of width {config.dim}, "
                f"and gives {tuple(features.shape[1:])}"
            )
            assert torch.isfinite(features).all(), "the features have values that are not finite"

    def test_refuses_tiles_that_it_cannot_take(self) -> None:
        size = self.use().config.tile_size
        if size is None:
            pytest.skip("it says that it takes tiles of any size")

        with pytest.raises(ValueError, match=r"\w \w"):  # a sentence
            self.use().config.grid(size[0] + 1, size[1] + 1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_gives_the_dtype_of_its_weights(self, dtype: torch.dtype) -> None:
        encoder = cast_parameters(self.build_part(), dtype).eval()

        features = encoder(_pixels(*self._sizes()[0]))

        assert features.dtype == dtype, f"the features must have the dtype of the weights {dtype}, got {features.dtype}"

    def test_tiles_do_not_matter_to_each_other(self) -> None:
        encoder = self.build_part().eval()
        for size in self._sizes():
            pixels = _pixels(*size)

            whole, alone = encoder(pixels), encoder(pixels[:1])

            torch.testing.assert_close(
                whole[:1], alone, rtol=1e-4, atol=1e-5, msg="the features of a tile depend on the tiles beside it"
            )

    def test_padding_does_not_leak(self) -> None:
        encoder, config = self.build_part().eval(), self.use().config
        height, width = self._sizes()[0]
        rows, columns = config.grid(height, width)
        inner = height // rows * max(1, rows // 2), width // columns * max(1, columns // 2)
        sizes = torch.tensor([inner, inner])
        pixels, other = _pixels(height, width), _pixels(height, width, seed=1)
        other[:, :, : inner[0], : inner[1]] = pixels[:, :, : inner[0], : inner[1]]
        if not config.takes_padding:
            with pytest.raises(ValueError, match=r"\w \w"):  # a sentence
                encoder(pixels, sizes)
            return

        cells = [encoder(one, sizes).unflatten(1, (rows, columns)) for one in (pixels, other)]

        first, second = (one[:, : max(1, rows // 2), : max(1, columns // 2)] for one in cells)
        assert torch.equal(first, second), "what stands in the padding of a tile changes the features of its picture"

    def test_gradients_reach_every_parameter(self) -> None:
        encoder = self.build_part().train()

        torch.autograd.backward(encoder(_pixels(*self._sizes()[0])).square().sum())

        assert_gradients_everywhere(encoder)

    def test_forward_changes_nothing(self) -> None:
        encoder = self.build_part().train()
        before = snapshot(encoder)

        encoder(_pixels(*self._sizes()[0]))

        assert_forward_is_pure(before, encoder)

    def test_units_are_layers_from_hidden_states_to_hidden_states(self) -> None:
        encoder, modules = self.build_part().eval(), dict(self._uninitialised().named_modules())
        units = list(encoder.units())
        for name in units:
            assert name in modules, f"units() names {name!r}, which is not a module of the encoder"
            inside = [other for other in units if other.startswith(f"{name}.")]
            assert not inside, f"units() names {name!r} and {', '.join(inside)} within it"
        seen: dict[str, tuple[Any, Any]] = {}
        for name in units:
            encoder.get_submodule(name).register_forward_hook(
                lambda _, given, output, name=name: seen.update({name: (given, output)})
            )

        encoder(_pixels(*self._sizes()[0]))

        for name in units:
            assert name in seen, f"forward does not call the unit {name}"
            given, output = seen[name]
            assert isinstance(next(iter(given), None), torch.Tensor), (
                f"the unit {name} must be called with hidden states as its first positional argument"
            )
            assert isinstance(output, torch.Tensor), (
                f"the unit {name} must give hidden states, got {type(output).__name__}"
            )
            assert output.shape == given[0].shape, (
                f"the unit {name} is given {tuple(given[0].shape)}, and gives {tuple(output.shape)}"
            )

    def test_every_site_has_its_dims_once_a_forward(self) -> None:
        sites, seen = self._observed()

        for name, site in sites.items():
            values = seen.get(name, [])
            assert len(values) == 1, f"the site {name} is computed {len(values)} times in a forward, and must be once"
            assert site.dims[0] == "tile", f"the site {name} begins with {site.dims[0]!r}, and must with 'tile'"
            assert_dims(name, site, values[0], {"tile": 2})

    def test_sites_of_a_layer_add_up(self) -> None:
        sites, seen = self._observed()

        sums = ("resid_pre", "attn_out", "resid_mid"), ("resid_mid", "mlp_out", "resid_post")
        layers = [name.removesuffix(".resid_pre") for name in sites if name.endswith(".resid_pre")]
        for layer in layers:
            for before, added, after in sums:
                names = [f"{layer}.{name}" for name in (before, added, after)]
                if all(name in sites for name in names):
                    first, update, second = (seen[name][0] for name in names)
                    assert torch.allclose(first + update, second, rtol=1e-4, atol=1e-4), (
                        f"{names[0]} and {names[1]} do not add up to {names[2]}"
                    )

    def _observed(self) -> tuple[Mapping[str, Site], Mapping[str, Sequence[torch.Tensor]]]:
        """The sites, and the values of each in a forward."""
        encoder = self.build_part().eval()
        if not isinstance(encoder, ObservableModule):
            pytest.skip("the encoder declares no sites")
        module: Any = encoder
        sites, modules = encoder.sites(), dict(module.named_modules())
        for name, site in sites.items():
            assert site.module in modules, f"the site {name} is at {site.module!r}, which is no module of the encoder"
        with torch.no_grad(), observed(module, sites) as seen:
            module(_pixels(*self._sizes()[0]))
        return sites, seen

    def test_flops_grow_with_the_tile(self) -> None:
        config = self.use().config
        costs = sorted((height * width, config.flops(height, width)) for height, width in self._sizes())

        assert costs[0][1] >= 0, f"the FLOPs of a tile are {costs[0][1]}"
        for (pixels, fewer), (more_pixels, more) in pairwise(costs):
            assert fewer <= more, (
                f"a tile of {more_pixels} pixels takes {more:.6g} FLOPs, and one of {pixels} takes {fewer:.6g}"
            )

    def _sizes(self) -> Sequence[Grid]:
        size = self.use().config.tile_size
        sizes = self.tile_sizes or ([] if size is None else [size])
        assert sizes, f"{type(self).__name__}: set tile_sizes, as the encoder takes tiles of any size"
        return sizes


def _pixels(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=generator)
