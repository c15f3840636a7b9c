"""Single kernels against a plain reference."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_core.contracts.loss import IGNORED
from forge_plugins_moe.grouped import grouped_product
from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy, chunked_cross_entropy
from forge_plugins_optim.loss_config import ChunkedCrossEntropyConfig
from gpu_steps.machine import seconds_of
from gpu_steps.step import Figures, Setting, SkippedError, must

COUNTS = ([0, 1, 7, 0, 24], [0, 0, 0, 0, 0], [32, 0, 0, 0, 0], [3, 3, 3, 3, 3])
"""Rows of each of five experts."""
SHAPES = {
    "llama": (32, 8, 128, 128),
    "small_heads": (16, 16, 64, 64),
    "latent": (16, 16, 192, 128),
    "latent_padded": (16, 16, 192, 192),
}
"""Query heads, key-value heads, features of a query and of a value."""
PROJECTIONS = {"qkv": (4096, 1024, 1024), "gate_up": (14336, 14336)}
"""Rows of the matrices of Llama's 8B that multiply one input, of 4,096 features."""
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def experts(setting: Setting) -> Figures:
    """``grouped_product`` and its gradients in bf16 and fp32 against fp64, for experts with 0, 1 and 7 rows."""
    worst: dict[str, float] = {}
    for dtype, counts in itertools.product((torch.bfloat16, torch.float32), COUNTS):
        distance = _experts_distance(setting, dtype, counts)
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), distance)
    figures = {f"error_{name}": float(f"{distance:.1e}") for name, distance in worst.items()}
    figures["time_to_torch"] = round(_time_to_torch(setting), 3)
    bounds = {"bfloat16": 1e-2, "float32": 1e-5}
    return must({f"{name} is off by {worst[name]:.1e}": not worst[name] < bounds[name] for name in bounds}, figures)


def _experts_distance(setting: Setting, dtype: torch.dtype, counts: list[int]) -> float:
    """The largest of the product's and both gradients', for a gradient that is expanded, as that of a sum is."""
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), 64, generator=generator).to(setting.device, dtype).requires_grad_()
    weight = torch.randn(len(counts), 128, 64, generator=generator).to(setting.device, dtype).requires_grad_()
    out = grouped_product(torch.tensor(counts, device=setting.device), weight)(rows, weight)
    out.sum().backward()
    with torch.no_grad():
        parts = [part.double() @ one.double().T for part, one in zip(rows.split(counts), weight, strict=True)]
        of_rows = [one.double().sum(0).expand(count, -1) for count, one in zip(counts, weight, strict=True)]
        of_weight = [part.double().sum(0).expand(128, -1) for part in rows.split(counts)]
    expected = (torch.cat(parts), torch.cat(of_rows), torch.stack(of_weight))
    return max(_relative(got, want) for got, want in zip((out, rows.grad, weight.grad), expected, strict=True))


