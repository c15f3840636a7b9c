"""What can be said of a job's data in numbers and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen(kw_only=True)
class StepFacts:
    """The batch of a step, of all ranks."""

    step: int
    """Counts from 1."""
    numbers: Sequence[int]
    """Where its samples are in the whole stream."""
    samples: Sequence[int]
    """Their numbers in the source; in each one's own of a mixture, or in its stream. Of a source that says itself what
    stands where, the same as ``numbers``."""
    streams: Sequence[int] | None = None
    """The stream that each is of, from 0, of data that are read as streams."""
    sample_sources: Sequence[str] | None = None
    """The source of a mixture that each is of, by name."""
    sources: Mapping[str, int] | None = None
    """How many samples each source of a mixture has given."""
    left_out: Sequence[Sequence[int]] = ()
    """Stretches of the whole stream that the run goes without after a rollback, each by its first and last number:
    those behind the step before, up to the last sample of this step."""
    update_left_out: bool | None = None
    """Whether the run has left its update out, by its ``events.jsonl``. Null without this file, and of a job that has
    not run."""
    targets: int
    """Tokens that are learned."""
    documents: int | None = None
    """Documents, or parts of them; null if the source does not tell."""
    texts: Sequence[str] | None = None
    """The first samples as text, if they are shown."""
    learned: Sequence[Sequence[str]] | None = None
    """Of each of these the parts that are learned, if that is not all of it."""


@attrs.frozen(kw_only=True)
class PartFacts:
    """Sizes of one source of a mixture."""

    name: str
    samples: int | None
    """In the source; null, as the next one, if it has an order of its own, or is read as streams."""
    tokens: int | None
    documents: int | None
    """As in ``DataFacts``."""
    read: int
    """How many samples the whole run reads of it, by the weights of all phases."""
    epochs: float | None
    """How often that is all of them."""


@attrs.frozen(kw_only=True)
class DataFacts:
    """Sizes of a job's training data."""

    source: str
    """The component's name."""
    vocab_size: int
    tokenizer: str | None
    """Its class; null without one."""
    seq_len: int
    """Tokens of a sample."""
    samples_per_step: int
    """Over all ranks."""
    fingerprint: str
    samples: int | None = None
    """In the source; null, as the next two, if it has an order of its own."""
    tokens: int | None = None
    epochs: float | None = None
    """In the whole run."""
    documents: int | None = None
    """In the data, where the source knows. Those of windows of token files are counted with what is held out."""
    parts: Sequence[PartFacts] | None = None
    """The sources of a mixture."""
    lines: int | None = None
    """Of files with conversations or answers."""
    cut: int | None = None
    """How many of these lines are longer than a sample."""
    skipped: int | None = None
    """And those without anything to learn."""


@attrs.frozen(kw_only=True)
class InspectedJob(DataFacts):
    """A job's training data, and the batch of a step."""

    entries: Mapping[str, Sequence[int]]
    """The shape of each entry of the batch."""
    batch: StepFacts
