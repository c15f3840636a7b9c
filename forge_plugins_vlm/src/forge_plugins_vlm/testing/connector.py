"""Conformance of connectors (contract: ``forge_plugins_vlm.contracts.connector``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from forge_core.train.build import cast_parameters
from forge_plugins_vlm.contracts.connector import ConnectorConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.testing.part_case import PartConformance
from forge_testing.module_state import assert_forward_is_pure, assert_gradients_everywhere, snapshot


class ConnectorConformance(PartConformance):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "connector"
    prefix = "connector."
    in_dim: ClassVar[int] = 24
    out_dim: ClassVar[int] = 16
    grids: ClassVar[Sequence[Grid]] = ((4, 4), (2, 6), (3, 5), (1, 7), (1, 1))
    """Rows and columns of features to try. One that the component takes is enough; others it refuses by
    ``ConnectorConfig.grid``."""

    def given(self) -> dict[str, Any]:
        """Keywords that the factory is given."""
        return {"in_dim": self.in_dim, "out_dim": self.out_dim}

    def test_its_configuration_has_the_base(self) -> None:
        config = self.use().config

        assert isinstance(config, ConnectorConfig), f"{type(config).__qualname__} does not extend ConnectorConfig"

    def test_takes_one_of_the_grids(self) -> None:
        assert self._taken(), f"grid() refuses each of {', '.join(f'{r} × {c}' for r, c in self.grids)}"

    def test_gives_as_many_tokens_as_it_says(self) -> None:
        connector, config = self.build_part(), self.use().config
        for grid in self._taken():
            rows, columns = config.grid(grid)

            tokens = connector(self._features(grid), grid)

            said = config.num_tokens(grid)
            assert said == rows * columns, f"num_tokens is {said} for {grid}, and grid() gives {rows} × {columns}"
            assert tokens.shape == (2, said, self.out_dim), (
                f"for features of {grid[0]} × {grid[1]} it says that a tile becomes {said} tokens of width "
                f"{self.out_dim}, and gives {tuple(tokens.shape[1:])}"
            )
            assert torch.isfinite(tokens).all(), "the tokens have values that are not finite"

    def test_refuses_the_grids_that_its_configuration_refuses(self) -> None:
        connector, taken = self.build_part(), self._taken()
        for grid in self.grids:
            if grid not in taken:
                with pytest.raises(ValueError, match=r"\w \w"):  # a sentence
                    connector(self._features(grid), grid)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_keeps_the_dtype(self, dtype: torch.dtype) -> None:
        grid, connector = self._taken()[0], cast_parameters(self.build_part(), dtype)

        tokens = connector(self._features(grid).to(dtype), grid)

        assert tokens.dtype == dtype, f"the tokens must have the dtype of the features {dtype}, got {tokens.dtype}"

    def test_tiles_do_not_matter_to_each_other(self) -> None:
        connector = self.build_part().eval()
        for grid in self._taken():
            features = self._features(grid)

            whole, alone = connector(features, grid), connector(features[:1], grid)

            torch.testing.assert_close(
                whole[:1], alone, rtol=1e-4, atol=1e-5, msg="the tokens of a tile depend on the tiles beside it"
            )

    def test_gradients_reach_every_parameter(self) -> None:
        grid, connector = self._taken()[0], self.build_part().train()
        features = self._features(grid).requires_grad_()

        torch.autograd.backward(connector(features, grid).square().sum())

        assert features.grad is not None, "no gradient reaches the features"
        unread = (features.grad.abs().amax(dim=(0, 2)) == 0).nonzero().flatten().tolist()
        assert not unread, f"no gradient reaches the features {unread} of {grid[0]} × {grid[1]}"
        assert_gradients_everywhere(connector)

    def test_forward_changes_nothing(self) -> None:
        grid, connector = self._taken()[0], self.build_part().train()
        before = snapshot(connector)

        connector(self._features(grid), grid)

        assert_forward_is_pure(before, connector)

    def _taken(self) -> list[Grid]:
        """The grids that the configuration does not refuse."""
        config, taken = self.use().config, []
        for grid in self.grids:
            try:
                config.grid(grid)
            except ValueError:
                continue
            taken.append(grid)
        return taken

    def _features(self, grid: Grid) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(2, grid[0] * grid[1], self.in_dim, generator=generator)