def _time_to_torch(setting: Setting) -> float:
    """Time of forward and backward of 8 experts at work, ours over torch's own operator."""
    count, side = (64, 64) if setting.tiny else (16384, 2048)
    rows, weight = (
        torch.randn(*shape, side, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((count,), (8, side))
    )
    counts = torch.full((8,), count // 8, device=setting.device)
    ends = counts.cumsum(0, dtype=torch.int32)
    gradient = torch.randn(count, side, device=setting.device, dtype=torch.bfloat16)

    def ours() -> None:
        torch.autograd.grad(grouped_product(counts, weight)(rows, weight), (rows, weight), gradient)

    def torchs() -> None:
        out = F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        torch.autograd.grad(out, (rows, weight), gradient)

    return seconds_of(ours, setting) / seconds_of(torchs, setting)


def _relative(got: torch.Tensor | None, want: torch.Tensor) -> float:
    assert got is not None
    norm = want.norm().item()
    return (got.double() - want).norm().item() / norm if norm else float(got.double().norm().item())


def losses(setting: Setting) -> Figures:
    """Head and loss in chunks of 2,048 tokens, forward and backward in bf16: Triton's kernels over torch's operations,
    in time and in what is added at the peak; and how far the kernels are off from fp64."""
    if importlib.util.find_spec("triton") is None:
        raise SkippedError("Triton is not installed")
    tokens, dim, vocabulary = (64, 32, 5000) if setting.tiny else (16384, 4096, 128256)
    steps = {name: _loss_step(setting, name, tokens, dim, vocabulary) for name in ("torch", "triton")}
    seconds = {name: seconds_of(step, setting) for name, step in steps.items()}
    figures: dict[str, float | int | str] = {
        "error_bfloat16": float(f"{_loss_distance(setting):.1e}"),
        "torch_ms": round(seconds["torch"] * 1e3, 2),
        "time_to_torch": round(seconds["triton"] / seconds["torch"], 3),
    }
    if setting.is_gpu:
        added = {name: _added_at_the_peak(step) for name, step in steps.items()}
        figures |= {
            "torch_mib": round(added["torch"] / 2**20),
            "memory_to_torch": round(added["triton"] / added["torch"], 3),
        }
    off = float(figures["error_bfloat16"])
    return must({f"it is off by {off:.1e}": not off < 2e-2}, figures)


def _loss_step(setting: Setting, kernel: str, tokens: int, dim: int, vocabulary: int) -> Callable[[], None]:
    loss = _chunked_loss(kernel, 2048)
    hidden = torch.randn(1, tokens, dim, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(dim, vocabulary, bias=False, device=setting.device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (1, tokens), device=setting.device)

    def step() -> None:
        torch.autograd.grad(loss(hidden, head, targets).total, [hidden, head.weight])

    return step


def _chunked_loss(kernel: str, chunk_size: int) -> ChunkedCrossEntropy:
    return chunked_cross_entropy(ChunkedCrossEntropyConfig(kernel=kernel, chunk_size=chunk_size))


def _loss_distance(setting: Setting) -> float:
    """The largest of the total's and both gradients', with targets that are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64, 32, generator=generator).to(setting.device, torch.bfloat16).requires_grad_()
    head = nn.Linear(32, 5000, bias=False)
    nn.init.normal_(head.weight, generator=generator)
    head.to(setting.device, torch.bfloat16)
    targets = torch.randint(5000, (1, 64), generator=generator).to(setting.device)
    targets[0, ::5] = IGNORED
    total = _chunked_loss("triton", 24)(hidden, head, targets).total
    logits = F.linear(hidden.double(), head.weight.double()).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    found, wanted = ([one, *torch.autograd.grad(one, [hidden, head.weight])] for one in (total, expected))
    return max(_relative(got.detach(), want.detach().double()) for got, want in zip(found, wanted, strict=True))


def _added_at_the_peak(step: Callable[[], None]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def projections(setting: Setting) -> Figures:
    """Products of one input with the matrices that a decoder keeps apart, over those with one fused matrix, forward and
    backward, written out and compiled: the most that fusing them could win. ``joined`` copies the matrices into one in
    each forward, which names, shards and optimizers would not notice."""
    tokens, parts = (64, 32) if setting.tiny else (16384, 1)
    hidden = torch.randn(tokens, 4096 // parts, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
    figures = {}
    for name, rows in PROJECTIONS.items():
        whole = torch.randn(sum(rows) // parts, hidden.shape[1], device=setting.device, dtype=torch.bfloat16)
        whole.requires_grad_()
        apart = [one.detach().clone().requires_grad_() for one in whole.split([count // parts for count in rows])]
        gradient = torch.randn(tokens, len(whole), device=setting.device, dtype=torch.bfloat16)
        ways = {"apart": (_products, apart), "joined": (_joined_products, apart), "fused": (_products, [whole])}
        for form, compiled in (("written_out", lambda products: products), ("compiled", _compiled)):
            seconds = {
                way: seconds_of(
                    functools.partial(_with_gradients, compiled(products), hidden, weights, gradient), setting
                )
                for way, (products, weights) in ways.items()
            }
            figures[f"{name}_{form}_ms"] = round(seconds["apart"] * 1e3, 2)
            for way in ("apart", "joined"):
                figures[f"{name}_{form}_{way}_to_fused"] = round(seconds[way] / seconds["fused"], 3)
    return figures


_compiled = functools.partial(torch.compile, dynamic=False)


def _products(hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [F.linear(hidden, weight) for weight in weights]


def _joined_products(hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return F.linear(hidden, torch.cat([*weights])).split([len(weight) for weight in weights], dim=-1)


def _with_gradients(
    products: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> None:
    gradients = gradient.split([len(weight) for weight in weights], dim=1)
    torch.autograd.grad(products(hidden, weights), [hidden, *weights], gradients)


def attention(setting: Setting) -> Figures:
    """The kernel that torch takes for each shape in causal bf16, and milliseconds of forward and backward of each.

    On a GPU none may be computed by plain products: torch says nothing when it falls back to them.
    """
    batch, seq_len = (1, 128) if setting.tiny else (2, 4096)
    figures: dict[str, float | int | str] = {}
    problems = {}
    for name, shape in SHAPES.items():
        given = _factors(setting, batch, seq_len, shape)
        taken = _taken(given)
        figures[f"{name}_takes"] = taken
        problems[f"{name} takes {taken}, no kernel of its own"] = setting.is_gpu and taken in ("math", "unknown")
        for kernel, backend in KERNELS.items():
            if kernel == "math" and not setting.tiny:
                continue  # four gigabytes of weights, and what everybody avoids
            try:
                with sdpa_kernel(backend):
                    seconds = seconds_of(lambda given=given: _both_ways(given), setting, rounds=5)
            except RuntimeError:
                figures[f"{name}_{kernel}_ms"] = "none"
            else:
                figures[f"{name}_{kernel}_ms"] = round(seconds * 1e3, 2)
    return must(problems, figures)


def _factors(setting: Setting, batch: int, seq_len: int, shape: tuple[int, int, int, int]) -> list[torch.Tensor]:
    heads, kv_heads, features, of_value = shape
    sizes = ((heads, features), (kv_heads, features), (kv_heads, of_value))
    return [
        torch.randn(batch, count, seq_len, size, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        for count, size in sizes
    ]


def _both_ways(given: list[torch.Tensor]) -> None:
    q, k, v = given
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    torch.autograd.grad(mixed.sum(), given)


def _taken(given: list[torch.Tensor]) -> str:
    """By the name of what is called last: torch does not say."""
    with torch.profiler.profile() as profile:
        _both_ways(given)
    names = {event.key for event in profile.key_averages()}
    known = {
        "_scaled_dot_product_flash_attention": "flash",
        "_scaled_dot_product_cudnn_attention": "cudnn",
        "_scaled_dot_product_efficient_attention": "efficient",
        "_scaled_dot_product_attention_math": "math",
    }
    found = [kernel for part, kernel in known.items() if any(part in name for name in names)]
    return found[0] if found else "unknown"
