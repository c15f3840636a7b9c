"""The keys of data sets of the Hugging Face ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import attrs
from attrs.validators import ge, le, lt, min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_core.config.sections import Job
from forge_core.contracts.data_source import DataSourceConfig
from forge_plugins_data.config import Packing, check_held_out
from forge_plugins_data.dataset_config import DatasetConfig, not_empty


@attrs.frozen(kw_only=True)
class HubConfig(DatasetConfig, DataSourceConfig):
    """A data set of the Hugging Face ``datasets`` library. Documents without text are left out."""

    column: str = attrs.field(default="text", validator=min_len(1))
    """The column that holds the text."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    document_mask: bool = False
    """Keep documents that share a sample apart, as in ``text_files``."""


@attrs.frozen(kw_only=True)
class HuggingFaceConfig(HubConfig):
    """A data set of the Hugging Face ``datasets`` library, tokenised into token files when it is opened first.

    One process of a node does so, with others to help it; the ranks of the node wait. What was finished stays after an
    interruption. ``validation`` holds out the last windows of every file, or with ``best_fit`` documents at equal
    distances. Needs the extra ``huggingface``.
    """

    validation: float = attrs.field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """The part that is held out for evaluation, 0 to 1."""
    packing: Packing = "windows"
    """How documents become samples, ``windows`` or ``best_fit``, as in ``token_files``, from the same files."""
    cache: str = attrs.field(default="prepared", validator=not_empty)
    """The folder for token files; each data set, with its tokenizer, has a folder of its own in it, by a fingerprint.
    Where nodes share it, they tokenise once. Relative to the working directory; ``~`` is the home directory."""
    processes: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """How many tokenise, by default as many as there are cores. The files are the same for any number."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Evaluation must have data, and what is held out must be used by somebody."""
        yield from check_held_out(self, job)


@attrs.frozen(kw_only=True)
class HuggingFaceStreamingConfig(HubConfig):
    """A data set of the Hugging Face ``datasets`` library, read and tokenised while the run goes on.

    It has ``streams``, each a part of the data set, which are dealt to the data-parallel ranks; the state of each is
    saved with the checkpoint. It holds nothing out. Needs the extra ``huggingface``.
    """

    has_own_order: ClassVar[bool] = True
    streams: int = attrs.field(default=8, validator=[ge(1), le(2**16)])
    """Parts of the data set: so many data-parallel ranks at most, and a divisor of ``train.global_batch_size``. Best is
    a divisor of the number of files. It cannot change when a run goes on."""
    shuffle_buffer: int = attrs.field(default=1000, validator=[ge(1), le(2**20)])
    """Documents of a stream that are put into a pseudo-random order together, another one in each epoch, by the run's
    seed. 1 keeps their order."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """What ``check_streams`` finds."""
        yield from check_streams(self, self.streams, job)


def check_streams(config: DataSourceConfig, streams: int, job: Job) -> Iterable[tuple[str, str]]:
    """What is wrong with data that are read as so many streams: evaluation must have data of its own, which are no
    streams; each stream has the same part of a step."""
    if job.eval.data is not None and job.eval.data.config is config:
        yield "streams", "have no end, so that they cannot be evaluated; name other data under [eval.data]"
    if job.data.config is not config:
        return
    if job.eval.interval > 0 and job.eval.data is None:
        yield "streams", "hold nothing out, so that eval.interval has nothing to evaluate; name data under [eval.data]"
    total = samples_per_step(job)
    if total is not None and total % streams:
        sentence = f"must divide train.global_batch_size, {total}, as each has the same part of a step"
        yield "streams", f"{sentence}; it is {streams}"


def samples_per_step(job: Job) -> int | None:
    """Over all ranks; ``None`` where it depends on how many there are."""
    train, ranks = job.train, job.parallel.dp_replicate * job.parallel.dp_shard
    if train.global_batch_size is not None or ranks < 0:
        return train.global_batch_size
    return train.batch_size * (train.grad_accumulation or 1) * ranks
