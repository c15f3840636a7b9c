"""The kernels of ``kernel = "triton"`` against float64: on a GPU, or interpreted where Triton is and no GPU."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.contracts.loss import VocabularyPart
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_optim import chunked_cross_entropy
from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy
from forge_plugins_optim.loss_config import ChunkedCrossEntropyConfig
from forge_testing.several_ranks import on_ranks
from parity_matrix.launch import JOB

B, S, D, V = 2, 6, 16, 5000
"""A vocabulary of more than one block."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CappedHead(nn.Linear):
    cap = 1.5


class Case:
    def __init__(self, dtype: torch.dtype, head: type[nn.Linear] = nn.Linear, *, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(B, S, D, generator=generator).to(DEVICE, dtype).requires_grad_()
        self.head = head(D, V, bias=bias)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.head.to(DEVICE, dtype)
        self.targets = torch.randint(V, (B, S), generator=generator)
        self.targets[torch.rand(B, S, generator=generator) < 0.3] = -100
        self.targets[0, :2] = torch.tensor([0, V - 1])  # at the borders of blocks
        self.targets = self.targets.to(DEVICE)
        self.weights = torch.rand(B, S, generator=generator).to(DEVICE)

    def of(self, total: torch.Tensor) -> list[torch.Tensor]:
        """The total and its gradients."""
        gradients = torch.autograd.grad(total / 7, [self.hidden, *self.head.parameters()])
        return [one.detach().double() for one in (total, *gradients)]

    def expected(self, coefficient: float, *, weighted: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """In float64; and the loss of each position."""
        own = {name: one.double() for name, one in self.head.named_parameters()}
        logits = F.linear(self.hidden.double(), own["weight"], own.get("bias"))
        if cap := getattr(self.head, "cap", None):
            logits = cap * torch.tanh(logits / cap)
        each = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), reduction="none").view(B, S)
        penalty = coefficient * logits.logsumexp(-1).square() * (self.targets != -100)
        total = ((each + penalty) * (self.weights if weighted else 1)).sum()
        return self.of(total), each.detach()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


class InParts(nn.Linear):
    """A head of which each of two ranks has half of the vocabulary."""

    def vocabulary_part(self, hidden: torch.Tensor) -> VocabularyPart:
        mine = part_of_rank()
        return VocabularyPart(hidden, self.weight[mine], self.bias[mine], mine.start, dist.group.WORLD)


