"""Sums in float64 on every device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_plugins_interp.wide import wide


def test_values_are_kept_and_have_no_gradient():
    values = torch.tensor([1 / 3, 2.0], requires_grad=True)

    assert wide(values).tolist() == values.tolist()
    assert not wide(values).requires_grad


@pytest.mark.parametrize(("device", "where"), [("mps", "cpu"), ("cuda", "cuda")])
def test_they_leave_their_device_only_where_it_has_no_float64(device, where):
    with FakeTensorMode():
        found = wide(torch.zeros(3, dtype=torch.bfloat16, device=device))

    assert (found.device.type, found.dtype) == (where, torch.float64)
