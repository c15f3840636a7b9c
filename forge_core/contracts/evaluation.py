"""Evaluations: what is measured of the model beside its training loss, during a run and by ``forge eval``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from forge_core.config.sections import Job
    from forge_core.contracts.builder import Builder
    from forge_core.contracts.callback import RanksByAxis
    from forge_core.contracts.component_ref import ComponentRef
    from forge_core.contracts.data_source import DataSource
    from forge_core.contracts.tokenizer import Tokenizer


def _is_part_of_a_key(_: object, attribute: attrs.Attribute[str], value: str | None) -> None:
    if value is not None and not (len(value) <= 100 and value.translate(dict.fromkeys(b"_-.")).isalnum()):
        raise ValueError(f"{attribute.alias} must be at most 100 letters, digits, '_', '-' and '.', got {value!r}")


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """The keys that every evaluation has. Config classes of evaluations extend this one."""

    interval: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Steps between evaluations, the last step always included; 0 evaluates after the last step alone."""
    label: str | None = attrs.field(default=None, validator=_is_part_of_a_key)
    """Its values are logged as ``eval/<label>/<value>``; by default the name of the component."""


def label_of(use: ComponentRef) -> str:
    """The name under which its values are logged."""
    return getattr(use.config, "label", None) or use.name


@attrs.frozen
class LossTotal:
    """A loss over many tokens, of all ranks."""

    total: float
    """The sum over valid targets; in nats, if it has a perplexity."""
    count: float
    """Valid targets."""
    sources: Mapping[str, LossTotal] = attrs.field(factory=dict)
    """The same of each source, of data that are a mixture."""
    samples: Sequence[LossTotal] = ()
    """The same of each sample, in order, where they were asked for."""
    has_perplexity: bool = True
    """False for a loss that is no negative log-likelihood of targets (``Loss``)."""

    @property
    def mean(self) -> float:
        """The loss a target; 0 without targets."""
        return self.total / max(self.count, 1)

    @property
    def perplexity(self) -> float:
        """``exp(mean)``; infinity beyond what a float64 holds. It means something with ``has_perplexity``."""
        return math.inf if self.mean > 700 else math.exp(self.mean)


class EvaluationContext(Protocol):
    """The model, as an evaluation sees it. It works alike in every layout. All ranks call its methods together."""

    job: Job
    rank: int
    world_size: int
    device: torch.device
    tokenizer: Tokenizer | None
    """The tokenizer of the training data."""
    log: Callable[[str], None]
    """Prints a line, on rank 0."""
    parts: Sequence[nn.Module]
    """This rank's parts of the model: one, unless a pipeline interleaves."""
    mesh: RanksByAxis
    """For what is gathered over ranks."""

    def losses(self, source: DataSource, *, samples: int = 0, by: Literal["source", "sample"] = "source") -> LossTotal:
        """The job's loss over the first ``samples`` of a source, or over all of it with 0.

        Args:
            by: what it is also told of: each source of data that are a mixture, or each sample.

        Returns:
            The same on all ranks. Each sample counts once, on any number of ranks.

        Raises:
            PluginError: the loss counts other targets than there are, or does not tell the loss of each position.
        """

    def batches(self, source: DataSource, *, samples: int = 0) -> Iterator[Mapping[str, torch.Tensor]]:
        """This data-parallel rank's part of the first ``samples`` of a source, or of all of it with 0, in order.

        Every rank gets equally many batches of ``train.batch_size`` rows, on ``device``. Rows beyond the last sample
        have no targets: all of them are −100.
        """

    def predict(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The model's output for a batch of this data-parallel rank. All of them call it equally often.

        Args:
            batch: on ``device``: ``tokens`` ``(B, S)`` int64, and what else the model's forward takes. ``targets`` are
                not used.

        Returns:
            Logits ``(B, S, V)`` of whole sequences, in the compute dtype; ``None`` on ranks of earlier pipeline stages.
        """

    def looks_ahead(self) -> bool:
        """Return whether what the model gives at a position depends on later ones, as with a router by experts' choice.
        All ranks call it."""

    def sum_over_ranks(self, values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
        """Sums over the samples of this data-parallel rank to sums over those of all, equal on all ranks.

        Args:
            values: the same names on all ranks; 0 where ``predict`` gave ``None``.
        """


class Evaluation(ABC):
    """Base class. The model is in evaluation mode, and no gradients are recorded."""

    def look_at(self, parts: Sequence[nn.Module], mesh: RanksByAxis, job: Job) -> None:  # noqa: B027  # most need nothing
        """Look at the model before anything is measured; in a run, before its first step. All ranks call it together.

        Raises:
            ConfigError: it has not what this is to measure.
        """

    @abstractmethod
    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        """Measure. All ranks call it together, and each returns the same names and values.

        Returns:
            Numbers by name, logged as ``eval/<label>/<name>``. An infinite one is written as such; NaN is an error.
        """


class OpenData(Protocol):
    """Opens data that belong to the job."""

    def __call__(self, use: ComponentRef | None, key: str, /) -> DataSource:
        """Open the whole of a source, or with ``None`` the part that ``[data]`` holds out.

        Args:
            key: of the config that names the source; messages name it.

        Raises:
            ConfigError: the data cannot be opened, or have another vocabulary or tokenizer than the training data.
        """


class EvaluationFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(
        self,
        config: EvaluationConfig,
        /,
        *,
        open_data: OpenData,
        tokenizer: Tokenizer | None,
        seq_len: int,
        build: Builder,
    ) -> Evaluation:
        """Build the evaluation, and open its data, before the model is built. A factory may leave out the keywords
        ``tokenizer``, ``seq_len`` and ``build``.

        Args:
            config: extends ``EvaluationConfig``.
            tokenizer: the training data's, if they have one.
            seq_len: ``train.seq_len``.
            build: for data that another file names, which it resolves.

        Raises:
            ConfigError: what it needs is not there.
        """
