"""A job's data as its run sees them: what there is, and which samples each step has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.config.describe import printable
from forge_core.config.sections import Job
from forge_core.contracts.batch import MixedSource, NamesSources
from forge_core.contracts.data_source import PositionedSource, Source
from forge_core.contracts.loss import IGNORED
from forge_core.data.stream import SampleStream
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import ConfigError
from forge_core.job import load_job, resolve_degrees
from forge_core.registry.catalog import Catalog
from forge_core.train.sources import data_seed, open_source
from forge_plugins_data.answers import PackedAnswers
from forge_plugins_data.job_facts import DataFacts, PartFacts, StepFacts
from forge_plugins_data.mixture import Mixture
from forge_plugins_data.mixture_parts import Part
from forge_plugins_data.token_samples import TokenSamples

_SHOWN = 72
"""Characters of a sample's text in a line."""


@attrs.frozen(kw_only=True)
class JobData:
    """The training data of a job, in the order in which its run reads them."""

    job: Job
    source: Source
    stream: SampleStream

    @property
    def samples_per_step(self) -> int:
        """Over all ranks."""
        assert self.job.train.global_batch_size, "it has been resolved"
        return self.job.train.global_batch_size

    def facts(self) -> DataFacts:
        """Sizes of the data, in samples and tokens."""
        seq_len = self.job.train.seq_len
        found = DataFacts(
            source=self.job.data.name,
            vocab_size=self.source.vocab_size,
            tokenizer=None if self.source.tokenizer is None else type(self.source.tokenizer).__name__,
            seq_len=seq_len,
            samples_per_step=self.samples_per_step,
            fingerprint=self.source.fingerprint,
        )
        if isinstance(self.source, TokenSamples):
            found = attrs.evolve(found, documents=self.source.documents)
        if isinstance(self.source, MixedSource):
            found = attrs.evolve(found, parts=[*self._parts(self.source)])
        if not isinstance(self.source, PositionedSource):
            n = len(self.source)
            epochs = self.job.train.steps * self.samples_per_step / n
            found = attrs.evolve(found, samples=n, tokens=n * seq_len, epochs=epochs)
        if isinstance(self.source, PackedAnswers):
            lines = self.source.lines
            found = attrs.evolve(found, lines=lines["lines"], cut=lines["cut"], skipped=lines["skipped"])
        return found

    def _parts(self, source: MixedSource) -> Iterator[PartFacts]:
        """The sources of a mixture, in their order."""
        parts: Sequence[Part] = getattr(source, "parts", ())  # a mixture of a plugin does not say them
        read = source.counts(self.job.train.steps * self.samples_per_step)
        for part, n_read in zip(parts, read, strict=False):
            yield PartFacts(
                name=part.name,
                samples=part.samples,
                tokens=None if part.samples is None else part.samples * self.job.train.seq_len,
                documents=part.source.documents if isinstance(part.source, TokenSamples) else None,
                read=n_read,
                epochs=None if part.samples is None else n_read / part.samples,
            )

    def step(self, number: int) -> tuple[StepFacts, dict[str, np.ndarray]]:
        """The batch of a step from 1, of all ranks: where its samples are in the whole stream, which ones of the source
        they are, what they are made of; and the samples themselves."""
        positions = (number - 1) * self.samples_per_step + np.arange(self.samples_per_step)
        if self.stream.streams is not None:  # they are read from their start, and all of that is not to be kept
            self.stream.streams.forget_before(self.stream.samples_read(int(positions[0])))
        batch = self.stream.read(positions)
        valid = batch["targets"] != IGNORED  # what fills up a sample has none
        samples, streams = self._samples(positions)
        found = StepFacts(
            step=number,
            numbers=self.stream.numbers(positions).tolist(),
            samples=samples.tolist(),
            streams=None if streams is None else streams.tolist(),
            left_out=self._left_out(positions),
            targets=int(valid.sum()),
        )
        if isinstance(self.source, NamesSources):
            names = self.source.names
            counts = np.bincount(batch["source"], minlength=len(names)).tolist()
            of_each = [names[number] for number in batch["source"].tolist()]
            found = attrs.evolve(found, sources=dict(zip(names, counts, strict=True)), sample_sources=of_each)
        if "document" in batch:
            documents = int((np.where(valid, batch["document"], -1).max(axis=1) + 1).sum())
            found = attrs.evolve(found, documents=documents)
        return found, batch

    def _samples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Which samples stand at ``positions`` ``(B,)``, and of which streams: both int64 ``(B,)``."""
        numbers = self.stream.numbers(positions)
        if self.stream.streams is not None:
            samples, streams = np.divmod(numbers, self.stream.streams.n_streams)
            return samples, streams
        if isinstance(self.source, Mixture):
            return self.source.samples_at(numbers)[1], None
        if isinstance(self.source, PositionedSource):
            return numbers, None
        return self.stream.indices(positions), None

    def _left_out(self, positions: np.ndarray) -> list[tuple[int, int]]:
        """The stretches that are left out behind the last position before ``positions``, by first and last number."""
        before = self.stream.numbers(positions[:1] - 1)[0] if positions[0] else -1
        last = self.stream.numbers(positions[-1:])[0]
        return [(start, stop - 1) for start, stop in self.stream.left_out if before < start < last]

    def learned(self, batch: dict[str, np.ndarray], number: int) -> list[list[str]]:
        """Of the first samples of a batch whose documents are learned in part, the parts that are, decoded. None if
        all documents are learned."""
        if not _is_partly_learned(batch):
            return []
        return [
            [self._decoded(part) for part in _parts(row)] for row in batch.get("answers", batch["targets"])[:number]
        ]

    def texts(self, batch: dict[str, np.ndarray], number: int) -> list[str]:
        """The first samples of a batch, decoded; as ids without a tokenizer."""
        return [self._decoded(row) for row in batch["tokens"][:number]]

    def _decoded(self, ids: np.ndarray) -> str:
        tokenizer = self.source.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids.tolist())


def job_on(
    world_size: int, path: Path, overrides: Sequence[str], catalog: Callable[..., Catalog], options: Sequence[str]
) -> Job:
    """A job with the global batch that it has on so many ranks.

    Args:
        path: its configuration, with ``overrides``.
        options: of the command, for the hint about a misspelt one.

    Raises:
        ConfigError: as ``load_job``.
    """
    job = load_job(path, overrides, catalog=catalog, world_size=world_size, options=options)
    degrees, train = resolve_degrees(job.parallel, world_size), job.train
    ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    total = train.global_batch_size or train.batch_size * (train.grad_accumulation or 1) * ranks
    return attrs.evolve(job, train=attrs.evolve(train, global_batch_size=total))


@contextmanager
def opened(job: Job, catalog: Catalog, left_out: Sequence[tuple[int, int]] = ()) -> Iterator[JobData]:
    """The training data of a job, opened as a run of one process would.

    Args:
        job: with the global batch of its run.
        left_out: stretches of the stream that the run goes without.

    Raises:
        ConfigError: they cannot be opened, or a run would refuse them.
    """
    join_process_group(torch.device("cpu"))
    try:
        source = open_source(job, job.data, "data", "train", ComponentBuilder(catalog), lambda: None)
        stream = SampleStream(source, data_seed(job), job.data.config.shuffle, left_out)
        _refuse_uneven_streams(stream, job)
        yield JobData(job=job, source=source, stream=stream)
    finally:
        dist.destroy_process_group()


def _refuse_uneven_streams(stream: SampleStream, job: Job) -> None:
    """
    Raises:
        ConfigError: as a run does, if not every stream has the same part of a step.
    """
    total = job.train.global_batch_size
    assert total, "it has been resolved"
    if stream.streams is not None and total % stream.streams.n_streams:
        raise ConfigError(
            f"data: train.global_batch_size must be a multiple of the number of streams, {stream.streams.n_streams}, "
            f"of which each has the same part of a step; it is {total}"
        )


def _is_partly_learned(batch: dict[str, np.ndarray]) -> bool:
    """Return whether a target within a document that has others is left out."""
    if "document" not in batch:
        return False
    learned = batch["targets"] != IGNORED
    for document, row in zip(batch["document"], learned, strict=True):
        inside = np.diff(document, append=-1) == 0  # all but the last tokens of documents
        has_targets = np.isin(document, document[row])
        if (has_targets & inside & ~row).any():
            return True
    return False


def _parts(targets: np.ndarray) -> list[np.ndarray]:
    """The targets ``(N,)`` of a sample, each unbroken part for itself."""
    at = np.flatnonzero(targets != IGNORED)
    return np.split(targets[at], np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []


def in_one_line(text: str) -> str:
    """The beginning of a sample's text, for a terminal."""
    line = printable(text.replace("\n", "⏎"))
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: ``48 to 63``, ``48 to 51, 60 to 63``."""
    ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    parts = [(numbers[a], numbers[b - 1]) for a, b in zip([0, *ends], [*ends, len(numbers)], strict=True)]
    return ", ".join(f"{first} to {last}" if first != last else str(first) for first, last in parts)
