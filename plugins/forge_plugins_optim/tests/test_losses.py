"""Both losses against ``F.cross_entropy`` in float64, and what only the chunked one promises: no full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_core.errors import ConfigError
from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy, chunked_cross_entropy
from forge_plugins_optim.cross_entropy import CrossEntropy, cross_entropy
from forge_plugins_optim.loss_config import ChunkedCrossEntropyConfig, CrossEntropyConfig

B, S, D, V = 2, 9, 16, 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOSSES = [
    pytest.param(CrossEntropy(), id="plain"),
    *(pytest.param(ChunkedCrossEntropy(size), id=f"chunks of {size}") for size in (1, 4, 6, 18, 1000)),
]


class Case:
    """Hidden states, a head and targets of which some are ignored."""

    def __init__(self, dtype=torch.float64, device="cpu", bias=False, ignored=0.3, shape=(B, S)) -> None:
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(*shape, D, generator=generator).to(device, dtype).requires_grad_()
        self.head = nn.Linear(D, V, bias=bias)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.head.to(device, dtype)
        self.targets = torch.randint(V, shape, generator=generator)
        self.targets[torch.rand(shape, generator=generator) < ignored] = -100
        self.targets = self.targets.to(device)

    def tensors(self) -> list[torch.Tensor]:
        return [self.hidden, *self.head.parameters()]

    def gradients(self, loss, scale: float = 1.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        total, *_ = loss(self.hidden, self.head, self.targets)
        return total.detach(), list(torch.autograd.grad(total * scale, self.tensors()))


def reference(hidden, head, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, whatever the inputs are."""
    weights = {name: parameter.double() for name, parameter in head.named_parameters()}
    logits = F.linear(hidden.double(), weights["weight"], weights.get("bias")).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("device", DEVICES)
