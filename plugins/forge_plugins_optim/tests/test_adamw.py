import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adamw import adamw
from forge_plugins_optim.config import AdamWConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parameter(name: str = "w", role: str = "matrix", shape: tuple[int, ...] = (3, 5), **kwargs) -> NamedParameter:
    torch.manual_seed(len(name))
    return NamedParameter(name, nn.Parameter(torch.randn(shape).to(**kwargs)), role)


def reference(p, gradients, lr, decay, betas=(0.9, 0.95), eps=1e-8) -> torch.Tensor:
    """Algorithm 2 of https://arxiv.org/abs/1711.05101 in float64, decay scaled by the learning rate."""
    p, m, v = p.detach().double().cpu(), 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double().cpu()
        p = p * (1 - lr * decay)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return p


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("role", "decay"), [("matrix", 0.1), ("norm", 0.0), ("embedding", 0.0)])
def test_updates_follow_the_paper(role: str, decay: float, device: str) -> None:
    entry = parameter(role=role, device=device)
    gradients = [torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).to(device) for i in range(5)]
    expected = reference(entry.parameter, gradients, 0.01, decay)
    optimizer = adamw(AdamWConfig(lr=0.01), parameters=[entry])

    for gradient in gradients:
        entry.parameter.grad = gradient
        optimizer.step()

    torch.testing.assert_close(entry.parameter.detach().double().cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_clips(device: str) -> None:
    entry = parameter(device=device)
    gradients = [torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).to(device) for i in range(5)]
    scales = [1.0, 0.3, 0.01, 1.0, 0.7]
    expected = reference(entry.parameter, map(torch.mul, gradients, scales), 0.01, 0.1)
    optimizer = adamw(AdamWConfig(lr=0.01), parameters=[entry])
    assert optimizer.scales_gradients

    for gradient, scale in zip(gradients, scales, strict=True):
        entry.parameter.grad = gradient
        optimizer.gradient_scale = torch.tensor(scale, device=device)
        optimizer.step()

    torch.testing.assert_close(entry.parameter.detach().double().cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_kernel_is_fused(device: str, dtype: torch.dtype) -> None:
    entry = parameter(device=device, dtype=dtype)
    optimizer = adamw(AdamWConfig(lr=0.01), parameters=[entry])
    entry.parameter.grad = torch.ones_like(entry.parameter)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()

    assert "aten::_fused_adamw_" in {event.key for event in profile.key_averages()}


def test_torch_chooses_where_there_is_no_fused_kernel() -> None:
    optimizer = adamw(AdamWConfig(lr=0.01), parameters=[parameter(device="meta")])

    assert optimizer.defaults["fused"] is None


def test_base_learning_rates_stand_in_the_groups() -> None:
    optimizer = adamw(AdamWConfig(lr=0.01), parameters=[parameter("a"), parameter("b", "norm", (3,))])

    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.0)]
    assert not optimizer.state


def test_a_small_gain_near_one_is_not_lost_in_fp32() -> None:
    """bf16 parameters would stay at exactly 1.0 with updates of 3e-4."""
    entry = NamedParameter("norm.weight", nn.Parameter(torch.ones(4)), "norm")
    optimizer = adamw(AdamWConfig(lr=3e-4), parameters=[entry])

    for _ in range(200):
        entry.parameter.grad = torch.ones(4)
        optimizer.step()

    torch.testing.assert_close(entry.parameter.detach(), torch.full((4,), 0.94), rtol=1e-4, atol=0)


class LooksUpLayouts(TorchDispatchMode):
    """Whether an operation was given tensors that are cut over a mesh."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found |= any(issubclass(one, DTensor) for one in types)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_rank")
def test_what_is_cut_over_a_mesh_is_stepped_as_this_ranks_part() -> None:
    whole = [parameter(f"w{i}") for i in range(2)]
    mesh = init_device_mesh("cpu", (1,))
    cut = [distribute_tensor(one.parameter.detach().clone(), mesh, [Shard(0)]) for one in whole]
    parts = [NamedParameter(one.name, nn.Parameter(own), one.role) for one, own in zip(whole, cut, strict=True)]
    optimizer, of_parts = (adamw(AdamWConfig(lr=0.01), parameters=some) for some in (whole, parts))

    for step in range(3):
        for one, own in zip(whole, parts, strict=True):
            one.parameter.grad = torch.full_like(one.parameter, 1.0 + step)
            own.parameter.grad = torch.full_like(own.parameter, 1.0 + step)
        optimizer.step()
        with LooksUpLayouts() as seen:
            of_parts.step()
        assert seen.found is (step == 0)  # where moments are made

    for one, own in zip(whole, parts, strict=True):
        assert torch.equal(own.parameter.detach().full_tensor(), one.parameter.detach())
        moments = of_parts.state[own.parameter]
        assert isinstance(moments["exp_avg"], DTensor)
        assert torch.equal(moments["exp_avg"].full_tensor(), optimizer.state[one.parameter]["exp_avg"])
