"""Time and peak memory of ``chunked_cross_entropy`` against ``cross_entropy``: forward and backward of head and loss.

    python benchmarks/losses.py [--device cuda] [--tokens 2048] [--dim 256] [--vocab 32000] [--chunks 512 1024]

The losses alternate within one run, so that the ratios mean something on a machine that others use; a time is the
median. Memory is what one forward and backward adds at its peak: to the allocator on CUDA, to the resident set on the
CPU (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy
from forge_plugins_optim.cross_entropy import CrossEntropy

MIB = 1024**2


def main() -> None:
    arguments = _arguments()
    names = ["plain", *(f"chunks of {size}" for size in arguments.chunks)]
    print(
        f"{arguments.tokens} tokens, dim {arguments.dim}, vocab {arguments.vocab}, {arguments.device}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    print(f"{'dtype':<10}{'loss':<16}{'ms':>9}{'× plain':>9}{'MiB':>9}{'× plain':>9}{'value':>14}")
    steps = {dtype: [_step(name, dtype, arguments) for name in names] for dtype in (torch.float32, torch.bfloat16)}
    values = {dtype: [step() for step in row] for dtype, row in steps.items()}
    times = {dtype: _alternating(row, arguments.repeats, arguments.device) for dtype, row in steps.items()}
    if arguments.device == "cpu":
        _give_freed_memory_back()
    for dtype, row in steps.items():
        memory = [_memory(step, arguments.device) for step in row]
        for name, value, ms, mib in zip(names, values[dtype], times[dtype], memory, strict=True):
            print(
                f"{str(dtype)[6:]:<10}{name:<16}{ms:>9.2f}{ms / times[dtype][0]:>9.2f}{mib:>9.0f}"
                f"{mib / memory[0]:>9.2f}{value:>14.8f}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="chunked against plain cross-entropy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def _step(name: str, dtype: torch.dtype, arguments: argparse.Namespace) -> Callable[[], float]:
    """A function that runs forward and backward once and returns the loss a token."""
    torch.manual_seed(0)
    hidden = torch.randn(1, arguments.tokens, arguments.dim, device=arguments.device, dtype=dtype, requires_grad=True)
    head = nn.Linear(arguments.dim, arguments.vocab, bias=False, device=arguments.device, dtype=dtype)
    targets = torch.randint(arguments.vocab, (1, arguments.tokens), device=arguments.device)
    loss: Any = CrossEntropy() if name == "plain" else ChunkedCrossEntropy(int(name.split()[-1]))

    def step() -> float:
        total, count, _ = loss(hidden, head, targets)
        (total / count).backward()
        hidden.grad = head.weight.grad = None
        return float(total.detach() / count)

    return step


def _alternating(steps: list[Callable[[], float]], repeats: int, device: str) -> list[float]:
    """Median milliseconds of each step; ``step`` waits for the device by returning a number."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def _give_freed_memory_back() -> None:
    """From here on glibc maps every tensor above 1 MiB on its own, and unmaps it when it is freed (slow, so last)."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, MIB)


def _memory(step: Callable[[], float], device: str) -> float:
    """MiB that one step adds at its peak."""
    step()
    if device == "cuda":
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - allocated) / MIB
    ctypes.CDLL(None).malloc_trim(0)  # or what the step allocates may be resident from before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now (proc(5))
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