def test_value_and_gradients_equal_cross_entropy(loss, bias: bool, device: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        case = Case(dtype, device, bias)
        expected_total, expected = case.gradients(reference, scale=1 / 7)

        total, gradients = case.gradients(loss, scale=1 / 7)

        assert total.dtype == torch.float32
        torch.testing.assert_close(total.double(), expected_total, rtol=tolerance, atol=0)
        for gradient, wanted, of in zip(gradients, expected, case.tensors(), strict=True):
            assert gradient.dtype == of.dtype
            error = (gradient.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < tolerance, f"{dtype}: relative error {error:.1e}"


class CappedHead(nn.Linear):
    """As those of models that cap their logits."""

    cap = 1.5

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cap * torch.tanh(super().forward(hidden) / self.cap)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_logits_of_a_head_that_caps_them_are_capped(loss, bias: bool) -> None:
    case = Case(bias=bias)
    uncapped, _ = case.gradients(reference)
    case.head.__class__ = CappedHead

    def capped(hidden, head, targets):
        logits = CappedHead.cap * torch.tanh(F.linear(hidden, head.weight, head.bias).flatten(0, 1) / CappedHead.cap)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), None

    expected_total, expected = case.gradients(capped)
    total, gradients = case.gradients(loss)

    assert abs(expected_total - uncapped) > 1
    torch.testing.assert_close(total.double(), expected_total, rtol=1e-6, atol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_chunked_gradients_in_float64_are_exact(loss) -> None:
    case = Case(bias=True)
    expected_total, expected = case.gradients(reference)

    total, gradients = case.gradients(loss)

    torch.testing.assert_close(total, expected_total, rtol=1e-12, atol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_chunked_gradients_pass_gradcheck() -> None:
    case = Case(bias=True, shape=(1, 5))
    loss = ChunkedCrossEntropy(2)

    assert torch.autograd.gradcheck(lambda *_: loss(case.hidden, case.head, case.targets).total, case.tensors())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_of_each_position_equals_cross_entropy(loss, device: str) -> None:
    case = Case(torch.float32, device, bias=True)

    each = loss(case.hidden, case.head, case.targets).each

    logits = F.linear(case.hidden.double(), case.head.weight.double(), case.head.bias.double())
    expected = F.cross_entropy(logits.flatten(0, 1), case.targets.flatten(), reduction="none").view(B, S)
    assert each.dtype == torch.float32
    assert not each.requires_grad
    torch.testing.assert_close(each.double(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_counts_valid_targets(loss) -> None:
    case = Case()

    count = loss(case.hidden, case.head, case.targets).count

    assert count.dtype == torch.int64
    assert count.shape == ()
    assert count == (case.targets != -100).sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_with_nothing_to_learn_is_a_connected_zero(loss, dtype: torch.dtype) -> None:
    case = Case(dtype, bias=True, ignored=1.1)

    total, gradients = case.gradients(loss)

    assert total == 0
    assert loss(case.hidden, case.head, case.targets).count == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_fp32_value_of_bf16_logits_is_not_rounded_to_bf16() -> None:
    """A bf16 loss would read 10.75 or 10.8125 for anything between; logits of zero give log V exactly."""
    hidden, head = torch.zeros(1, 100, 8, dtype=torch.bfloat16), nn.Linear(8, 50000, bias=False, dtype=torch.bfloat16)
    targets = torch.arange(100).unsqueeze(0)

    for loss in (CrossEntropy(), ChunkedCrossEntropy(30)):
        mean = loss(hidden, head, targets).total / 100
        torch.testing.assert_close(mean, torch.tensor(50000.0).log(), rtol=1e-6, atol=0)


def test_nan_at_ignored_positions_does_no_harm_in_chunks() -> None:
    case, clean = Case(), Case()
    with torch.no_grad():
        case.hidden[case.targets == -100] = float("nan")

    total, gradients = case.gradients(ChunkedCrossEntropy(4))

    expected_total, expected = clean.gradients(ChunkedCrossEntropy(4))
    assert torch.equal(total, expected_total)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_backward_can_run_twice() -> None:
    case = Case()
    total = ChunkedCrossEntropy(4)(case.hidden, case.head, case.targets).total

    first, second = (torch.autograd.grad(total, case.tensors(), retain_graph=True) for _ in range(2))

    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    case = Case()
    _, (expected, _) = case.gradients(reference)
    case.head.requires_grad_(False)

    total = ChunkedCrossEntropy(4)(case.hidden, case.head, case.targets).total

    (saved, *nothing) = total.grad_fn.saved_tensors
    assert saved.shape == (B * S, D)
    assert nothing == [None, None]
    torch.testing.assert_close(torch.autograd.grad(total, case.hidden)[0], expected)


def test_tied_weights_get_both_gradients() -> None:
    embed = nn.Embedding(V, D)
    head = nn.Linear(D, V, bias=False)
    head.weight = embed.weight
    tokens = torch.arange(B * S).view(B, S)

    def gradient(loss) -> torch.Tensor:
        total = loss(embed(tokens).tanh(), head, tokens.flip(1)).total
        return torch.autograd.grad(total, embed.weight)[0]

    torch.testing.assert_close(gradient(ChunkedCrossEntropy(4)), gradient(CrossEntropy()))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_full_logits_never_exist_in_chunks(dtype: torch.dtype, training: bool) -> None:
    case = Case(dtype, shape=(8, 32))
    largest = {}
    for name, loss in (("plain", CrossEntropy()), ("chunked", ChunkedCrossEntropy(32))):
        with LargestTensor() as mode, torch.set_grad_enabled(training):
            total = loss(case.hidden, case.head, case.targets).total
            if training:
                total.backward()
        largest[name] = mode.elements

    assert largest["plain"] >= 8 * 32 * V
    assert largest["chunked"] == max(32 * V, 8 * 32 * D), "one chunk of logits, or the gradient of hidden"


def test_evaluation_computes_no_gradients() -> None:
    case = Case()

    with torch.no_grad(), torch.profiler.profile() as profile:
        total = ChunkedCrossEntropy(B * S)(case.hidden, case.head, case.targets).total

    assert total.grad_fn is None
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == 1, f"one product with the head, got {products}"


def test_a_head_that_does_more_is_refused() -> None:
    class Capped(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 30 * torch.tanh(super().forward(hidden) / 30)

    with pytest.raises(ConfigError, match=r"Capped\.forward .* use loss 'cross_entropy'"):
        ChunkedCrossEntropy(4)(torch.zeros(1, 2, D), Capped(D, V), torch.zeros(1, 2, dtype=torch.long))


class Tiny(nn.Module):
    """A model with its loss inside forward, as the contract asks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.block = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens, targets, loss):
        return loss(self.block(self.embed(tokens)), self.head, targets)


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(B * S).view(B, S)
    return tokens, tokens.flip(1).masked_fill(tokens % 5 == 0, -100)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_works_behind_a_compiled_block() -> None:
    plain, compiled = tiny(), tiny()
    compiled.block.compile(backend="aot_eager")

    plain(*batch(), CrossEntropy()).total.backward()
    compiled(*batch(), ChunkedCrossEntropy(4)).total.backward()

    for wanted, got in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("compute", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_works_under_fsdp(compute: torch.dtype, tolerance: float) -> None:
    plain, sharded = tiny(), tiny()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(sharded.block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)

    wanted_total = plain(*batch(), CrossEntropy()).total
    total = sharded(*batch(), ChunkedCrossEntropy(4)).total
    (wanted_total / 14).backward()
    (total / 14).backward()

    torch.testing.assert_close(total, wanted_total, rtol=tolerance, atol=0)
    for wanted, got in zip(plain.parameters(), sharded.parameters(), strict=True):
        error = (got.grad.full_tensor() - wanted.grad).norm() / wanted.grad.norm()
        assert error < tolerance, f"relative error {error:.1e}"


def test_factories_build_from_their_configuration() -> None:
    case = Case(torch.float32)

    for loss in (
        cross_entropy(CrossEntropyConfig()),
        chunked_cross_entropy(ChunkedCrossEntropyConfig(chunk_size=5)),
    ):
        expected = reference(case.hidden, case.head, case.targets)[0]
        torch.testing.assert_close(loss(case.hidden, case.head, case.targets).total.double(), expected)
