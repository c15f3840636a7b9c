"""Conformance of predictors (contract: ``forge_plugins_dense.predictor``)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_dense.predictor import Predictor
from forge_testing.component_case import builder
from forge_testing.model import ModelConformance


class PredictorConformance(ModelConformance):
    """Subclass it, name the component, and pytest runs every check below, and every check of a model on a small decoder
    with two such predictors."""

    kind = "predictor"
    decoder: ClassVar[dict[str, Any]] = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 32,
        "feed_forward": {"name": "mlp", "hidden_dim": 48},
    }

    def use(self) -> ComponentRef:
        predictor = {"name": self.component, **self.config}
        multi_token = {"depths": 2, "predictor": predictor}
        table = {"name": "forge-plugins-dense:transformer", **self.decoder, "multi_token": multi_token}
        return builder().resolve("model", table)

    def test_has_the_base(self) -> None:
        for predictor in self._predictors(self._on_meta()):
            assert isinstance(predictor, Predictor), (
                f"{type(predictor).__qualname__} is no subclass of forge_plugins_dense.predictor.Predictor, which the "
                "decoder counts on"
            )

    def test_combines_each_position_by_itself(self) -> None:
        for predictor in self._predictors(self.build_model().eval()):
            hidden, embedded = torch.randn(2, 2, self.seq_len, self.decoder["dim"])

            whole = predictor.combine(hidden, embedded)
            alone = torch.cat([predictor.combine(hidden[:, i : i + 1], embedded[:, i : i + 1]) for i in (0, 3)], dim=1)

            assert whole.shape == hidden.shape, f"combine must give (B, S, D), got {tuple(whole.shape)}"
            torch.testing.assert_close(whole[:, [0, 3]], alone, msg="combine looks at other positions than its own")

    def test_its_plan_has_a_role_for_every_parameter(self) -> None:
        for predictor in self._predictors(self._on_meta()):
            planned = [f"{name}." for name in predictor.parallel_plan()]
            for name, _ in predictor.named_parameters():
                assert name.startswith(tuple(planned)), (
                    f"parallel_plan has no role for {name}, which tensor parallelism then refuses"
                )

    def _predictors(self, model: Any) -> list[Any]:
        return list(model.blocks.values())[-model.n_predictors :]
