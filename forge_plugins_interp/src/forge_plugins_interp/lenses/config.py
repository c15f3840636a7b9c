"""The keys of lenses that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class TunedLensConfig:
    """``[parallel.passes.tuned_lens]``. ``[checkpoint.load]`` names the run whose model is read."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """A loss that is not used, and layouts in which no rank has a whole prediction."""
        if job.loss.name != "own":
            yield "", f"has a loss of its own, so that loss.name = {job.loss.name!r} has no effect; name 'own'"
        for axis in ("tp", "pp"):
            if getattr(job.parallel, axis) > 1:
                yield "", f"each rank predicts from every layer, which parallel.{axis} shares out; set it to 1"
        if job.parametrization is not None:
            yield "", "translators have no size at a base width; take [parametrization] out"
