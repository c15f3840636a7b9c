"""Operations on tensors without memory, of which torch is asked once a form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_plugins_plan import operations
from forge_plugins_plan.memory import MemoryLedger
from forge_plugins_plan.work import Recorder, Work

OPERATIONS = {
    "made": lambda one, other: one @ other.T,
    "of another type": lambda one, _: one.bfloat16(),
    "without an argument": lambda *_: torch.empty(3, 2),
    "several": lambda one, _: torch.native_layer_norm(one, [6], None, None, 1e-5),
    "joined": lambda one, other: torch.cat([one, other]),
    "written into": lambda one, other: one.add_(other),
    "a list": lambda one, other: torch._foreach_add([one, other], 1.0),
    "a view": lambda one, _: one.detach(),
    "a part": lambda one, _: one[1:, 2:4],
    "parts": lambda one, _: one.split(2),
    "of another shape": lambda one, _: one.T.reshape(3, 8),
    "spread": lambda one, _: one[:1].expand(5, 6),
    "bits": lambda one, _: one.view(torch.int32),
    "a loss": lambda one, _: F.cross_entropy(one, torch.zeros(4, dtype=torch.long)),
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(operations, "_KNOWN", {})


@pytest.fixture
def asked(monkeypatch):
    """The names of the operations that torch is asked for."""
    names = []
    before = FakeTensorMode.dispatch

    def dispatch(mode, func, *given):
        names.append(func.__name__)
        return before(mode, func, *given)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    return names


def described(results, given):
    """All that counts of tensors, and which of those that are given have the same memory."""
    several = results if isinstance(results, (tuple, list)) else [results]
    return [
        (
            type(one),
            (one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.untyped_storage().nbytes()),
            [one is each for each in given],
            [one.untyped_storage()._cdata == each.untyped_storage()._cdata for each in given],
        )
        for one in several
    ]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_made_again_is_what_torch_makes(operation, asked):
    with FakeTensorMode():
        given = torch.empty(4, 6), torch.empty(4, 6)
        expected = described(operation(*given), given)
        with MemoryLedger(Recorder(8)) as ledger:
            operation(*given)
            first = [one for one in ledger.log if isinstance(one, Work)]
            ledger.log.clear()
            asked.clear()
            assert described(operation(*given), given) == expected
            assert [one for one in ledger.log if isinstance(one, Work)] == first
    assert asked == []


def test_what_is_given_twice_is_read_once():
    with FakeTensorMode(), MemoryLedger(Recorder(8)) as ledger:
        one, other = torch.empty(4), torch.empty(4)
        _ = one * other, one * one, one * other, other * other

    assert [work.size for work in ledger.log if isinstance(work, Work)] == [48, 32, 48, 32]


def test_values_that_are_known_are_those_of_each_tensor():
    """torch keeps the values of small tensors that a program writes out, and answers by them."""
    with FakeTensorMode(), MemoryLedger():
        torch.empty(()).neg()
        assert [torch.tensor(value).neg().item() for value in (1.0, 2.0)] == [-1.0, -2.0]


def test_a_tensor_changes_its_form_as_often_as_it_is_asked_to(asked):
    with FakeTensorMode(), MemoryLedger():
        for _ in range(2):
            assert torch.empty(4, 6).t_().shape == (6, 4)


def test_a_form_is_known_from_one_mode_to_the_next():
    for _ in range(2):
        with FakeTensorMode() as mode, MemoryLedger():
            assert torch.empty(4).neg().fake_mode is mode
