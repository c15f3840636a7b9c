"""The kit of norms has a sentence for each way to break their contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_plugins_dense.testing.norm import NormConformance


class Gain(nn.Module):
    """Keeps the contract."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, hidden):
        return hidden * self.weight


class Forgets(Gain):
    def init_weights(self, rng, prefix): ...


class NamesOthers(Gain):
    def parameter_roles(self):
        return {"gain": "norm"}


class InventsARole(Gain):
    def parameter_roles(self):
        return {"weight": "gain"}


class Widens(Gain):
    def forward(self, hidden):
        return super().forward(hidden).repeat_interleave(2, dim=-1)


class Upcasts(Gain):
    def forward(self, hidden):
        return super().forward(hidden).float()


class Explodes(Gain):
    def forward(self, hidden):
        return super().forward(hidden) / 0


class OverPositions(Gain):
    def forward(self, hidden):
        return super().forward(hidden - hidden.mean(1, keepdim=True))


class WithoutEpsilon(Gain):
    def forward(self, hidden):
        return super().forward(hidden * hidden.square().mean(-1, keepdim=True).rsqrt())


class Idle(Gain):
    def forward(self, hidden):
        return hidden + 0 * self.weight


class Counts(Gain):
    def forward(self, hidden):
        with torch.no_grad():
            self.weight += 1
        return hidden * self.weight.detach()


ONE = {"shape": (1, 1), "dtype": torch.bfloat16}
FAULTS = [
    (Forgets, "test_init_weights_fills_everything", {}, "init_weights leaves blocks.0.attention_norm.weight"),
    (NamesOthers, "test_parameter_roles_cover_every_parameter", {}, r"names \['gain'\], and the norm has \['weight'\]"),
    (InventsARole, "test_parameter_roles_cover_every_parameter", {}, r"not known: \['gain'\]"),
    (Widens, "test_keeps_shape_and_dtype", ONE, r"hidden states \(1, 1, 16\), got \(1, 1, 32\)"),
    (Upcasts, "test_keeps_shape_and_dtype", ONE, "hidden states torch.bfloat16, got torch.float32"),
    (Explodes, "test_keeps_shape_and_dtype", ONE, "values that are not finite"),
    (OverPositions, "test_positions_are_independent", {"training": True}, r"\(0, 3\) changes the output at \[\(0, 0\)"),
    (WithoutEpsilon, "test_gradients_are_finite_and_reach_every_parameter", {}, "of the hidden states has values that"),
    (Idle, "test_gradients_are_finite_and_reach_every_parameter", {}, "the gradient of weight is zero everywhere"),
    (Counts, "test_forward_changes_only_accumulators", {}, "forward changed weight"),
]


@pytest.mark.parametrize(("norm", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_told(norm, check, given, sentence):
    class Case(NormConformance):
        def make(self, *, dim, eps):
            return norm(dim)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(**given)


def test_every_check_has_a_fault():
    assert {check for _, check, _, _ in FAULTS} == {name for name in dir(NormConformance) if name.startswith("test_")}
