"""Ring attention against plain attention, on real ranks; and what it refuses."""

import sys
from types import MethodType

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental._context_parallel import _HeadTailLoadBalancer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_plugins_parallel import ring_attention
from forge_plugins_parallel.config import ContextParallelConfig
from forge_plugins_parallel.context_parallel import ContextParallel, SequencePart
from forge_plugins_parallel.ring_attention import CPU_KERNELS, CUDA_KERNELS, attending_in_a_ring, kernel_for
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallBlock, SmallModel, small_job

CPU = torch.device("cpu")
BATCH, HEADS, WIDTH = 2, 8, 16


class Causal(nn.Module):
    """Attention with a scale of its own."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def in_a_ring(module, group):
    module.forward = MethodType(attending_in_a_ring(group), module)
    return module


class Sent(TorchDispatchMode):
    """Names of the collectives, and the largest number of elements that one was given."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and not func._opname.startswith(("wait", "_wrap")):
            self.names.add(func._opname)
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


def of_all_ranks(part, group):
    """``(B, H, S, width)`` in the order of the sequence; what each rank has is its first and its last chunk."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    heads, tails = zip(*(one.chunk(2, dim=2) for one in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim=2)


def compared(group, device, *, kv_heads, dtype, seq_len=128, backend=SDPBackend.FLASH_ATTENTION):
    """Largest differences of output and gradients to plain attention in fp32; and what was sent."""
    part = SequencePart(dist.get_rank(group), dist.get_world_size(group))
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, seq_len, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    whole = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    *mine, weight = (part._cut(one.transpose(1, 2)).transpose(1, 2).detach() for one in whole)
    for one in mine:
        one.requires_grad_()
    with Sent() as sent, sdpa_kernel(backend):
        out = in_a_ring(Causal(), group)(*mine)
        gradients = torch.autograd.grad(out, mine, weight)

    *inputs, weight = (one.float().requires_grad_() for one in whole)
    with sdpa_kernel(SDPBackend.MATH):
        expected = Causal()(*inputs)
    pairs = zip((out, *gradients), (expected, *torch.autograd.grad(expected, inputs, weight)), strict=True)
    differences = [(of_all_ranks(one.detach().float(), group) - reference).abs().max() for one, reference in pairs]
    return [one.item() for one in differences], sent.names, sent.largest, sum(one.numel() for one in mine[1:])


class OnTheCpu:
    def rank(self):
        pair, _ = dist.new_subgroups(2)
        groups = {2: pair, 3: dist.new_group([0, 1, 2]), 4: dist.group.WORLD}
        return {
            (ranks, kv_heads, dtype): compared(
                group, CPU, kv_heads=kv_heads, dtype=dtype, seq_len=96 if ranks == 3 else 128
            )
            for ranks, group in groups.items()
            for kv_heads in (HEADS, 2)
            for dtype in (torch.float32, torch.bfloat16)
            if dist.get_rank(group) >= 0
        }


@pytest.fixture(scope="module")
def seen_by_ranks():
    return on_ranks(OnTheCpu, "rank", 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["each head", "grouped heads"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_together_attend_as_one_does(seen_by_ranks, ranks, kv_heads, dtype, tolerance):
    for rank, seen in enumerate(seen_by_ranks[:ranks]):
        differences, *_ = seen[ranks, kv_heads, dtype]
        assert max(differences) < tolerance, f"rank {rank}: output and gradients of q, k and v are off by {differences}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_at_a_time_is_the_keys_and_values_of_one_rank(seen_by_ranks, ranks):
    _, names, largest, of_one = seen_by_ranks[0][ranks, HEADS, torch.float32]

    assert names == {"all_to_all_single"}
    assert largest == of_one


class OnGpus:
    """So far this has been run by the stand-in for GPUs of ``tests/stand_in_gpu`` alone."""

    def rank(self):
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
        bf16, fp32 = torch.bfloat16, torch.float32
        return {
            "flash": compared(group, device, kv_heads=2, dtype=bf16, backend=SDPBackend.FLASH_ATTENTION)[0],
            "efficient": compared(group, device, kv_heads=HEADS, dtype=fp32, backend=SDPBackend.EFFICIENT_ATTENTION)[0],
            "cudnn": compared(group, device, kv_heads=2, dtype=bf16, backend=SDPBackend.CUDNN_ATTENTION)[0],
        }


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_every_kernel_attends_as_one_gpu_does():
    for seen in on_ranks(OnGpus, "rank", 2):
        for kernel, differences in seen.items():
            assert max(differences) < (1e-2 if kernel == "efficient" else 6e-2), kernel


def test_a_rank_has_the_chunks_that_torchs_ring_expects():
    place = torch.arange(48)[None]
    for ranks in (1, 2, 3, 4):
        mine = torch.cat([SequencePart(rank, ranks)._cut(place) for rank in range(ranks)], dim=1)

        assert torch.equal(mine, _HeadTailLoadBalancer(48, ranks, "cpu")._generate_indices().long())


# -- which kernel


def tensors(kv_heads=2, dtype=torch.bfloat16, width=64, tokens=128, values=None, device="meta"):
    """Meta stands for CUDA: every device but the CPU has its kernels."""
    shapes = [(1, 8, tokens, width), (1, kv_heads, tokens, width), (1, kv_heads, tokens, values or width)]
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize(
    ("of", "allowed", "chosen"),
    [
        ({}, None, "flash"),
        ({"width": 256}, None, "flash"),
        ({}, SDPBackend.CUDNN_ATTENTION, "cudnn"),
        ({"kv_heads": 8, "dtype": torch.float32}, None, "efficient"),
        ({"kv_heads": 8}, SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        ({"device": "cpu", "dtype": torch.float32, "width": 6}, None, "flash"),
    ],
)
def test_the_kernel_is_one_that_takes_what_there_is(of, allowed, chosen):
    with sdpa_kernel(allowed or [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        kernel = kernel_for(*tensors(**of))

    assert kernel.name == chosen
    assert kernel in (CPU_KERNELS if of.get("device") == "cpu" else CUDA_KERNELS)


@pytest.mark.parametrize(
    ("of", "allowed"),
    [
        ({"dtype": torch.float32}, None),  # grouped heads in fp32
        ({"kv_heads": 8, "dtype": torch.float32, "tokens": 96}, None),  # its sums would not fit halves
        ({"kv_heads": 8, "dtype": torch.float32, "width": 6}, None),
        ({"width": 264}, None),
        ({"values": 32}, None),
        ({}, SDPBackend.MATH),
        ({}, SDPBackend.EFFICIENT_ATTENTION),
        ({"width": 256}, SDPBackend.CUDNN_ATTENTION),
        ({"device": "cpu"}, SDPBackend.MATH),
        ({"device": "cpu", "values": 32}, None),
    ],
)
def test_where_no_kernel_fits_it_is_said_instead_of_attending_wrongly(of, allowed):
    with (
        sdpa_kernel(allowed or [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
        pytest.raises(ConfigError, match=r'method = "ring" finds no attention kernel .* or take method = "gather"'),
    ):
        kernel_for(*tensors(**of))


@pytest.fixture
def group_of_two():
    """One rank of it; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=[kernel.name for kernel in CUDA_KERNELS])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # torch.compile does
