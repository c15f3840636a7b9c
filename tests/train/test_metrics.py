"""Figures of a step's speed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.train.metrics import Metrics


def test_mfu_counts_what_batches_take_beside_their_tokens_as_if_all_data_parallel_ranks_had_as_much(monkeypatch):
    """Two steps in four seconds, of 100 tokens on 8 ranks, 4 of them with data of their own."""
    window: Any = SimpleNamespace(
        _since=10.0,
        _steps=2,
        _beside=600.0,
        _waited_before=0.0,
        _tokens_a_step=100,
        _peak_flops=50.0,
        _model=SimpleNamespace(flops_per_token=7.0),
        _run=SimpleNamespace(
            device=torch.device("cpu"),
            mesh=SimpleNamespace(dp_size=4, world_size=8),
            loader=SimpleNamespace(seconds_waiting=0.0),
        ),
    )
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)

    speed = Metrics._speed(window)

    assert speed["step_seconds"] == 2
    assert speed["mfu"] == pytest.approx((100 * 7 + 4 * 600 / 2) / (2 * 8 * 50))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("mps", torch.float32)])
def test_values_of_a_step_go_to_the_host_in_the_widest_type_of_the_device(device, dtype):
    """MPS has no float64. Fake tensors are on it on any machine."""
    run = SimpleNamespace(
        device=torch.device(device), mesh=None, reports=SimpleNamespace(take=lambda mesh, device: {}), loader=None
    )
    with FakeTensorMode():
        logged: Any = SimpleNamespace(_run=run, _ready=(1, {"loss": torch.zeros((), device=device)}, {}), _pending=None)
        Metrics.send(logged)

    assert logged._pending.values._values.dtype == dtype
