"""The data of a job, opened by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import CheckedSource, DataSource, PositionedSource, Source, Split
from forge_core.contracts.evaluation import OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.distributed.collective_errors import run_slowly_on_rank0
from forge_core.errors import ConfigError, PluginError


class _TrainedOn(Protocol):
    """Facts about the data that a model is trained on."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def data_seed(job: Job) -> int:
    """The seed of what is random about data."""
    return job.train.seed if job.train.data_seed is None else job.train.data_seed


def open_source(
    job: Job, use: ComponentRef, key: str, split: Split, build: ComponentBuilder, beat: Callable[[], None]
) -> Source:
    """Open a source, and verify its files if it can.

    Args:
        key: names it in problems, as there may be several.
        beat: called while files are verified.

    Raises:
        ConfigError: it cannot be opened; or it has no end, and ``split`` is not ``"train"``.
        PluginError: its config says another order than it has.
    """
    try:
        source: Source = build(
            use,
            seq_len=job.train.seq_len,
            split=split,
            seed=data_seed(job),
            samples_per_step=job.train.global_batch_size,
        )
        if split != "validation" and isinstance(source, CheckedSource):  # whose files are those of the training data
            run_slowly_on_rank0(source.refuse_damaged, beat)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    is_positioned = isinstance(source, PositionedSource)
    if is_positioned and split != "train":
        raise ConfigError(f"{key}: {build.words_for(use)} has no end, so that it cannot be evaluated; name other data")
    if split == "train" and is_positioned != getattr(use.config, "has_own_order", False):
        has, says = ("read_at", "does not say") if is_positioned else ("no read_at", "says")
        raise PluginError(
            f"{build.words_for(use)} has {has}, and its config {says} has_own_order = True, by which the key shuffle "
            f"is refused. This is a bug in {use.provider}."
        )
    return source


def data_opener(job: Job, training: _TrainedOn, build: ComponentBuilder, beat: Callable[[], None]) -> OpenData:
    """The function that opens what is evaluated. It refuses another vocabulary or tokenizer than ``training`` has."""

    def open_data(use: ComponentRef | None, key: str, /) -> DataSource:
        if use is None:
            source = open_source(job, job.data, "data", "validation", build, beat)
        else:
            source = open_source(job, use, key, "all", build, beat)
        assert not isinstance(source, PositionedSource), "it was refused"
        if source.vocab_size > training.vocab_size:
            raise ConfigError(
                f"{key}: it has a vocabulary of {source.vocab_size}, the training data of {training.vocab_size}; "
                "prepare both with the same tokenizer"
            )
        ours, theirs = training.tokenizer, source.tokenizer
        if ours is not None and theirs is not None and ours.fingerprint != theirs.fingerprint:
            raise ConfigError(f"{key}: it has another tokenizer than the training data, so their losses mean nothing")
        return source

    return open_data