def test_kernels_for_cuda_are_given_what_they_take_and_give_what_they_are_given(group_of_two, kernel, compiled):
    """By torch's own description of each kernel, on tensors without memory."""
    torch.compiler.reset()
    attention = in_a_ring(Causal(), group_of_two)
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = [one.requires_grad_() for one in tensors(kv_heads=8 if kernel.name == "efficient" else 2)]
    backend = getattr(SDPBackend, f"{kernel.name.upper()}_ATTENTION")

    with sdpa_kernel(backend):
        out = attention(*inputs)
    gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))

    assert out.shape == inputs[0].shape
    for gradient, one in zip(gradients, inputs, strict=True):
        assert (gradient.shape, gradient.dtype) == (one.shape, one.dtype)


# -- what is refused


class Asking(nn.Module):
    def __init__(self, **asked):
        super().__init__()
        self.asked = asked

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.asked)


class ByHand(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Asking(is_causal=True, attn_mask=torch.ones(4, 4)), "this model asks for a mask"),
        (Asking(), "this model asks for no causal order"),
        (Asking(is_causal=True, dropout_p=0.1), "this model asks for dropout"),
        (ByHand(), "is for modules that call scaled_dot_product_attention, and ByHand has not done so"),
    ],
)
def test_attention_that_is_not_causal_is_refused(group_of_two, module, sentence):
    with pytest.raises(ConfigError, match=sentence):
        in_a_ring(module, group_of_two)(*torch.randn(3, 1, 1, 4, 8))


