"""Options that are off add no operation to a block: it runs what Llama's block, written out, runs."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.rope import rotary_tables


class Operations(TorchDispatchMode):
    """Counts the operations that compute something; a view does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def llama_block(block, hidden, cos, sin):
    """Touvron et al. 2023 (arXiv 2302.13971), with grouped keys and values."""
    attention, layer = block.attention, block.feed_forward
    batch, length, dim = hidden.shape

    def heads(projection, normed):
        return F.linear(normed, projection.weight).view(batch, length, -1, attention.head_dim)

    def turned(x):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    normed = F.rms_norm(hidden, (dim,), block.attention_norm.weight, block.attention_norm.eps)
    q, k, v = turned(heads(attention.q, normed)), turned(heads(attention.k, normed)), heads(attention.v, normed)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), attention.o.weight)
    normed = F.rms_norm(hidden, (dim,), block.feed_forward_norm.weight, block.feed_forward_norm.eps)
    gated = F.silu(F.linear(normed, layer.gate.weight)) * F.linear(normed, layer.up.weight)
    return hidden + F.linear(gated, layer.down.weight)


def test_a_block_without_options_runs_the_operations_of_llama(tiny_model):
    block = tiny_model().blocks["0"].train()
    values = torch.randn(2, 16, 32)
    cos, sin = rotary_tables(torch.arange(16)[None], block.attention.head_dim, 10_000.0)

    def run(forward):
        block.zero_grad()
        hidden = values.clone().requires_grad_()
        with Operations() as seen:
            out = forward(hidden)
            out.square().sum().backward()
        return out, [hidden.grad, *(parameter.grad for parameter in block.parameters())], seen.counts

    ours = run(lambda hidden: block(hidden, BlockInputs(cos, sin, causal=True)))
    plain = run(lambda hidden: llama_block(block, hidden, cos, sin))

    torch.testing.assert_close(ours[0], plain[0])
    torch.testing.assert_close(ours[1], plain[1])
    assert ours[2] == plain[2]
