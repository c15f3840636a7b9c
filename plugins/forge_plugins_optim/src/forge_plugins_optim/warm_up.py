"""The warm-up that all schedules have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs.validators import and_, ge, gt, le, optional

from forge_core.contracts.scheduler import Schedule
from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.config.sections import Job


def _alone(config: WarmUp, field: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a second length, in the field that stands later in the class."""
    earlier = [name for name in ("warmup_steps", "warmup_tokens") if name != field.name and getattr(config, name)]
    if value is not None and earlier:
        raise ValueError(f"cannot be given together with {earlier[0]}: each says how long the warm-up is; keep one")


@attrs.frozen(kw_only=True)
class WarmUp:
    """Keys of every schedule: how long the learning rate rises, in steps, in tokens or as a part of the run."""

    warmup_steps: int = attrs.field(default=0, validator=ge(0))
    """Steps over which the learning rate rises linearly, from 1/``warmup_steps`` of it at the first update; update
    ``warmup_steps`` is the first with all of it."""
    warmup_tokens: float | None = attrs.field(default=None, validator=[optional(gt(0)), _alone])
    """The same in tokens of all ranks, padding included, such as ``2e9``: as many steps as it takes to see them."""
    warmup_fraction: float | None = attrs.field(default=None, validator=[optional(and_(ge(0), le(1))), _alone])
    """The same as a part of ``train.steps``, rounded to a step."""

    least_after: ClassVar[int] = 1
    """Steps that must be left after the warm-up."""

    def contradictions(self, total_steps: int, tokens_per_step: int | None) -> Iterator[tuple[str, str]]:
        """What cannot be in a run of ``total_steps`` steps: (key, sentence).

        Args:
            tokens_per_step: ``None`` where the number of ranks, from which it follows, is not known yet.
        """
        if self.warmup_tokens is not None and tokens_per_step is None:
            return
        warmup = self.warm_up(total_steps, tokens_per_step)
        if warmup <= total_steps - self.least_after:
            return
        key = next((one for one in ("warmup_tokens", "warmup_fraction") if getattr(self, one)), "warmup_steps")
        written = getattr(self, key)
        lasts = "" if key == "warmup_steps" else f", which lasts {warmup} steps"
        if tokens_per_step is not None and key == "warmup_tokens":
            lasts += f" of {tokens_per_step} tokens"
        if self.least_after:
            limit = f"must be below train.steps = {total_steps}, or nothing is left of the run after the warm-up"
        else:
            limit = f"must not be above train.steps = {total_steps}"
        yield key, f"{limit}; got {written:g}{lasts}" if key != "warmup_steps" else f"{limit}; got {written}"

    def warm_up(self, total_steps: int, tokens_per_step: int | None) -> int:
        """The steps of the warm-up; 0 without one."""
        if self.warmup_tokens is not None:
            assert tokens_per_step is not None, "whoever asks knows it"
            return math.ceil(self.warmup_tokens / tokens_per_step)
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * total_steps)
        return self.warmup_steps

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """The contradictions in a job, at validation; with the run, once the number of ranks is known."""
        sequences = job.train.global_batch_size
        tokens_per_step = None if sequences is None else sequences * job.train.seq_len
        yield from self.contradictions(job.train.steps, tokens_per_step)


def refuse_contradictions(config: WarmUp, total_steps: int, tokens_per_step: int) -> int:
    """The steps of the warm-up.

    Raises:
        ConfigError: something of ``config`` cannot be in a run of ``total_steps`` steps.
    """
    for key, sentence in config.contradictions(total_steps, tokens_per_step):
        raise ConfigError(f"scheduler.{key} {sentence}")
    return config.warm_up(total_steps, tokens_per_step)


def after_warm_up(warmup: int, rest: Callable[[int], float]) -> Schedule:
    """``step / warmup`` up to step ``warmup``, which is the first with all of the learning rate, and then ``rest`` of
    the steps since. Steps count from 1, so the first update is never zero."""

    def multiplier(step: int) -> float:
        return step / warmup if step <= warmup else rest(step - warmup)

    return multiplier
