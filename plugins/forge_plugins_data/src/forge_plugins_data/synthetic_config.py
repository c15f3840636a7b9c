"""The keys of samples that are made up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import attrs
from attrs.validators import ge, le

from forge_core.config.sections import Job
from forge_core.contracts.data_source import DataSourceConfig


@attrs.frozen(kw_only=True)
class SyntheticConfig(DataSourceConfig):
    """Samples that are made up, and can be learned: a Markov chain. There is no end of them.

    Each token is one of ``branching`` that the ``order`` tokens before it allow, the first twice as likely as the
    second, and so on by halves. A model that has learned the chain has a loss of the chain's entropy rate, in nats:
    1.137 with ``branching = 4``, however large the vocabulary is. (With an ``order`` above 1, not of the first targets
    of a sample, which have fewer tokens before them.)
    """

    has_own_order: ClassVar[bool] = True
    vocab_size: int = attrs.field(default=256, validator=[ge(2), le(2**20)])
    """Token ids are below this."""
    order: int = attrs.field(default=1, validator=[ge(1), le(8)])
    """Tokens that the next one depends on. There are ``vocab_size`` to the power of it to learn."""
    branching: int = attrs.field(default=4, validator=[ge(1), le(32)])
    """Tokens that may follow; 1 leaves nothing to chance."""
    chain: int = 0
    """Which chain: the same number is the same chain in every run. The samples drawn from it follow from the run's
    seed."""
    validation: int = attrs.field(default=0, validator=ge(0))
    """Samples for evaluation, of the same chain, that are not trained on. Under ``[eval.data]``, how many there are."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """More branches than tokens; an evaluation without samples."""
        if self.branching > self.vocab_size:
            yield "branching", f"must be at most vocab_size = {self.vocab_size}, got {self.branching}"
        own = job.eval.data.config if job.eval.data is not None else None
        is_evaluated = own is self or (own is None and job.data.config is self)
        if is_evaluated and job.eval.interval > 0 and self.validation == 0:
            yield "validation", "is 0, so that eval.interval has nothing to evaluate; set it to a number of samples"
