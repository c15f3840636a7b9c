"""The feed-forward kit passes a layer that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
from torch import nn

from forge_testing.feed_forward import FeedForwardConformance


class Layer(nn.Module):
    def __init__(self, *, dim, layer, n_layers):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden, valid=None):
        return self.down(self.up(hidden).relu())

    def init_weights(self, rng, prefix, residual_std, std):
        rng.fill(f"{prefix}up.weight", self.up.weight, lambda full, g: full.normal_(0, std, generator=g))
        rng.fill(f"{prefix}down.weight", self.down.weight, lambda full, g: full.normal_(0, residual_std, generator=g))

    def parallel_plan(self):
        return {"up": "column", "down": "row"}

    def parameter_roles(self):
        return {"up.weight": "matrix", "down.weight": "matrix"}

    def active_parameters(self):
        return self.up.weight.numel() + self.down.weight.numel()


class TestLayer(FeedForwardConformance):
    def make(self, **given):
        return Layer(**given)


def with_forward(forward):
    return type("Faulty", (Layer,), {"forward": forward})


def declaring(**methods):
    return type("Faulty", (Layer,), {name: lambda self, value=value: value for name, value in methods.items()})


class Remembering(Layer):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("calls", torch.empty(()))

    def forward(self, hidden, valid=None):
        self.calls += 1
        return super().forward(hidden)

    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, prefix, residual_std, std)
        rng.fill(f"{prefix}calls", self.calls, lambda full, _: full.zero_())


class MadeOnTheCPU(Layer):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("table", torch.zeros(3, device="cpu"))


class ForeignName(Layer):
    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, "", residual_std, std)


class GlobalInit(Layer):
    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, prefix, residual_std, std)
        nn.init.normal_(self.up.weight, std=std)


class OneStd(Layer):
    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, prefix, std, std)


def mixing(self, hidden, valid=None):
    return self.down(self.up(hidden).relu()) + hidden.mean(1, keepdim=True)


FAULTS = [
    (MadeOnTheCPU, "test_init_weights_fills_everything", (), "table: made on another device than the default one"),
    (
        ForeignName,
        "test_init_weights_fills_everything",
        (),
        "leaves blocks.0.feed_forward.down.weight, .* uninitialised",
    ),
    (GlobalInit, "test_same_seed_same_weights", (), "up.weight differs between two layers of one seed"),
    (OneStd, "test_residual_std_scales_the_output", (), "must be initialised with residual_std"),
    (
        with_forward(lambda self, hidden, valid=None: self.up(hidden)),
        "test_keeps_shape_and_dtype",
        (2, 7, torch.float32),
        r"must have the shape of the hidden states \(2, 7, 16\), got \(2, 7, 32\)",
    ),
    (
        with_forward(
            lambda self, hidden, valid=None: hidden.float() @ self.up.weight.float().T @ self.down.weight.float().T
        ),
        "test_keeps_shape_and_dtype",
        (1, 1, torch.bfloat16),
        "must keep the dtype of the hidden states torch.bfloat16, got torch.float32",
    ),
    (with_forward(mixing), "test_positions_are_independent", (), r"changing the hidden state at \(0, 3\) changes"),
    (
        with_forward(mixing),
        "test_invalid_positions_do_not_matter",
        (),
        "positions that are not valid changes the output",
    ),
    (
        with_forward(lambda self, hidden, valid=None: self.down(self.up(hidden).detach())),
        "test_gradients_reach_every_parameter",
        (),
        "no gradient reaches the hidden states",
    ),
    (
        with_forward(lambda self, hidden, valid=None: hidden * 2 + self.down(self.up(hidden).detach())),
        "test_gradients_reach_every_parameter",
        (),
        "no gradient reaches up.weight",
    ),
    (Remembering, "test_forward_changes_only_accumulators", (), "forward changed calls"),
    (
        declaring(parameter_roles={"up.weight": "matrix"}),
        "test_parameter_roles_cover_every_parameter",
        (),
        "parameter_roles leaves out down.weight",
    ),
    (
        declaring(parameter_roles={"up.weight": "matrix", "down.weight": "row"}),
        "test_parameter_roles_cover_every_parameter",
        (),
        "down.weight has the unknown role 'row'",
    ),
    (
        declaring(parallel_plan={"gate": "column"}),
        "test_parallel_plan_names_modules",
        (),
        "parallel_plan names 'gate', which is not a module",
    ),
    (
        declaring(parallel_plan={"up": "columns"}),
        "test_parallel_plan_names_modules",
        (),
        "parallel_plan gives 'up' the unknown role 'columns'",
    ),
    (
        declaring(active_parameters=10**6),
        "test_active_parameters_is_a_part_of_all",
        (),
        "active_parameters is 1000000, and the layer has 1024",
    ),
]


@pytest.mark.parametrize(("layer", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(layer, check, given, sentence):
    class Case(FeedForwardConformance):
        def make(self, **sizes):
            return layer(**sizes)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(*given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(FeedForwardConformance) if name.startswith("test_")}

    assert {check for _, check, _, _ in FAULTS} == checks
