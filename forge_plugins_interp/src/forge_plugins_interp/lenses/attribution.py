"""Direct logit attribution: what each layer, or head, adds to a logit (Elhage et al. 2021).

The residual stream is a sum, and the final norm is linear once its scale is that of the whole sum. So a logit is a sum,
too: of a bias and of what each part of the stream brings. D = width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_interp.lenses.logit_lens import last_residual, layer_of
from forge_plugins_interp.session import Session
from forge_plugins_interp.wide import wide

_TOLERANCE = 1e-3
"""Relative; a norm that is further from linear with a frozen scale is not one that this knows."""


@attrs.frozen
class Contribution:
    """What a part of the stream adds to the logit."""

    part: str
    """``embed``, ``blocks.3.attn`` or ``blocks.3.mlp``; ``blocks.3`` where a model has nothing between the two;
    ``blocks.3.head.5``; or ``bias``."""
    layer: int
    value: float


def attribute(
    session: Session,
    tokens: torch.Tensor,
    token: int,
    *,
    minus: int | None = None,
    position: int = -1,
    heads: bool = False,
) -> list[Contribution]:
    """The contributions to a logit, or to the difference of two. Their sum is what the head gives, but for rounding; a
    cap after the head is not linear, and is left out.

    Args:
        tokens: ``(1, S)`` int64.
        token: whose logit.
        minus: subtract the logit of this one.
        position: at which the logit is read.
        heads: attention by heads, in place of each layer's as a whole.

    Raises:
        ConfigError: the model is on several ranks; its final norm is neither like RMSNorm nor like LayerNorm; more than
            a factor is between it and the head; or heads do not add up to what attention adds.
    """
    if session.context.mesh.world_size > 1:
        raise ConfigError("contributions to logits are computed on one process; open the model without ranks")
    model: Any = session.built.parts[0]
    read: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        parts = _parts_of_stream(session, tokens, position, heads=heads)
    finally:
        hook.remove()
    whole = torch.stack([vector for _, _, vector in parts]).sum(0)
    linear = _times(_frozen(model.norm, whole), whole, wide(read[0][0, position]))
    direction, bias = _direction(model.head, linear(whole) + linear.bias, token)
    if minus is not None:
        other, other_bias = _direction(model.head, linear(whole) + linear.bias, minus)
        direction, bias = direction - other, bias - other_bias
    found = [Contribution(name, layer, float(linear(vector) @ direction)) for name, layer, vector in parts]
    return [*found, Contribution("bias", layer_of("bias"), float(linear.bias @ direction) + bias)]


def _parts_of_stream(
    session: Session, tokens: torch.Tensor, position: int, *, heads: bool
) -> list[tuple[str, int, torch.Tensor]]:
    """Name, layer and vector ``(D,)`` float64 of each summand of the last block's output at the position.

    Raises:
        ConfigError: a block does not tell what each of its heads adds.
    """
    known = session.sites.names("blocks.*.*")
    layers = sorted({layer_of(name) for name in known})
    has_middle = f"blocks.{layers[0]}.resid_mid" in known
    for needed in (f"blocks.{layer}.{site}" for layer in layers for site in ("resid_mid", "attn_head_out")):
        if heads and needed not in known:
            raise ConfigError(
                f"heads (--heads): the model has no site {needed}, so that they cannot be looked at; leave heads out"
            )
    wanted = ["blocks.*.resid_pre", "blocks.*.resid_post", *(["blocks.*.resid_mid"] if has_middle else [])]
    wanted += ["blocks.*.attn_head_out"] if heads else []
    with torch.no_grad(), session.observe(*wanted, last_residual(session)) as seen:
        session.model(tokens)

    def at(name: str) -> torch.Tensor:
        return wide(seen[name][0, position])

    found = [("embed", -1, at(f"blocks.{layers[0]}.resid_pre"))]
    for layer in layers:
        block = f"blocks.{layer}"
        before, after = at(f"{block}.resid_pre"), at(f"{block}.resid_post")
        if not has_middle:
            found.append((block, layer, after - before))
            continue
        middle = at(f"{block}.resid_mid")
        attention = middle - before
        found += (
            _heads(block, layer, at(f"{block}.attn_head_out"), attention)
            if heads
            else [(f"{block}.attn", layer, attention)]
        )
        found.append((f"{block}.mlp", layer, after - middle))
    return found


def _heads(
    block: str, layer: int, of_heads: torch.Tensor, attention: torch.Tensor
) -> list[tuple[str, int, torch.Tensor]]:
    """The heads, and what is the same for all inputs: a bias of the output projection.

    Raises:
        ConfigError: something comes between the heads and the stream, such as a norm.
    """
    rest = attention - of_heads.sum(0)
    found = [(f"{block}.head.{head}", layer, vector) for head, vector in enumerate(of_heads)]
    if rest.norm() <= _TOLERANCE * attention.norm():
        return found
    raise ConfigError(
        f"{block}: the heads do not add up to what attention adds to the stream, as this model has a bias, a norm or a "
        "factor between the two; leave heads out"
    )


@attrs.frozen
class _Frozen:
    """A norm with the scale that it has for one vector."""

    gain: torch.Tensor
    scale: torch.Tensor
    centres: bool
    bias: torch.Tensor

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        if self.centres:
            vector = vector - vector.mean(-1, keepdim=True)
        return vector * self.scale * self.gain


def _frozen(norm: nn.Module, whole: torch.Tensor) -> _Frozen:
    """Find gain, bias and scale of a norm from what it gives, so that its class need not be known.

    For a vector of +1 and −1 with mean 0, both RMSNorm and LayerNorm give gain and bias.
    """
    width = len(whole)
    parameter = next(norm.parameters(), whole)
    signs = torch.ones(width, dtype=torch.float64, device=whole.device)
    signs[1::2] = -1

    def of(vector: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            given: torch.Tensor = norm(vector.to(parameter.device, parameter.dtype)[None, None])[0, 0]
        return wide(given).to(whole.device)

    if width % 2:
        raise ConfigError(f"contributions to logits need an even width, and the model has {width}")
    large = 1e3 * signs  # beside which epsilon is nothing
    bias = (of(large) + of(-large)) / 2
    gain = (of(large) - bias) * signs
    expected = of(whole) - bias
    for centres in (False, True):
        plain = whole - whole.mean() if centres else whole
        scaled = plain * gain
        scale = (expected @ scaled) / (scaled @ scaled)
        if (expected - scale * scaled).norm() <= _TOLERANCE * expected.norm():
            return _Frozen(gain, scale, centres, bias)
    raise ConfigError(
        f"the final norm, {type(norm).__qualname__}, is neither like RMSNorm nor like LayerNorm, so that a logit is no "
        "sum of contributions"
    )


def _times(norm: _Frozen, whole: torch.Tensor, read: torch.Tensor) -> _Frozen:
    """The norm with the factor by which a model multiplies what its head reads, as Granite does."""
    plain = norm(whole) + norm.bias
    factor = float(read @ plain / (plain @ plain))
    if (read - factor * plain).norm() > _TOLERANCE * read.norm():
        raise ConfigError(
            "between its final norm and its head the model has more than a factor, so that a logit is no sum"
        )
    return attrs.evolve(norm, gain=factor * norm.gain, bias=factor * norm.bias)


def _direction(head: nn.Module, normed: torch.Tensor, token: int) -> tuple[torch.Tensor, float]:
    """The row ``(D,)`` of the head's matrix that gives a token's logit, and its bias."""
    weight: Any = head.weight
    if not 0 <= token < len(weight):
        raise ConfigError(f"token {token}: the vocabulary has the tokens 0 to {len(weight) - 1}")
    bias: Any = getattr(head, "bias", None)
    row = wide(weight[token]).to(normed.device)
    return row, 0.0 if bias is None else float(bias[token])
