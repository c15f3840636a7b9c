"""The keys of mixtures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

import attrs
from attrs.validators import ge, gt, matches_re, min_len

from forge_core.api import ComponentRef, Slot
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.errors import nearest_hint
from forge_plugins_data.hub_config import samples_per_step
from forge_plugins_data.mixed_entries import mixed_entries


@attrs.frozen(kw_only=True)
class MixtureSource:
    """One source of a mixture."""

    name: str = attrs.field(validator=matches_re(r"[A-Za-z0-9][A-Za-z0-9_.-]*"))
    """Its name in metrics, as in ``loss/<name>``: letters, digits, ``_``, ``.`` and ``-``. With the run's seed, it
    decides the order of the source's samples."""
    weight: float = attrs.field(validator=ge(0.0))
    """Its share of the samples, in proportion to the others'; weights need not add up to 1. 0 switches it off."""
    source: Annotated[ComponentRef, Slot("data_source")]
    """The data, any source with its keys, but for ``shuffle``, ``workers`` and ``prefetch``."""
    loss_weight: float = attrs.field(default=1.0, validator=ge(0.0))
    """How much a target of this source counts in the training loss, beside those of the others. ``loss/<name>`` and
    evaluations stay without it."""

    @property
    def holds_out(self) -> bool:
        """Whether it has samples for evaluation, as far as its keys say."""
        return bool(getattr(self.source.config, "validation", not self.streams))

    @property
    def streams(self) -> int:
        """As how many streams it is read, as far as its keys say; 0 if it is not."""
        config = self.source.config
        found = getattr(config, "streams", 0) if getattr(config, "has_own_order", False) else 0
        return found if isinstance(found, int) else 0


def _sources(_: object, __: object, value: tuple[MixtureSource, ...]) -> None:
    if not value:
        raise ValueError("must have at least one source")
    names = [one.name for one in value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"names the source {twice[0]!r} twice; give each a name of its own")
    if not any(one.weight for one in value):
        raise ValueError("has weights that are all 0, so that there is nothing to train on; give one a weight")
    if not any(one.weight * one.loss_weight for one in value):
        raise ValueError("has a loss_weight of 0 for each source with a weight, so that there is nothing to learn")


@attrs.frozen(kw_only=True)
class MixturePhase:
    """``phases.data`` of a mixture."""

    weights: Mapping[str, float] = attrs.field(validator=min_len(1))
    """Weights of sources by name, from the phase on to the next that has some; others keep those of ``[data]``."""


@attrs.frozen(kw_only=True)
class MixtureConfig(DataSourceConfig):
    """Several sources, each with its share of the samples. Each position of the run has its source, on any number of
    ranks, and before any position each source has had its share, give or take two samples.

    A source that comes to its end begins another epoch, in another order. Evaluations have all that the sources hold
    out. With sources that are read as streams, the mixture is read as streams itself: as many as the greatest common
    divisor of how many they have. So many data-parallel ranks there are at most.
    """

    has_own_order: ClassVar[bool] = True
    Phase: ClassVar[type] = MixturePhase
    sources: tuple[MixtureSource, ...] = attrs.field(validator=_sources)
    """Arrays of tables: ``[[data.sources]]``, each with ``name``, ``weight`` and ``source``."""
    temperature: float = attrs.field(default=1.0, validator=gt(0.0))
    """Shares are in proportion to ``weight ** (1 / temperature)``: above 1 brings them closer together."""

    @property
    def document_mask(self) -> bool:
        """Whether a source keeps documents apart, as far as its keys say."""
        return any(getattr(one.source.config, "document_mask", False) for one in self.sources)

    def shares(self, phase: MixturePhase | None = None) -> tuple[float, ...]:
        """The share of each source, which add up to 1.

        Args:
            phase: whose weights count.
        """
        weights = [one.weight if phase is None else phase.weights.get(one.name, one.weight) for one in self.sources]
        powers = [(weight / max(weights)) ** (1 / self.temperature) for weight in weights]
        return tuple(power / sum(powers) for power in powers)

    def missing(self) -> Iterable[str]:
        """Paths of the sources that are not there."""
        for one in self.sources:
            yield from one.source.config.missing()

    def entries(self) -> Mapping[str, Entry]:
        """Those of its sources."""
        return mixed_entries(one.source.config.entries() for one in self.sources)

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Mixtures within it; what is held out of what is evaluated whole; an evaluation of nothing; phases."""
        if job.data.config is self:
            yield from self._check_phases(job)
            yield from self._check_streams(job)
        own = job.eval.data.config if job.eval.data is not None else None
        for index, one in enumerate(self.sources):
            if isinstance(one.source.config, MixtureConfig):
                yield f"sources[{index}].source", "is a mixture itself; name its sources here, with their own weights"
            if own is self and getattr(one.source.config, "validation", None) and hasattr(one.source.config, "path"):
                key = f"sources[{index}].source.validation"
                yield key, "has no effect here: data named under [eval.data] are evaluated whole; remove it"
            if own is self and one.streams:
                yield f"sources[{index}].source", "is read as streams, which have no end, and cannot be evaluated"
        holds_out = any(one.holds_out for one in self.sources)
        if job.data.config is self and own is None and job.eval.interval > 0 and not holds_out:
            sentence = (
                "hold nothing out and there is no [eval.data], so that eval.interval has nothing to evaluate; set "
                "validation in one of them, name data under [eval.data], or set eval.interval = 0"
            )
            yield "sources", sentence

    def _check_streams(self, job: Job) -> Iterable[tuple[str, str]]:
        numbers = {one.name: one.streams for one in self.sources if one.streams}
        total, streams = samples_per_step(job), math.gcd(*numbers.values())
        said = ", ".join(f"{name} has {number}" for name, number in numbers.items())
        together = f"are read together as {streams} stream{'s' * (streams > 1)} ({said})"
        if streams and total is not None and total % streams:
            sentence = f"a number that must divide train.global_batch_size, {total}: each has the same part of a step"
            yield "sources", f"{together}, {sentence}"
        if 0 < streams < (ranks := job.parallel.dp_replicate * job.parallel.dp_shard):
            sentence = f"and there are {ranks} data-parallel ranks, each of which reads at least one"
            yield "sources", f"{together}, {sentence}; give all of them one number, {ranks} or more, or use fewer ranks"

    def _check_phases(self, job: Job) -> Iterable[tuple[str, str]]:
        names = [one.name for one in self.sources]
        for index, phase in enumerate(job.phases):
            weights = phase.data.get("weights")
            if not isinstance(weights, Mapping):
                continue
            for name, weight in weights.items():
                if name not in names:
                    hint = nearest_hint(name, names)
                    yield "sources", f"phases[{index}].data.weights names {name!r}, and there is no such source{hint}"
                elif isinstance(weight, (int, float)) and weight < 0:
                    yield "sources", f"phases[{index}].data.weights gives {name!r} the weight {weight}, below 0"
            if not any(weights.get(one.name, one.weight) for one in self.sources):
                yield "sources", f"phases[{index}].data.weights are all 0, so that there is nothing to train on"
