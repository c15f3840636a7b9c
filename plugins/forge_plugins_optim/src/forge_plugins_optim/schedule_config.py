"""The keys of schedules. Nothing here may import torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, min_len, optional

from forge_plugins_optim.warm_up import WarmUp


@attrs.frozen(kw_only=True)
class NoneConfig:
    """The schedule ``none`` has no keys; ``constant`` is the same with a warm-up."""


@attrs.frozen(kw_only=True)
class ConstantConfig(WarmUp):
    """The base learning rate throughout."""

    least_after: ClassVar[int] = 0


@attrs.frozen(kw_only=True)
class _Decay(WarmUp):
    """Keys of schedules that fall from the end of the warm-up on."""

    min_ratio: float = attrs.field(default=0.1, validator=and_(ge(0), le(1)))
    """Where the learning rate ends, as a fraction of its base."""
    decay_steps: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Steps from the end of the warm-up to ``min_ratio``, where it stays; by default the rest of the run. May be longer
    than the run, to be continued later."""


@attrs.frozen(kw_only=True)
class CosineConfig(_Decay):
    """Half a cosine (Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983, without restarts)."""


@attrs.frozen(kw_only=True)
class LinearConfig(_Decay):
    """A straight line down."""


@attrs.frozen(kw_only=True)
class PolynomialConfig(_Decay):
    """A power of what is left of the decay."""

    min_ratio: float = attrs.field(default=0.1, validator=and_(ge(0), le(1)))
    """The floor that the learning rate does not fall below, as a fraction of its base."""
    power: float = attrs.field(default=1.0, validator=gt(0))
    """The exponent; 1 is a straight line."""


@attrs.frozen(kw_only=True)
class RexConfig(_Decay):
    """REX (Chen, Wolfe and Kyrillidis, 2021, https://arxiv.org/abs/2107.04197)."""

    min_ratio: float = attrs.field(default=0.0, validator=and_(ge(0), le(1)))
    """The floor that the learning rate does not fall below, as a fraction of its base; the paper has none."""


@attrs.frozen(kw_only=True)
class InverseSqrtConfig(WarmUp):
    """One over the root of the step (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, section 5.3)."""

    timescale: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Three times so many steps after the warm-up, the learning rate is half of its base. By default the steps of the
    warm-up, as in the paper, and 10,000 without one."""
    least_after: ClassVar[int] = 0


def _not_with_steps(config: WSDConfig, _: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and config.cooldown_steps is not None:
        raise ValueError("cannot be given together with cooldown_steps: each says how long the cooldown is; keep one")


@attrs.frozen(kw_only=True)
class WSDConfig(WarmUp):
    """Warm-up, stable, decay (Hu et al., 2024, https://arxiv.org/abs/2404.06395)."""

    cooldown_steps: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Steps at the end of the run over which the learning rate falls."""
    cooldown_fraction: float | None = attrs.field(
        default=None, validator=[optional(and_(gt(0), le(1))), _not_with_steps]
    )
    """The same as a part of ``train.steps``, rounded to a step and at least one; 0.2 if neither is given."""
    shape: Literal["1-sqrt", "linear", "cosine", "sqrt-of-rest"] = "1-sqrt"
    """How it falls. ``1-sqrt`` ends lowest in Hägele et al., 2024, https://arxiv.org/abs/2405.18392."""
    min_ratio: float = attrs.field(default=0.0, validator=and_(ge(0), le(1)))
    """Where the learning rate ends, as a fraction of its base."""

    least_after: ClassVar[int] = 0

    def cooldown(self, total_steps: int) -> int:
        """The steps of the cooldown."""
        if self.cooldown_steps is not None:
            return self.cooldown_steps
        return max(1, round((0.2 if self.cooldown_fraction is None else self.cooldown_fraction) * total_steps))

    def contradictions(self, total_steps: int, tokens_per_step: int | None) -> Iterator[tuple[str, str]]:
        """Also warm-up and cooldown that are longer than the run together."""
        found = list(super().contradictions(total_steps, tokens_per_step))
        yield from found
        if found or (self.warmup_tokens is not None and tokens_per_step is None):
            return
        warmup, cooldown = self.warm_up(total_steps, tokens_per_step), self.cooldown(total_steps)
        if warmup + cooldown > total_steps:
            key = "cooldown_fraction" if self.cooldown_steps is None else "cooldown_steps"
            yield (
                key,
                f"{cooldown} steps of cooldown after {warmup} of warm-up are more than train.steps = {total_steps}",
            )


def _ascending(_: object, __: attrs.Attribute[Any], boundaries: tuple[float, ...]) -> None:
    for one, next_one in itertools.pairwise(boundaries):
        if (one < 1) != (next_one < 1):
            raise ValueError(f"must be all steps or all fractions of the run, got {one:g} and {next_one:g}")
        if next_one <= one:
            raise ValueError(f"must be in ascending order, got {next_one:g} after {one:g}")
    for one in boundaries:
        if one >= 1 and one != int(one):
            raise ValueError(f"must be whole steps, or fractions of the run below 1; got {one:g}")


def _one_more_than_boundaries(config: PiecewiseConfig, _: object, ratios: tuple[float, ...]) -> None:
    if len(ratios) != len(config.boundaries) + 1:
        raise ValueError(
            f"must have one value more than boundaries has, as {len(config.boundaries)} boundaries make "
            f"{len(config.boundaries) + 1} parts; got {len(ratios)}"
        )


@attrs.frozen(kw_only=True)
class PiecewiseConfig(WarmUp):
    """Constant in parts, as in step decay."""

    boundaries: tuple[float, ...] = attrs.field(validator=[min_len(1), deep_iterable(gt(0)), _ascending])
    """The last steps of all parts but the last one, in ascending order: steps, or fractions of ``train.steps`` if they
    are below 1."""
    ratios: tuple[float, ...] = attrs.field(
        validator=[deep_iterable(and_(ge(0), le(10**6))), _one_more_than_boundaries]
    )
    """The learning rate of each part, as a fraction of its base. The warm-up rises to the first one."""
    least_after: ClassVar[int] = 0

    def last_steps(self, total_steps: int) -> list[int]:
        """The boundaries in steps."""
        return [round(one * total_steps) if one < 1 else int(one) for one in self.boundaries]

    def contradictions(self, total_steps: int, tokens_per_step: int | None) -> Iterator[tuple[str, str]]:
        """Also boundaries with nothing of the run on one of their sides."""
        yield from super().contradictions(total_steps, tokens_per_step)
        steps = self.last_steps(total_steps)
        if steps[-1] >= total_steps:
            yield (
                f"boundaries[{len(steps) - 1}]",
                f"must be before the last step, train.steps = {total_steps}; got {steps[-1]}",
            )
        for index, (before, step) in enumerate(zip([0, *steps], steps, strict=False)):
            if step <= before:
                yield f"boundaries[{index}]", f"leaves no step to its part of a run of {total_steps} steps"
