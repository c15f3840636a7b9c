"""The GPUs of this machine, dealt to runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; none on a machine without."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [one.strip() for one in environment.get(VISIBLE, "").split(",") if one.strip()]
    return named or [str(index) for index in range(torch.cuda.device_count())]


def gpus_for(place: int, nproc: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of the run at a place from 0: ``nproc`` GPUs of its own, if there are any."""
    return {VISIBLE: ",".join(gpus[place * nproc : (place + 1) * nproc])} if gpus else {}
