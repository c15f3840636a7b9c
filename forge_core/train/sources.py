"""The data of a job, opened by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import attrs
import numpy as np

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import KNOWN, DescribedSource, Entry
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import CheckedSource, DataSource, PositionedSource, Source, Split, StreamedSource
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.counts import counted_entry, with_counts
from forge_core.data.streams import StreamsByPosition
from forge_core.distributed.collective_errors import run_slowly_on_all_ranks, run_slowly_on_rank0
from forge_core.errors import ConfigError, PluginError
from forge_core.job import data_phase


@attrs.frozen
class TrainedOn:
    """Facts about the data that a model is trained on."""

    vocab_size: int
    tokenizer: Tokenizer | None


def data_seed(job: Job) -> int:
    """The seed of what is random about data."""
    return job.train.seed if job.train.data_seed is None else job.train.data_seed


def open_source(
    job: Job, use: ComponentRef, key: str, split: Split, build: ComponentBuilder, beat: Callable[[], None]
) -> Source:
    """Open a source, and verify its files if it can. All ranks do so together, however long it takes one of them.

    Args:
        key: names it in problems, as there may be several.
        beat: called while ranks wait.

    Raises:
        ConfigError: it cannot be opened; or it has no end, and ``split`` is not ``"train"``.
        PluginError: its config says another order than it has.
    """
    try:
        opened = partial(
            build,
            use,
            seq_len=job.train.seq_len,
            split=split,
            seed=data_seed(job),
            samples_per_step=job.train.global_batch_size,
            phases=_data_phases(job, use) if split == "train" else (),
        )
        found: Source | StreamedSource = run_slowly_on_all_ranks(opened, beat)
        _refuse_incomplete(found, use, build)
        source = StreamsByPosition(found) if isinstance(found, StreamedSource) else found
        if split != "validation" and isinstance(source, CheckedSource):  # whose files are those of the training data
            run_slowly_on_rank0(source.refuse_damaged, beat)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}" if str(error) else "") from error  # rank 0 says it for all
    is_positioned = isinstance(source, PositionedSource)
    if is_positioned and split != "train":
        raise ConfigError(f"{key}: {build.words_for(use)} has no end, so that it cannot be evaluated; name other data")
    if split == "train" and is_positioned != getattr(use.config, "has_own_order", False):
        has, says = ("read_at or streams", "does not say") if is_positioned else ("no read_at", "says")
        raise PluginError(
            f"{build.words_for(use)} has {has}, and its config {says} has_own_order = True, by which the key shuffle "
            f"is refused. This is a bug in {use.provider}."
        )
    return source


def _refuse_incomplete(source: Any, use: ComponentRef, build: ComponentBuilder) -> None:
    has_order = getattr(use.config, "has_own_order", False) or isinstance(source, (PositionedSource, StreamedSource))
    for name in ("vocab_size", "tokenizer", *(() if has_order else ("__len__", "read"))):
        if not hasattr(source, name) or (name != "tokenizer" and getattr(source, name) is None):
            raise PluginError(f"{build.words_for(use)} has no {name}, which it needs. This is a bug in {use.provider}.")


def _data_phases(job: Job, use: ComponentRef) -> list[tuple[int, Any]]:
    """Where the phases of the data begin, by positions of the stream, and what they say."""
    samples = cast("int", job.train.global_batch_size)  # resolved by now, and so are steps that are given in tokens
    phases = [one for one in job.phases if one.data]
    return [((cast("int", one.first_step(job.train)) - 1) * samples, data_phase(use, one)) for one in phases]


@attrs.define(eq=False)
class EvaluatedData:
    """Opens what is evaluated, as ``OpenData``. It refuses another vocabulary or tokenizer than ``training`` has."""

    _job: Job
    _training: TrainedOn | Source
    _build: ComponentBuilder
    _beat: Callable[[], None]
    """Called while ranks wait."""
    opened: list[Source] = attrs.field(factory=list, init=False)
    """Sources of their own, without the part that ``[data]`` holds out."""
    entries: dict[str, Entry | None] = attrs.field(factory=dict, init=False)
    """The entries of what has been opened, as ``entries_of`` gives them."""

    def __call__(self, use: ComponentRef | None, key: str, /) -> DataSource:
        """Same as ``OpenData``."""
        if use is None:
            source = open_source(self._job, self._job.data, "data", "validation", self._build, self._beat)
        else:
            source = open_source(self._job, use, key, "all", self._build, self._beat)
            self.opened.append(source)
        assert not isinstance(source, PositionedSource), "it was refused"
        if source.vocab_size > self._training.vocab_size:
            raise ConfigError(
                f"{key}: it has a vocabulary of {source.vocab_size}, the training data of {self._training.vocab_size}; "
                "prepare both with the same tokenizer"
            )
        ours, theirs = self._training.tokenizer, source.tokenizer
        if ours is not None and theirs is not None and ours.fingerprint != theirs.fingerprint:
            raise ConfigError(f"{key}: it has another tokenizer than the training data, so their losses mean nothing")
        self.entries |= entries_of(source, self._job.train.seq_len)
        return source


def entries_of(source: Source, seq_len: int | None = None) -> dict[str, Entry | None]:
    """The entries that a source gives, each as it or the contract describes it; ``None`` without a description.

    Args:
        seq_len: of the samples that it is to give; ``None``: any.

    Raises:
        PluginError: it describes an entry otherwise than the engine takes it, or has samples of another length.
    """
    described = {**KNOWN, **(source.entries() if isinstance(source, DescribedSource) else {})}
    if described["weights"] != KNOWN["weights"]:
        raise PluginError(
            f"{type(source).__qualname__} describes the entry 'weights' as {described['weights']}, which must be "
            f"{KNOWN['weights']}, the weights of targets; give it another name"
        )
    read = source.read_at if isinstance(source, PositionedSource) else source.read
    batch = with_counts(read(np.zeros(1, dtype=np.int64)), counted_entry(source))
    if (length := batch["tokens"].shape[1]) != seq_len and seq_len is not None:
        raise PluginError(
            f"{type(source).__qualname__} gives samples of {length} tokens, which must have train.seq_len = {seq_len}"
        )
    return {name: described.get(name) for name in batch}
