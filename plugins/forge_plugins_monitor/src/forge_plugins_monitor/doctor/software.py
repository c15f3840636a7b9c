"""Python, torch, and the libraries that torch was built with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version

from forge_core.contracts.check import CheckContext, Finding


def look(_: CheckContext) -> Iterator[Finding]:
    """Versions, and whether they go together."""
    yield Finding("Python", "fine", f"{sys.version.split()[0]} at {sys.executable}")
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that the system does not have is an OSError
        yield Finding("torch", "wrong", f"{version('torch')} cannot be imported: {error}", "reinstall torch")
        return
    yield Finding("torch", "fine", str(torch.__version__))
    yield _cuda()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        yield Finding("NCCL", "fine", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    elif torch.cuda.is_available():
        advice = "install a build of torch with NCCL; several GPUs cannot work together without it"
        yield Finding("NCCL", "warning", "this torch has none", advice)
    yield _bf16()
    yield _threads()


def _cuda() -> Finding:
    import torch

    built_for = torch.version.cuda
    if torch.cuda.is_available():
        return Finding("CUDA", "fine", f"{built_for}, {torch.cuda.device_count()} GPUs")
    if built_for is None:
        return Finding("CUDA", "fine", "this torch is built for the CPU")
    return Finding(
        "CUDA",
        "warning",
        f"torch is built for CUDA {built_for}, and sees no GPU",
        "on a login node that is as it should be; elsewhere look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the "
        f"driver is new enough for CUDA {built_for}",
    )


def _bf16() -> Finding:
    import torch

    from forge_core.distributed.mesh import emulates_bf16

    device, faster = ("GPU", "fp16") if torch.cuda.is_available() else ("CPU", "fp32")
    if not emulates_bf16(torch.device("cuda" if device == "GPU" else "cpu")):
        return Finding("bf16", "fine", f"this {device} has products in bf16")
    advice = f'train with train.precision = "{faster}" here; the default, bf16, takes several times as long'
    return Finding("bf16", "warning", f"this {device} emulates products in bf16", advice)


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None or not text.isdecimal() or int(text) <= cores:
        return Finding("cores", "fine", f"{cores} for this process, OMP_NUM_THREADS {text or 'not set'}")
    advice = f"set OMP_NUM_THREADS to at most {cores}, or ask the scheduler for more cores a rank"
    return Finding("cores", "warning", f"{cores} for this process, OMP_NUM_THREADS={text}", advice)
