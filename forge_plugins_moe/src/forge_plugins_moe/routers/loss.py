"""Auxiliary losses of routers. All values are sums over valid tokens (``Routing.auxiliary``), without a coefficient."""

from __future__ import annotations

import torch


def load_balance(probability: torch.Tensor, load: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """``E · Σ_t Σ_i f_i · p_{t,i}``: probability is pushed away from experts with a large fraction ``f`` of the load.

    Over the tokens by which ``f`` was counted this is T times ``E · Σ_i f_i · P_i`` with ``P = mean_t p_t`` (Fedus et
    al. 2021, arXiv 2101.03961, equations 4 to 6, for every choice of a token over K): T where all is even, T · E / K at
    most. DeepSeek-V3's sequence-wise loss (Liu et al. 2024, arXiv 2412.19437, equations 17 to 20) is the same by
    sequence, each weighted by its length.

    Args:
        probability: ``(T, E)`` fp32, 1 in sum.
        load: ``(E,)`` or ``(T, E)`` fp32, assignments to each expert among the tokens that a token is balanced with;
            the gradient does not pass it.
        valid: ``(T,)`` bool; ``None``: all.
    """
    load = load.detach()
    fraction = load / load.sum(-1, keepdim=True).clamp(min=1e-9)
    by_token = probability.shape[1] * (fraction * probability).sum(-1)
    return (by_token if valid is None else by_token * valid).sum()


def z_loss(logits: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The router z-loss, ``Σ_t logsumexp_i(ℓ_{t,i})²`` (Zoph et al. 2022, arXiv 2202.08906, equation 5, times T)."""
    by_token = logits.logsumexp(-1).square()
    return (by_token if valid is None else by_token * valid).sum()


def squared_variation(values: torch.Tensor) -> torch.Tensor:
    """The squared coefficient of variation, variance over squared mean, of ``(E,)`` (Shazeer et al. 2017, arXiv
    1701.06538, equation 7); the variance is that of all of them, not of a sample."""
    return values.var(correction=0) / (values.mean().square() + 1e-10)
