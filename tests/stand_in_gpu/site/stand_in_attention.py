"""The attention kernels of a GPU, by plain products: what they take, what they refuse, and the shapes of what they give
are the kernels'. ``device.cpp`` chooses among them."""

from __future__ import annotations

import math

import torch

_HALF = (torch.bfloat16, torch.float16)
Tensors = tuple[torch.Tensor, ...]


def register() -> torch.library.Library:
    """They last as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (_flash, _flash_backward, _efficient, _efficient_backward, _cudnn, _cudnn_backward):
        name = kernel.__name__.removeprefix("_").replace("_backward", "")
        backward = "_backward" if kernel.__name__.endswith("_backward") else ""
        library.impl(f"_scaled_dot_product_{name}_attention{backward}", kernel, "CUDA")
    return library


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _must(q.dtype in _HALF, f"flash attention has no kernel for {q.dtype}")
    _must(q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0, f"flash attention with {q.shape[-1]} features")
    out, sums = _attend(q, k, v, None, dropout_p, is_causal, scale)
    return out, sums, None, None, q.shape[2], k.shape[2], *_generator_states(q), q.new_empty(0)


def _flash_backward(grad_out, q, k, v, out, sums, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None):
    _must((mq, mk) == (q.shape[2], k.shape[2]), f"lengths {mq} and {mk}")
    return _gradients(grad_out, q, k, v, out, sums, None, is_causal, scale)[:3]


def _efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    _must(q.shape[1] == k.shape[1], "efficient attention has no grouped heads")
    for one in (q, v):
        _must(one.shape[-1] * one.element_size() % 16 == 0, "efficient attention takes rows of 16 bytes")
    out, sums = _attend(q, k, v, attn_bias, dropout_p, is_causal, scale)
    kept = sums.new_full((*sums.shape[:2], -(-sums.shape[2] // 32) * 32 if compute_log_sumexp else 0), math.inf)
    if compute_log_sumexp:
        kept[..., : sums.shape[2]] = sums
    return out.transpose(1, 2).contiguous().transpose(1, 2), kept, *_generator_states(q)


def _efficient_backward(
    grad_out, q, k, v, attn_bias, out, sums, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    _must(sums.shape[2] == -(-q.shape[2] // 32) * 32, f"{sums.shape[2]} sums of {q.shape[2]} queries")
    gradients = _gradients(grad_out, q, k, v, out, sums[..., : q.shape[2]], attn_bias, is_causal, scale)
    return tuple(one if is_wanted else None for one, is_wanted in zip(gradients, grad_input_mask, strict=True))


def _cudnn(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    _must(q.dtype in _HALF, f"cuDNN's attention has no kernel for {q.dtype}")
    _must(all(one.shape[-1] <= 128 and one.shape[-1] % 8 == 0 for one in (q, v)), "cuDNN's attention: features")
    out, sums = _attend(q, k, v, attn_bias, dropout_p, is_causal, scale)
    return out, sums.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_generator_states(q), None


def _cudnn_backward(
    grad_out, q, k, v, out, sums, seed, offset, attn_bias, cq, ck, mq, mk, dropout_p, is_causal, *, scale=None
):
    _must(sums.shape[2:] == (q.shape[2], 1), f"sums are of shape {tuple(sums.shape)}")
    return _gradients(grad_out, q, k, v, out, sums.squeeze(-1), attn_bias, is_causal, scale)[:3]


def _attend(q, k, v, bias, dropout_p, is_causal, scale) -> Tensors:
    """The output, and the log-sum-exp of each query in fp32: ``(B, H, S, D)`` and ``(B, H, S)``."""
    _must(dropout_p == 0.0, "there is no dropout here")
    _must(q.dtype == k.dtype == v.dtype, f"dtypes {q.dtype}, {k.dtype} and {v.dtype}")
    logits = _logits(q, _for_each_query(k, q), bias, is_causal, scale)
    sums = logits.logsumexp(-1)
    weights = (logits - sums.unsqueeze(-1)).exp().nan_to_num(0.0)  # a query that sees nothing has the output 0
    return (weights @ _for_each_query(v, q).float()).to(q.dtype), sums


def _gradients(grad_out, q, k, v, out, sums, bias, is_causal, scale) -> Tensors:
    """Of queries, keys, values and bias."""
    keys, values, gradient = _for_each_query(k, q), _for_each_query(v, q).float(), grad_out.float()
    weights = (_logits(q, keys, bias, is_causal, scale) - sums.unsqueeze(-1)).exp().nan_to_num(0.0)
    inner = (gradient * out.float()).sum(-1, keepdim=True)
    of_logits = weights * (gradient @ values.transpose(2, 3) - inner)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_q = of_logits @ keys.float() * factor
    of_k, of_v = of_logits.transpose(2, 3) @ q.float() * factor, weights.transpose(2, 3) @ gradient
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    of_k, of_v = (one.unflatten(1, groups).sum(2) for one in (of_k, of_v))
    of_bias = None if bias is None else of_logits.sum_to_size(bias.shape).to(bias.dtype)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_bias


def _logits(q, keys, bias, is_causal, scale) -> torch.Tensor:
    logits = q.float() @ keys.float().transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if is_causal:
        _must(q.shape[2] == keys.shape[2], "causal attention of other keys than those of the queries")
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -math.inf)
    return logits


def _for_each_query(heads: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], 1)


def _generator_states(q: torch.Tensor) -> Tensors:
    return tuple(torch.zeros((), dtype=torch.long, device=q.device) for _ in range(2))


def _must(holds: bool, sentence: str) -> None:
    if not holds:
        raise RuntimeError(f"the stand-in's kernel: {sentence}")
