"""``muon`` against torch's, and its iterations against the published formula."""

import attrs
import pytest
import torch
from torch import nn

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.config import MuonConfig, StackedMatrices
from forge_plugins_optim.muon import Muon
from forge_plugins_optim.newton_schulz import COEFFICIENTS, orthogonalise

SHAPES = [(16, 24), (24, 16), (16, 24), (32, 8), (12, 12)]
SCALES = {"spectral": "original", "match_adamw_rms": "match_rms_adamw"}


def drawn(seed: int, shapes=SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def named(parameters, role="matrix") -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", parameter, role) for i, parameter in enumerate(parameters)]


def train(optimizer, parameters, steps: int = 50) -> None:
    for step in range(steps):
        for parameter, gradient in zip(parameters, drawn(100 + step, [p.shape for p in parameters]), strict=True):
            parameter.grad = gradient
        optimizer.step()


def largest_difference(ours, theirs) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_it_is_that_of_torch(scale: str, nesterov: bool, monkeypatch) -> None:
    """In fp32, in which torch's is made to iterate: in bf16 a rounded product would be the measure."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # by which torch 2.15 casts
    ours, theirs = ([nn.Parameter(one) for one in drawn(1)] for _ in range(2))
    config = MuonConfig(lr=0.01, scale=scale, nesterov=nesterov, dtype="fp32", weight_decay=0.2)

    train(Muon(config, parameters=named(ours)), ours)
    train(
        torch.optim.Muon(theirs, 0.01, 0.2, 0.95, nesterov, adjust_lr_fn=SCALES[scale]),
        theirs,
    )

    assert largest_difference(ours, theirs) <= 1e-6


def test_in_bf16_it_is_that_of_torch_as_far_as_bf16_goes() -> None:
    ours, theirs = ([nn.Parameter(one) for one in drawn(1)] for _ in range(2))

    train(Muon(MuonConfig(lr=0.01), parameters=named(ours)), ours, steps=1)
    train(torch.optim.Muon(theirs, 0.01), theirs, steps=1)

    assert largest_difference(ours, theirs) <= 0.01 * 2**-7


def published(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """The formula of the post, in float64 and without transposing."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (40, 3), (1, 7), (9, 9)])
def test_the_iterations_are_the_published_ones(shape) -> None:
    (matrix,) = drawn(2, [shape])

    found = orthogonalise(matrix.expand(3, -1, -1), 5)

    for one in found:
        torch.testing.assert_close(one.double(), published(matrix, 5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_end_near_one(dtype) -> None:
    stack = torch.stack(drawn(3, [(64, 48)] * 4))

    values = torch.linalg.svdvals(orthogonalise(stack.to(dtype), 5).float())

    assert values.min() > 0.3  # the smallest of a random matrix are hardest to raise
    assert values.max() < 1.3
    assert (values > 0.65).float().mean() > 0.9


def test_a_gradient_of_zero_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    optimizer = Muon(MuonConfig(lr=0.1, weight_decay=0.0), parameters=named([parameter]))
    parameter.grad = torch.zeros(4, 6)

    optimizer.step()

    assert torch.equal(parameter.detach(), torch.ones(4, 6))


def test_each_expert_of_a_stack_is_a_matrix_of_its_own() -> None:
    matrices = drawn(4, [(6, 8)] * 3)
    stack, apart = nn.Parameter(torch.stack(matrices)), [nn.Parameter(one) for one in matrices]
    gradients = drawn(5, [(6, 8)] * 3)
    stack.grad = torch.stack(gradients)
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient
    config = MuonConfig(lr=0.1, dtype="fp32")

    Muon(config, parameters=named([stack], "expert")).step()
    Muon(config, parameters=named(apart)).step()

    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in apart]))


@pytest.mark.parametrize("scale", SCALES)
def test_each_matrix_of_a_fused_projection_is_one_of_its_own(scale: str) -> None:
    """Beside a whole one of the same shape, over 20 steps, with parts of unlike shapes."""
    rows, columns = (24, 4, 4), 16
    whole, apart = drawn(6, [(32, columns)])[0], drawn(7, [(n, columns) for n in rows])
    fused = [nn.Parameter(torch.cat(apart)), nn.Parameter(whole.clone())]
    separate = [*map(nn.Parameter, apart), nn.Parameter(whole.clone())]
    config = MuonConfig(lr=0.01, dtype="fp32", scale=scale)
    declared = attrs.evolve(config, stacked=(StackedMatrices(pattern="*0", rows=rows),))
    ours, theirs = Muon(declared, parameters=named(fused)), Muon(config, parameters=named(separate))

    for step in range(20):
        gradients = drawn(100 + step, [one.shape for one in separate])
        fused[0].grad, fused[1].grad = torch.cat(gradients[:3]), gradients[3]
        for parameter, gradient in zip(separate, gradients, strict=True):
            parameter.grad = gradient
        ours.step()
        theirs.step()

    assert largest_difference(fused, [torch.cat([one.detach() for one in separate[:3]]), separate[3]]) <= 1e-6


@pytest.mark.parametrize(
    ("pattern", "rows", "sentence"),
    [
        ("p0", (8, 9), r"rows = \[8, 9\] add up to 17, and p0, which 'p0' matches, has 16 rows"),
        ("[p]1", (2, 2), r"the pattern '\[p\]1' takes no parameter, because those before it take all that it matches"),
        ("q0", (8, 8), "the pattern 'q0' matches no parameter. The nearest names are p0"),
    ],
)
def test_stacked_matrices_that_do_not_fit_are_told(pattern: str, rows: tuple[int, ...], sentence: str) -> None:
    usual = StackedMatrices(pattern="p1", rows=(1, 3))
    config = MuonConfig(lr=0.1, stacked=(usual, StackedMatrices(pattern=pattern, rows=rows)))

    with pytest.raises(ConfigError, match=sentence):
        Muon(config, parameters=named([nn.Parameter(torch.ones(16, 4)), nn.Parameter(torch.ones(4, 4))]))


@pytest.mark.parametrize(
    ("role", "shape"),
    [("embedding", (9, 4)), ("head", (9, 4)), ("norm", (4,)), ("bias", (4,)), ("matrix", (2, 2, 2, 2))],
)
def test_what_is_no_matrix_is_refused(role: str, shape) -> None:
    parameters = [NamedParameter("some.weight", nn.Parameter(torch.ones(shape)), role)]

    with pytest.raises(ConfigError) as error:
        Muon(MuonConfig(lr=0.1), parameters=parameters)

    assert f"some.weight ({role} {shape})" in str(error.value)
    assert "Use optimizer 'grouped'" in str(error.value)
