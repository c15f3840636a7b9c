"""Batches of tensors: read ahead in background threads, cut for one data-parallel rank, always in the same order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import torch

from forge_core.contracts.data_source import DataSource, PositionedSource
from forge_core.contracts.loss import IGNORED
from forge_core.data.counts import counted_entry, with_counts
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError, noting

Batch = dict[str, torch.Tensor]
"""The arrays of ``DataSource.read`` as CPU tensors with ``batch_size`` rows."""


class BatchLoader(Iterator[list[Batch]], AbstractContextManager["BatchLoader"]):
    """An endless iterator over steps; each is the list of this rank's ``grad_accumulation`` microbatches.

    The step that starts at position ``p`` covers ``p … p + G − 1`` of the stream, where
    ``G = batch_size · grad_accumulation · dp_size``; microbatch ``m`` of rank ``r`` has the ``batch_size`` positions
    from ``p + (m · dp_size + r) · batch_size``. Of streams, each rank has its part of a step's positions in the order
    of the streams that they are of, so that it reads as few streams as possible. What a step consists of depends on
    ``G`` alone, and a run can be continued on any cut of the same ``G``.

    Args:
        stream: read from several threads.
        position: where the first step starts.
        batch_size: samples a microbatch a data-parallel rank.
        grad_accumulation: microbatches a step.
        dp_rank: this rank's number among the ``dp_size`` ranks that read different samples.
        dp_size: their number.
        workers: background threads; 0 reads when asked. Batches are the same for any number.
        prefetch: microbatches to read ahead, over all workers.
        pin_memory: put tensors into page-locked memory, for copies to a CUDA device that do not block.

    Raises:
        ConfigError: the source has fewer samples than a step needs, so that some would be used twice in one step; or
            streams cannot be dealt to the ranks.
    """

    position: int
    """Where the step after the last yielded one starts. With what the stream leaves out, the only state there is."""
    seconds_waiting: float
    """Wall time spent in ``__next__`` since the start, in seconds: what the data cost the training thread."""

    def __init__(
        self,
        stream: SampleStream,
        *,
        position: int,
        batch_size: int,
        grad_accumulation: int,
        dp_rank: int,
        dp_size: int,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        self.seconds_waiting = 0.0
        self._pin_memory = pin_memory
        self._batch_size = batch_size
        self._grad_accumulation = grad_accumulation
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="forge-data") if workers else None
        self._ahead: deque[Future[Batch]] = deque()
        self._closed = False
        self.stream = stream
        self.position = position
        self.deal(dp_rank, dp_size)

    def __next__(self) -> list[Batch]:
        """Return the next step's microbatches.

        Raises:
            Exception: the source failed, also in a background thread; a note says where it read. The loader is closed.
        """
        if self._closed:
            raise RuntimeError("the batch loader is closed")
        started = time.perf_counter()
        try:
            step = [self._next_microbatch() for _ in range(self._grad_accumulation)]
        except BaseException:
            self.close()
            raise
        self.position += self.samples_per_step
        if (streams := self.stream.streams) is not None:
            streams.forget_before(self.stream.samples_read(self.position))
        self.seconds_waiting += time.perf_counter() - started
        return step

    def deal(self, dp_rank: int, dp_size: int) -> None:
        """From the next step on, be this one of so many ranks. The next step starts where it would have, and has the
        samples that ``dp_size`` ranks need: none is left out, and none comes twice.

        Raises:
            ConfigError: as the constructor.
        """
        batch_size, grad_accumulation, source = self._batch_size, self._grad_accumulation, self.stream.source
        self.samples_per_step = batch_size * grad_accumulation * dp_size
        samples = None if isinstance(source, PositionedSource) else len(source)
        if samples is not None and samples < self.samples_per_step:
            raise ConfigError(
                f"the training data have {samples} samples, fewer than the {self.samples_per_step} of one "
                f"step (batch_size {batch_size} × grad_accumulation {grad_accumulation} × {dp_size} data-parallel "
                f"rank{'s' * (dp_size > 1)}). Use more data, shorter sequences or smaller batches."
            )
        offsets = np.arange(self.samples_per_step)
        if (streams := self.stream.streams) is None:
            self._offsets = offsets.reshape(grad_accumulation, dp_size, batch_size)[:, dp_rank]
        else:
            _refuse_to_deal(streams.n_streams, dp_size, self.samples_per_step)
            steps = self._prefetch // grad_accumulation + 2  # begun, or asked for, at a time
            streams.ahead = steps * self.samples_per_step // streams.n_streams
            by_stream = offsets.reshape(-1, streams.n_streams).T
            self._offsets = by_stream.reshape(dp_size, grad_accumulation, batch_size)[dp_rank]
        self.restart(self.stream, self.position)

    def restart(self, stream: SampleStream, position: int) -> None:
        """Go on at ``position`` of ``stream``. What has been read ahead is forgotten."""
        for read in self._ahead:
            read.cancel()
        self._ahead.clear()
        self.stream = stream
        self.position = position
        self._to_read = _microbatches_from(position, self._offsets, self.samples_per_step)

    def numbers_of_step(self, start: int) -> list[int]:
        """Where this rank's samples of the step that starts at position ``start`` are in the whole stream."""
        return [*self.stream.numbers(start + self._offsets.reshape(-1)).tolist()]

    def step_at(self, start: int) -> Iterator[Batch]:
        """This rank's microbatches of the step that starts at position ``start``, once more; the loader stays where it
        is."""
        for offsets in self._offsets:
            yield self._read(start + offsets)

    def with_noise(self, microbatches: Sequence[Mapping[str, torch.Tensor]], seed: int) -> list[Batch]:
        """The step that was yielded last, with the entry ``noise``, ``(B, S)`` int64: for one seed, a number that no
        other token of the run has, whichever rank has it."""
        numbers = self.numbers_of_step(self.position - self.samples_per_step)
        samples = torch.tensor(numbers).view(len(microbatches), -1, 1)
        key = seed * 0x9E37_79B9_7F4A_7C15 % 2**62
        lengths = [batch["tokens"].shape[1] for batch in microbatches]
        noise = [(rows * n + torch.arange(n)) ^ key for rows, n in zip(samples, lengths, strict=True)]
        return [{**batch, "noise": one} for batch, one in zip(microbatches, noise, strict=True)]

    def close(self) -> None:
        """Stop reading ahead and end the threads, after the reads that are under way. May be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_microbatch(self) -> Batch:
        if self._pool is None:
            return self._read(next(self._to_read))
        while len(self._ahead) <= self._prefetch:  # the one that is asked for, and those ahead of it
            self._ahead.append(self._pool.submit(self._read, next(self._to_read)))
        return self._ahead.popleft().result()

    def _read(self, positions: np.ndarray) -> Batch:
        with noting(f"raised while the samples at positions {positions[0]} to {positions[-1]} were read"):
            batch = _tensors(self.stream.read(positions))
            _refuse_samples(batch, positions, self.stream.source.vocab_size)
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self._pin_memory else batch


def _microbatches_from(start: int, offsets: np.ndarray, samples_per_step: int) -> Iterator[np.ndarray]:
    """The positions of each microbatch from that of a step on.

    Args:
        offsets: of each microbatch's samples in its step.
    """
    while True:
        yield from start + offsets
        start += samples_per_step


def _refuse_samples(batch: Batch, positions: np.ndarray, vocab_size: int) -> None:
    """
    Raises:
        ConfigError: there are other samples than asked for, or ids are no int64; or one has an id that is none, or a
            weight that is negative, infinite, NaN or no fp32.
    """
    tokens, targets, weights = batch["tokens"], batch["targets"], batch.get("weights")
    if len(tokens) != len(positions) or targets.shape != tokens.shape:
        found = f"tokens {tuple(tokens.shape)} and targets {tuple(targets.shape)}"
        raise ConfigError(f"data: {len(positions)} samples were asked for, and what came has {found}")
    if not tokens.dtype == targets.dtype == torch.int64:
        raise ConfigError(f"data: tokens and targets must be int64, and are {tokens.dtype} and {targets.dtype}")
    if weights is not None and weights.dtype != torch.float32:
        raise ConfigError(f"data: weights of targets must be float32, and are {weights.dtype}")
    must = f"ids are 0 to {vocab_size - 1}"
    checks = [("token", tokens, (tokens < 0) | (tokens >= vocab_size), must)]
    checks += [("target", targets, ((targets < 0) & (targets != IGNORED)) | (targets >= vocab_size), must)]
    if weights is not None:
        is_wrong = ~(weights.isfinite() & (weights >= 0))
        checks += [("the weight of target", weights, is_wrong, "weights must be finite and not negative")]
    for what, values, is_wrong, must in checks:
        if is_wrong.any():
            row, column = is_wrong.nonzero()[0].tolist()
            place = f"{what} {column} of the sample at position {positions[row]}"
            raise ConfigError(f"data: {place} is {values[row, column].item()}; {must}")


def _refuse_to_deal(n_streams: int, dp_size: int, samples_per_step: int) -> None:
    """
    Raises:
        ConfigError: not every rank has a stream, or not every stream has the same part of a step.
    """
    if dp_size > n_streams:
        raise ConfigError(
            f"data: there are {dp_size} data-parallel ranks and {n_streams} stream{'s' * (n_streams > 1)}, and each "
            "rank reads at least one; use more streams, or fewer ranks"
        )
    if samples_per_step % n_streams:
        raise ConfigError(
            f"data: train.global_batch_size must be a multiple of the number of streams, {n_streams}, of which each "
            f"has the same part of a step; it is {samples_per_step}"
        )


def evaluation_batches(
    source: DataSource, *, batch_size: int, dp_rank: int, dp_size: int, samples: int
) -> Iterator[Batch]:
    """This rank's part of the first ``samples`` of ``source``, or of the whole of it, in order.

    Every rank gets the same number of batches of ``batch_size`` rows. Where these samples end within the last one, rows
    without targets (all −100) fill it up, so that sums over valid tokens count each sample exactly once.

    Args:
        source: read by index, without shuffling.
        batch_size: rows a rank.
        dp_rank: this rank's number among the ``dp_size`` ranks that share the work.
        dp_size: their number.
        samples: 0 for all, and at most so many as there are.
    """
    samples = min(samples or len(source), len(source))
    together, counted_in = batch_size * dp_size, counted_entry(source)
    for start in range(0, samples, together):
        indices = start + dp_rank * batch_size + np.arange(batch_size)
        arrays = with_counts(source.read(np.minimum(indices, samples - 1)), counted_in)
        if indices[-1] >= samples:
            arrays["targets"] = np.where((indices < samples)[:, None], arrays["targets"], IGNORED)
        yield _tensors(arrays)


def _tensors(arrays: dict[str, np.ndarray]) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
