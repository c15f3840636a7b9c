"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Llama on Hugging Face."""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from forge_plugins_dense.rope_config import Llama3Scaling, LongRope, YarnScaling

Scaling = Llama3Scaling | YarnScaling | LongRope


def rotary_tables(
    positions: torch.Tensor,
    head_dim: int,
    theta: float,
    scaling: Scaling | None = None,
    factor: float = 1.0,
    lengths: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angle ``position · theta^(−2i / head_dim) / factor`` of each pair of features ``i``.

    They are computed where they are needed, from constants, rather than kept as buffers: a buffer would have to be
    initialised after a build on meta, and would be rounded when a model is cast to bf16.

    Args:
        positions: ``(B, S)`` int64; or ``(B, S, head_dim / 2)``, one for each pair.
        head_dim: features of a head that are rotated.
        lengths: of the sequence or packed document that a position is in, which ``LongRope`` asks for: one number, or
            ``(B, S)`` or ``(B, 1)`` int64.

    Returns:
        Two ``(B, S, 1, head_dim / 2)`` fp32, which broadcast over heads.
    """
    frequencies = _frequencies(head_dim, theta, scaling, positions.device)
    if isinstance(scaling, LongRope) and head_dim > 0:
        frequencies = frequencies / _long_rope_factors(scaling, lengths, positions.device)
    if factor != 1:
        frequencies = frequencies / factor
    of_pairs = positions[:, :, None] if positions.ndim == 3 else positions[:, :, None, None]
    angles = of_pairs.float() * frequencies
    if isinstance(scaling, LongRope) and scaling.attention_factor is not None:
        return angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of features ``(i, i + R / 2)`` of the first R features; the others stay as they are.

    Args:
        x: ``(B, S, H, head_dim)`` of any floating dtype; rotated in fp32, because the products of a rounded cosine lose
            the position in long sequences, and cast back.
        cos, sin: from ``rotary_tables``, of ``R / 2`` pairs.
    """
    rotated = 2 * cos.shape[-1]
    if rotated == 0:
        return x
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)


def _frequencies(head_dim: int, theta: float, scaling: Scaling | None, device: torch.device) -> torch.Tensor:
    """``(head_dim / 2,)`` fp32, radians a token, from constants on the device (a copy from the host would wait)."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / head_dim)
    if scaling is None or isinstance(scaling, LongRope):
        return frequencies
    if isinstance(scaling, YarnScaling):
        fast = _fast_in_yarn(pairs / 2, head_dim, theta, scaling)
        return frequencies * (fast + (1.0 - fast) / scaling.factor)

    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (fast + (1.0 - fast) / scaling.factor)


def _long_rope_factors(scaling: LongRope, lengths: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """``(head_dim / 2,)`` fp32, or ``(B, S or 1, 1, head_dim / 2)`` where sequences have lengths of their own."""
    if isinstance(lengths, int):
        is_long = lengths > scaling.original_max_seq_len
        return _on_device(scaling.long_factor if is_long else scaling.short_factor, device)
    is_long_each = (lengths > scaling.original_max_seq_len)[:, :, None, None]
    return torch.where(is_long_each, _on_device(scaling.long_factor, device), _on_device(scaling.short_factor, device))


_ON_DEVICES: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}


def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """A copy from the host waits for the device, and so is made once and not in each step."""
    found = _ON_DEVICES.get((values, device))
    if found is None:
        found = torch.tensor(values, dtype=torch.float32, device=device)
        if not isinstance(found, FakeTensor):  # which is one of a plan alone
            _ON_DEVICES[values, device] = found
    return found


def _fast_in_yarn(pair: torch.Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """1 for pairs that stay as they are, 0 for the ones that become slower, a straight line between: arXiv 2309.00071,
    section 3.2, with the ends of the line rounded to whole pairs, if that is asked for, as in the authors' code."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return 1.0 - ((pair - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