def part_of_rank() -> slice:
    start = dist.get_rank() * V // 2
    return slice(start, start + V // 2)


class Ranks:
    def run(self) -> dict[str, list[float]]:
        """What is off, of each case, which one of the ranks measures; on a GPU, without the one of two ranks."""
        loss = chunked_cross_entropy.chunked_cross_entropy(ChunkedCrossEntropyConfig(kernel="triton", chunk_size=5))
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = {name: self.case(loss, *case) for name, case in list(CASES.items())[rank::ranks]}
        if rank == 0:
            found["nothing to learn"] = self.nothing_to_learn(loss)
            found["NaN"] = self.nan(loss)
        if dist.is_initialized():
            found["parts"] = self.parts(loss)
        return found

    def case(self, loss: ChunkedCrossEntropy, dtype, head, coefficient: float, weighted: bool) -> list[float]:
        case = Case(dtype, head)
        expected, each = case.expected(coefficient, weighted=weighted)
        given = case.weights if weighted else None
        found, penalty = loss.with_z_loss(case.hidden, case.head, case.targets, coefficient, given)
        total, *gradients = case.of(found.total)
        assert found.count == (case.targets != -100).sum()
        return [*map(error, [total + penalty, *gradients], expected), error(found.each, each)]

    def nothing_to_learn(self, loss: ChunkedCrossEntropy) -> list[float]:
        case = Case(torch.bfloat16)
        case.targets.fill_(-100)
        return [one.abs().max().item() for one in case.of(loss(case.hidden, case.head, case.targets).total)]

    def nan(self, loss: ChunkedCrossEntropy) -> list[float]:
        """At ignored positions it does no harm; at others it is seen."""
        case, clean = Case(torch.float32), Case(torch.float32)
        with torch.no_grad():
            case.hidden[case.targets == -100] = float("nan")
        pair = [one.of(loss(one.hidden, one.head, one.targets).total) for one in (case, clean)]
        with torch.no_grad():
            case.hidden[0, 0, 0] = float("nan")
        is_seen = loss(case.hidden, case.head, case.targets).total.isnan().item()
        return [*map(error, *pair), float(not is_seen)]

    def parts(self, loss: ChunkedCrossEntropy) -> list[float]:
        case, mine = Case(torch.float32, InParts), part_of_rank()
        (total, of_hidden, *of_head), each = case.expected(0.0, weighted=False)
        found = loss(case.hidden, case.head, case.targets)
        found_total, found_hidden, *found_head = case.of(found.total)
        dist.all_reduce(found_hidden)  # as HeadInParts has it
        errors = [error(one[mine], other[mine]) for one, other in zip(found_head, of_head, strict=True)]
        return [*errors, error(found_total, total), error(found_hidden, of_hidden), error(found.each, each)]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = {
    f"{dtype} {name}": (DTYPES[dtype], *case)
    for dtype in DTYPES
    for name, case in {
        "plain": (nn.Linear, 0.0, False),
        "weighted": (nn.Linear, 0.0, True),
        "penalty": (nn.Linear, 1e-2, True),
        "capped": (CappedHead, 1e-2, True),
    }.items()
}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if DEVICE == "cuda":
        return Ranks().run()
    if Version(version("triton")) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(f"Triton {version('triton')}, which comes with torch 2.11, does not interpret with NumPy 2.4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # it is asked for when Triton is imported, which torch may do early
        first, second = on_ranks(Ranks, "run", 2)
    return {**first, **second, "parts": first["parts"] + second["parts"]}


@pytest.mark.slow  # where there is no GPU, kernels are interpreted
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_those_in_float64(errors, case: str) -> None:
    assert len(errors[case]) == 5
    assert max(errors[case]) < (1e-5 if case.startswith("fp32") else 2e-2), errors[case]


@pytest.mark.slow  # where there is no GPU, kernels are interpreted
@pytest.mark.parametrize("case", ["nothing to learn", "NaN"])
def test_what_is_ignored_counts_for_nothing(errors, case: str) -> None:
    assert max(errors[case]) == 0, errors[case]


@pytest.mark.slow  # where there is no GPU, kernels are interpreted
@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks would share one GPU")
def test_ranks_that_share_the_vocabulary_have_those_of_one(errors) -> None:
    assert max(errors["parts"]) < 1e-5, errors["parts"]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile_for_a_gpu(monkeypatch, tmp_path, capability: int) -> None:
    """Down to its machine code, by Triton's own assembler, which needs no GPU."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from triton import compile as compiled_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forge_plugins_optim import fused_softmax

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is by default, of which Triton 3.9 warns
    dtypes = {"logits": "*bf16", "targets": "*i64", "stride": "i32", "first": "i32", "n_columns": "i32", "cap": "fp32"}
    for kernel, is_capped in product((fused_softmax._find_sums, fused_softmax._write_gradient), (False, True)):
        constants = {"is_capped": is_capped, "block": fused_softmax._BLOCK}
        signature = {name: dtypes.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(
            constants, "constexpr"
        )
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)

        made = compiled_for(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})

        assert f".target sm_{capability}" in made.asm["ptx"]
        assert made.asm["cubin"]


def test_without_triton_or_a_gpu_it_is_refused(monkeypatch) -> None:
    config = ChunkedCrossEntropyConfig(kernel="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    monkeypatch.setattr(chunked_cross_entropy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"loss\.kernel: 'triton' needs the package triton, .* pip install triton"):
        chunked_cross_entropy.chunked_cross_entropy(config)
    monkeypatch.setattr(chunked_cross_entropy, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"loss\.kernel: 'triton' needs a GPU, and torch sees none"):
        chunked_cross_entropy.chunked_cross_entropy(config)


def test_a_job_for_a_cpu_that_asks_for_it_is_refused() -> None:
    settings = ["loss={name='chunked_cross_entropy', kernel='triton'}"]
    with pytest.raises(ConfigError, match=r"loss\.kernel: 'triton' runs on a GPU, and run\.device is 'cpu'"):
        load_job(JOB, [*settings, "callbacks=[]"], catalog=discover(), world_size=1)


def test_a_plan_is_made_without_the_kernel() -> None:
    """Tensors without values cannot be given to one."""

    class Kernel:
        def __init__(self, *_: object) -> None:
            pytest.fail("it is called")

    with FakeTensorMode():
        loss = ChunkedCrossEntropy(5, Kernel)
        total = loss(torch.empty(B, S, D), nn.Linear(D, V), torch.zeros(B, S, dtype=torch.long)).total
    assert total.shape == ()
