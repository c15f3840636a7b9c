import torch
from cautious_adamw.config import CautiousAdamWConfig
from cautious_adamw.optimizer import CautiousAdamW

from forge_core.contracts.optimizer import NamedParameter
from forge_testing.optimizer import OptimizerConformance


class TestCautiousAdamW(OptimizerConformance):
    component = "cautious-adamw:cautious_adamw"
    config = {"lr": 0.01}


def trained(steps: int = 6, **config: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A matrix after some steps, and the gradients that it was given."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(8, 5))
    optimizer = CautiousAdamW(
        CautiousAdamWConfig(lr=0.01, **config), parameters=[NamedParameter("weight", parameter, "matrix")]
    )
    gradients = [torch.randn(8, 5, generator=generator) for _ in range(steps)]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), gradients


def test_it_is_the_algorithm_of_the_paper_in_float64() -> None:
    found, gradients = trained()

    weight = torch.ones(8, 5, dtype=torch.float64)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate((one.double() for one in gradients), start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        kept = (update * gradient > 0).double()
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update * kept / max(kept.mean().item(), 1e-3)
    torch.testing.assert_close(found.double(), weight, rtol=1e-5, atol=1e-6)


def test_without_caution_it_is_adamw() -> None:
    found, gradients = trained(cautious=False)

    parameter = torch.nn.Parameter(torch.ones(8, 5))
    adamw = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        adamw.step()
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_caution_changes_something() -> None:
    assert (trained()[0] - trained(cautious=False)[0]).abs().max() > 1e-3


def test_the_first_step_leaves_nothing_out() -> None:
    torch.testing.assert_close(trained(steps=1)[0], trained(steps=1, cautious=False)[0])
