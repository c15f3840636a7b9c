"""The data of a job, opened by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import CheckedSource, DataSource, Split
from forge_core.contracts.evaluation import OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.distributed.collective_errors import run_slowly_on_rank0
from forge_core.errors import ConfigError


class _TrainedOn(Protocol):
    """Facts about the data that a model is trained on."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def open_source(
    use: ComponentRef, key: str, build: ComponentBuilder, beat: Callable[[], None], *, seq_len: int, split: Split
) -> DataSource:
    """Open a source, and verify its files if it can.

    Args:
        key: names it in problems, as there may be several.
        beat: called while files are verified.

    Raises:
        ConfigError: it cannot be opened.
    """
    try:
        source: DataSource = build(use, seq_len=seq_len, split=split)
        if split != "validation" and isinstance(source, CheckedSource):  # whose files are those of the training data
            run_slowly_on_rank0(source.refuse_damaged, beat)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return source


def data_opener(job: Job, training: _TrainedOn, build: ComponentBuilder, beat: Callable[[], None]) -> OpenData:
    """The function that opens what is evaluated. It refuses another vocabulary or tokenizer than ``training`` has."""

    def open_data(use: ComponentRef | None, key: str, /) -> DataSource:
        seq_len = job.train.seq_len
        if use is None:
            source = open_source(job.data, "data", build, beat, seq_len=seq_len, split="validation")
        else:
            source = open_source(use, key, build, beat, seq_len=seq_len, split="all")
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
