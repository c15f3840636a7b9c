"""The dispatcher of experts that are all on one rank."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_plugins_moe.dispatch import Assignments, LocalDispatcher, _few_tokens

TOKENS, EXPERTS, TOP_K, DIM = 6, 4, 2, 8


@pytest.mark.parametrize(("top_k", "at_a_time"), [(TOP_K, TOKENS), (TOP_K, 4), (None, TOKENS)])
def test_what_it_computes_and_its_gradients_are_those_of_a_sum_in_float64(top_k, at_a_time, monkeypatch):
    numbers = at_a_time * TOP_K * DIM
    monkeypatch.setattr("forge_plugins_moe.dispatch._CACHED", numbers // torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    expert = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).flatten()
    weight = torch.rand(TOKENS * TOP_K, generator=generator).requires_grad_()
    factors = torch.randn(EXPERTS, generator=generator, dtype=torch.float64)  # what each expert multiplies by
    towards = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)

    def gradients(output):
        (output * towards).sum().backward()
        found = tokens.grad, weight.grad
        tokens.grad = weight.grad = None
        return found

    token = torch.arange(TOKENS).repeat_interleave(TOP_K)
    dispatcher = LocalDispatcher(EXPERTS)
    sent = dispatcher.dispatch(tokens, Assignments(token, expert, weight, top_k))
    output = dispatcher.combine(sent.rows * factors.repeat_interleave(sent.counts)[:, None], sent)
    expected = tokens * (factors[expert] * weight.double()).view(TOKENS, TOP_K).sum(1, keepdim=True)

    torch.testing.assert_close(output, expected, rtol=1e-14, atol=1e-14)
    for found, wanted in zip(gradients(output), gradients(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13 if found.dtype == torch.float64 else 1e-6, atol=0)


class PlannedForGpu(FakeTensorMode):
    gpu = "h100"


@pytest.mark.parametrize(("mode", "parts"), [(PlannedForGpu, 1), (FakeTensorMode, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_plan_for_a_gpu_sums_all_tokens_at_once(mode, parts, threads, monkeypatch):
    """Not as many as the threads of the machine on which it is made have room for."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with mode():
        place, rows = torch.empty(4096, 2, dtype=torch.int64), torch.empty(8192, 256)
    assert len([*_few_tokens(place, rows)]) == parts
