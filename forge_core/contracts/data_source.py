"""Data sources: the samples, by index or by position. The order of indexed ones is up to ``forge_core.data``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.batch import Entry
    from forge_core.contracts.builder import Builder
    from forge_core.contracts.tokenizer import Tokenizer

Split = Literal["train", "validation", "all"]


@attrs.frozen(kw_only=True)
class DataSourceConfig:
    """The keys that every data source has. Config classes of sources extend this one."""

    has_own_order: ClassVar[bool] = False
    """True for a ``PositionedSource`` or ``StreamedSource``: the key ``shuffle`` would do nothing, and is refused."""
    Phase: ClassVar[type | None] = None
    """The config class of ``phases.data``, of a ``PositionedSource`` or ``StreamedSource`` whose phases differ. If the
    source has a method ``go_without(left_out)``, it is called with the stretches ``[start, stop)`` of positions that
    the run goes without, in order: when the run starts, and each time that it goes back. The source then adds the
    length of each stretch to the starts of the phases that it ends before. A source around another one passes it on."""

    shuffle: bool = True
    """Visit the samples of each epoch in a pseudo-random order that depends on the seed and the epoch alone."""
    workers: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """Background threads that read ahead; 0 reads in the training thread. The stream is the same for any number."""
    prefetch: int = attrs.field(default=4, validator=[attrs.validators.ge(1), attrs.validators.le(2**16)])
    """Microbatches to read ahead, over all workers. Each rank keeps so many in memory, and reads them before the first
    step."""

    def missing(self) -> Iterable[str]:
        """A sentence for each thing that the data need and this machine does not have; a run may start elsewhere."""
        return ()

    def entries(self) -> Mapping[str, Entry]:
        """The entries of batches that need a description, as far as known without data, with sizes at their largest.
        ``forge plan`` gives it to the model."""
        return {}


class DataSource(Protocol):
    """A finite, indexed set of samples, all of one length. Reading is free of side effects and safe from threads."""

    vocab_size: int
    """All token ids are below this."""
    tokenizer: Tokenizer | None
    """The tokenizer for ``forge generate``; ``None`` if the data name none."""
    fingerprint: str
    """A hash of what decides the samples (files, sizes, tokenizer, seq_len): a resumed run must find the same one."""

    def __len__(self) -> int:
        """Samples in one epoch, at least 1."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples with these indices, stacked.

        Args:
            indices: ``(B,)`` int64, each 0 to ``len(self) − 1``, repetitions allowed.

        Returns:
            ``tokens`` ``(B, S)`` int64 and ``targets`` ``(B, S)`` int64 with ``targets[:, s]`` the token after
            ``tokens[:, s]`` in the same document and −100 where there is none; optionally ``document`` and
            ``positions`` ``(B, S)`` int64 for packed documents, and what else the model's forward takes.
        """


@runtime_checkable
class TokenlessSource(Protocol):
    """A source whose batches have neither ``tokens`` nor ``targets``, for a model with a loss of its own. The engine
    adds both, with which it counts: zeros, and targets of −100 where an entry ``positions`` is −1."""

    counted_in: str
    """The entry that has a row for each position: ``(B, S, …)``."""


@runtime_checkable
class PositionedSource(Protocol):
    """A source that says itself which sample stands at each position of the run, and so has neither length nor epochs.

    It has this method in place of ``__len__`` and ``read``, and its config class has ``has_own_order = True``. What is
    read at a position depends on nothing but the factory's arguments: not on what was read before, nor on the number of
    ranks. For the splits ``"validation"`` and ``"all"``, which are evaluated, the factory returns a ``DataSource``, as
    an evaluation has an end.
    """

    vocab_size: int
    tokenizer: Tokenizer | None
    fingerprint: str
    """All three as ``DataSource`` has them."""

    def read_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at these positions of the run, stacked, as ``DataSource.read`` returns them.

        Args:
            positions: ``(B,)`` int64 from 0, without an upper limit, repetitions allowed.
        """


@runtime_checkable
class StreamedSource(Protocol):
    """A source that can only be read from its beginning on, or from where a state says, as several streams.

    It has these two in place of ``__len__`` and ``read``, and its config class has ``has_own_order = True``. The run's
    position ``p`` is sample ``p div n_streams`` of stream ``p mod n_streams``. Each data-parallel rank reads some of
    the streams; a run resumes on any number of ranks up to ``n_streams``. For the splits ``"validation"`` and ``"all"``
    the factory returns a ``DataSource``.
    """

    vocab_size: int
    tokenizer: Tokenizer | None
    fingerprint: str
    """All three as ``DataSource`` has them."""
    n_streams: int
    """How many there are, at least 1, on any number of ranks. ``train.global_batch_size`` is a multiple of it."""

    def open(
        self, stream: int, state: Mapping[str, Any] | None
    ) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        """Read a stream. Several may be open at a time, of one stream too, each read by one thread at a time.

        Args:
            stream: 0 to ``n_streams − 1``.
            state: where to go on; ``None`` is the beginning.

        Returns:
            Each sample, the entries of ``DataSource.read`` without their first dimension, ``tokens`` ``(S,)``; and the
            state after it, JSON values, a mapping of its own: ``open`` with it gives what comes next. Where samples of
            a batch differ in size, smaller ones are filled up with zeros behind. States are small; those of a hundred
            steps are kept. Where it ends, the stream is opened with ``None`` again; one whose epochs differ goes on by
            itself, and its state says in which it is.
        """


Source = DataSource | PositionedSource
"""The source of a run, which reads a ``StreamedSource`` by position."""


@runtime_checkable
class CheckedSource(Protocol):
    """The protocol of sources that can verify their files."""

    def refuse_damaged(self) -> None:
        """Called once, on rank 0, before anything is built. The other ranks wait, however long it takes.

        Raises:
            ConfigError: a file is damaged, and this was to be known before the first step.
        """

    def watch(self, report: Callable[[str], None]) -> None:
        """Called once, on rank 0, when the run begins. From then on, ``report`` takes a sentence about each file that
        turns out to be damaged, from any thread; the run says it, adds an event, and goes on."""


class DataSourceFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(
        self,
        config: DataSourceConfig,
        /,
        *,
        seq_len: int,
        split: Split,
        build: Builder,
        seed: int,
        samples_per_step: int,
        phases: Sequence[tuple[int, Any]],
    ) -> Source | StreamedSource:
        """Open the data. A factory may do without ``build``, ``seed``, ``samples_per_step`` and ``phases``.

        Args:
            config: extends ``DataSourceConfig``.
            seq_len: ``S``, tokens a sample.
            split: ``"train"`` and ``"validation"`` are disjoint parts of the same data, fixed by the config alone;
                ``"all"`` is everything (a source that is named under ``[eval.data]``).
            build: builds the tokenizer that the config names, and sources within this one.
            seed: ``train.data_seed``, or ``train.seed``; for orders of a source's own.
            samples_per_step: ``train.global_batch_size``. Step ``k``, from 1, begins at position ``(k − 1)`` times
                that, if no step was left out.
            phases: the position at which each phase that says something about the data begins, in order, and what it
                says, a ``Phase`` of the config's class. None unless ``split`` is ``"train"``.

        Raises:
            ConfigError: data missing, empty, damaged or too small, or ``"validation"`` asked of a source that holds
                nothing out; the sentence says which key to change.
        """
