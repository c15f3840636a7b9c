"""Attention in a sliding window beside causal attention without one, by FlexAttention's compiled kernel.

Forward on a CPU, which has no backward of that kernel; forward and backward on a GPU. Median of alternating pairs.
Allowed at 4,096 positions and a window of 512: 0.35. Usage: ``python benchmarks/windows.py [--device cuda]``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from forge_plugins_dense.attention import attend
from forge_plugins_dense.mask import document_block_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    found: dict[int, list[float]] = {0: [], arguments.window: []}
    runs = {window: attention(arguments.seq_len, window, torch.device(arguments.device)) for window in found}
    for run in runs.values():
        run()  # compiles
    for _ in range(arguments.rounds):
        for window, run in runs.items():
            started = time.perf_counter()
            run()
            found[window].append(time.perf_counter() - started)
    ratio = statistics.median(one / full for full, one in zip(*found.values(), strict=True))
    full, one = (1000 * statistics.median(seconds) for seconds in found.values())
    what = "forward" if arguments.device == "cpu" else "forward and backward"
    print(f"{arguments.seq_len} positions, {what} on {arguments.device}: {full:.1f} ms")
    print(f"window of {arguments.window}: {one:.1f} ms, {ratio:.3f} of it")


def attention(seq_len: int, window: int, device: torch.device):
    """One call, of 8 heads of 64 in bf16 on a GPU and in fp32 on a CPU, to its end."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    q, k, v = (torch.randn(1, 8, seq_len, 64, device=device, dtype=dtype, requires_grad=is_gpu) for _ in range(3))
    mask = document_block_mask(torch.zeros(1, seq_len, dtype=torch.int64, device=device), window)

    def run() -> None:
        mixed = attend(q, k, v, mask, False, "flex")
        if is_gpu:
            mixed.sum().backward()
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    main()
