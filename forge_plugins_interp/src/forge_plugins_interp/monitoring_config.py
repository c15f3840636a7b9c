"""The keys of what looks into a model while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
from attrs.validators import and_, ge, le, min_len

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.evaluation import EvaluationConfig
from forge_plugins_interp.metrics.config import CcaConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class RepresentationsConfig(EvaluationConfig):
    """How alike each layer is to what it was at the first evaluation of the run."""

    sites: tuple[str, ...] = attrs.field(default=("blocks.*.resid_post",), validator=min_len(1))
    """Names or patterns of sites."""
    data: Annotated[ComponentRef | None, Slot("data_source")] = None
    """Data to look at; by default the part that ``[data]`` holds out."""
    samples: int = attrs.field(default=64, validator=ge(1))
    """How many sequences, from the first."""
    over: Literal["mean", "last"] = "mean"
    """Of a sequence: the mean over its positions, or the last one."""
    metric: Annotated[ComponentRef, Slot("representation_metric", default="cka")]
    """A ``representation_metric``."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Canonical correlations need more samples than features, of which the residual stream has ``model.dim``."""
        width: int = getattr(job.model.config, "dim", 0)
        is_of_it = any(one.startswith("blocks.") and "resid" in one for one in self.sites)
        if isinstance(self.metric.config, CcaConfig) and self.samples <= width and is_of_it:
            yield "samples", f"{self.metric.name} needs more than the {width} features of a site, got {self.samples}"
        elif self.samples < self.least:
            yield "samples", f"{self.metric.name} needs at least {self.least}, got {self.samples}"

    @property
    def least(self) -> int:
        """The fewest samples that the metric takes, of sites of any width, as far as its config says so."""
        return getattr(self.metric.config, "least", 1)


@attrs.frozen(kw_only=True)
class CaptureConfig:
    """Values of sites in training steps, each captured step as a store in the run's directory."""

    sites: tuple[str, ...] = attrs.field(default=("blocks.*.resid_post",), validator=min_len(1))
    """Names or patterns of sites."""
    interval: int = attrs.field(default=100, validator=ge(1))
    """Steps between captures."""
    over: Literal["none", "last", "mean"] = "none"
    """Keep each position, the last one of a sample, or the mean over a sample."""
    features: int = attrs.field(default=0, validator=and_(ge(0), le(65536)))
    """Project on so many random directions; 0 keeps all features."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Of what is written; by default as computed."""