def test_documents_are_refused_before_anything_is_computed():
    model = nn.Module()
    model.embed = nn.Identity()
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    with pytest.raises(ConfigError, match=r'"ring" cannot keep the documents of a packed sequence apart'):
        SequencePart(0, 2, masks=False).take(model, (tokens,), {"document": tokens})


@attrs.frozen
class DataKeys:
    document_mask: bool


@attrs.frozen
class ModelKeys:
    attention: str


@pytest.mark.parametrize(
    ("method", "document_mask", "attention", "sentences"),
    [
        ("ring", False, "flash", []),
        ("gather", True, "flex", []),
        ("ring", True, "auto", ["cannot keep the documents of a packed sequence apart"]),
        ("ring", False, "flex", ['model.attention = "flex" has none']),
        ("ring", True, "math", ["cannot keep the documents", 'model.attention = "math" has none']),
    ],
)
def test_validation_refuses_what_a_ring_cannot_do(method, document_mask, attention, sentences):
    job = small_job()
    job = attrs.evolve(
        job,
        data=attrs.evolve(job.data, config=DataKeys(document_mask)),
        model=attrs.evolve(job.model, config=ModelKeys(attention)),
        parallel=attrs.evolve(job.parallel, cp=2),
    )

    said = list(ContextParallelConfig(method=method).check(job))

    assert len(said) == len(sentences)
    for (key, sentence), expected in zip(said, sentences, strict=True):
        assert key == "method"
        assert expected in sentence


def test_a_torch_without_ring_attention_is_refused_before_training(monkeypatch):
    ring_attention._torchs_ring.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor.experimental._context_parallel", None)
    join_process_group(CPU)
    job = small_job()
    context = PassContext(build_mesh(job, CPU), job, CPU)

    try:
        with pytest.raises(ConfigError, match=r'method = "ring" is made of what torch 2\.11 to 2\.15 have'):
            ContextParallel(ContextParallelConfig(method="ring")).apply(CausalModel(), context)
    finally:
        dist.destroy_process_group()


# -- as a pass


class CausalBlock(SmallBlock):
    def __init__(self, dim):
        super().__init__(dim)
        self.look = Causal()

    def forward(self, hidden, visible):
        normed = self.attention_norm(hidden)
        q, k, v = (part(normed)[:, None] for part in (self.query, self.key, self.value))
        hidden = hidden + self.output(self.look(q, k, v)[:, 0])
        return hidden + self.down(F.gelu(self.up(self.up_norm(hidden))))


class CausalModel(SmallModel):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(layer): CausalBlock(self.dim) for layer in range(self.n_layers)})

    def context_plan(self):
        return [f"blocks.{layer}.look" for layer in self.blocks]


class TestRing(ParallelPassConformance):
    component = "forge-plugins-parallel:context_parallel"
    config = {"method": "ring"}

    def make_model(self):
        return CausalModel()
