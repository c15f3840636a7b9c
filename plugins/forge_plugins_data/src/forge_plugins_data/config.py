"""The configuration of this distribution's components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

import attrs
from attrs.validators import ge, gt, le, lt, matches_re, min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.errors import ConfigError, nearest

EncodingErrors = Literal["strict", "replace", "skip"]
Packing = Literal["windows", "best_fit"]
TooLong = Literal["refuse", "cut", "skip"]


@attrs.frozen(kw_only=True)
class BytesConfig:
    """The bytes of UTF-8 are tokens."""

    chat_template: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """A Jinja template of conversations, for the data source ``chat`` and ``forge generate --chat``. Relative to the
    working directory; ``~`` is the home directory."""


@attrs.frozen(kw_only=True)
class TokenizerFileConfig:
    """A tokenizer of the Hugging Face ``tokenizers`` library."""

    path: str
    """The ``tokenizer.json``. Relative to the working directory, and to the folder of prepared data in their index;
    ``~`` is the home directory."""
    end_of_document: str | None = None
    """The token that ends a document. By default the one known name that the vocabulary has, such as
    ``<|endoftext|>`` or ``</s>``."""
    chat_template: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """A Jinja template of conversations, for the data source ``chat`` and ``forge generate --chat``. By default the
    model's own: ``chat_template.jinja`` beside a ``tokenizer.json``, or the ``chat_template`` of its
    ``tokenizer_config.json``. Relative to what ``path`` is relative to."""


def _not_empty(_: object, attribute: attrs.Attribute[Any], value: str | tuple[str, ...]) -> None:
    paths = (value,) if isinstance(value, str) else value
    if not paths or "" in paths:
        raise ValueError(f"'{attribute.name}' must name at least one file or folder, and no empty one: {value!r}")


def is_date(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """Validate a day such as 2026-01-31.

    Raises:
        ValueError: it is none.
    """
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"'{attribute.name}' must be a day such as 2026-01-31, got {value!r}") from None


@attrs.frozen(kw_only=True)
class _FoundConfig(DataSourceConfig):
    """What sources of files have in common, however files become samples."""

    path: str | tuple[str, ...] = attrs.field(validator=_not_empty)
    """A folder, a file or a glob (``**`` crosses folders), or an array of them. Relative to the working directory;
    ``~`` is the home directory."""
    validation: float = attrs.field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """The part that is held out for evaluation, 0 to 1."""

    def missing(self) -> Iterable[str]:
        """Paths that are not there."""
        from forge_plugins_data.file_selection import refuse_missing  # validation does not need it

        for path in (self.path,) if isinstance(self.path, str) else self.path:
            try:
                refuse_missing(path)
            except ConfigError as error:
                yield str(error)

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Evaluation must have data, and what is held out must be used by somebody."""
        yield from _check_held_out(self, job)


@attrs.frozen(kw_only=True)
class _FilesConfig(_FoundConfig):
    """What sources of files have in common whose documents become samples in several ways."""

    document_mask: bool = False
    """Keep documents that share a sample apart: attention does not cross from one into the next, positions start again
    at 0, and the first token of a document is nobody's target. Otherwise a sample is plain text."""
    packing: Packing = "windows"
    """How documents become samples. ``windows`` cuts the text into samples wherever that falls. ``best_fit`` keeps
    documents whole that fit into a sample, and puts together those that leave the least room; what is left of a sample
    has no targets. It finds the documents when the source is opened, about a microsecond each."""


def _check_held_out(config: _FoundConfig | HuggingFaceConfig, job: Job) -> Iterable[tuple[str, str]]:
    evaluated = job.eval.data.config if job.eval.data is not None else None
    if config is evaluated and config.validation > 0:
        yield "validation", "has no effect here: data named under [eval.data] are evaluated whole; remove it"
    if job.data.config is config and evaluated is None and job.eval.interval > 0 and config.validation == 0:
        sentence = (
            "is 0 and there is no [eval.data], so that eval.interval has nothing to evaluate; "
            "hold something out (validation = 0.01), name data under [eval.data], or set eval.interval = 0"
        )
        yield "validation", sentence


@attrs.frozen(kw_only=True)
class TextFilesConfig(_FilesConfig):
    """Text files, each one document, tokenised in memory by every process when it starts.

    Made for corpora of up to about a gigabyte; prepare larger ones with ``forge data prepare`` and use ``token_files``.
    In ``path``, ``{stdlib}`` stands for the folder of Python's standard library: text that every machine has.
    ``validation`` holds out whole files, chosen by a hash of their relative path, so that adding files moves no other
    one between training and validation; one file at least, if it is above 0.
    """

    pattern: str | None = attrs.field(default=None, validator=optional(attrs.validators.min_len(1)))
    """Which files to take from a folder, by default ``**/*.txt``; ``**`` crosses folders. Hidden files are never taken.
    For paths of which at least one is a folder."""
    exclude: tuple[str, ...] = ()
    """Files to leave out: globs for their path in the folder, such as ``"site-packages/**"`` or ``"**/tests/**"``."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens. ``bytes`` needs no file and reads any file as it is."""
    encoding_errors: EncodingErrors = "strict"
    """What to do with files that are not UTF-8: ``strict`` refuses to start, ``replace`` puts U+FFFD, ``skip`` leaves
    the file out. For tokenizers that read text; ``bytes`` decodes nothing."""
    binary: bool = False
    """Take the bytes of every file as they are. Otherwise ``.gz`` and ``.zst`` are unpacked, and what is no text is
    refused: JSON Lines, Parquet, archives, images, and whatever has NUL bytes."""


@attrs.frozen(kw_only=True)
class RecordsConfig(_FilesConfig):
    """Documents in JSON Lines (a line each; also ``.gz`` and ``.zst``) or Parquet (a row each), tokenised in memory by
    every process when it starts, as ``text_files`` does.

    ``validation`` holds out documents, chosen by a hash of the file's relative path and their number in it, so that
    more of them move no other one between training and validation. Documents without text are left out.
    """

    text_field: str = attrs.field(default="text", validator=attrs.validators.min_len(1))
    """The key of each line, or the column, that holds the text."""
    pattern: str | None = attrs.field(default=None, validator=optional(attrs.validators.min_len(1)))
    """Which files to take from a folder, by default those with the format's endings; ``**`` crosses folders."""
    exclude: tuple[str, ...] = ()
    """Files to leave out: globs for their path in the folder."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    encoding_errors: EncodingErrors = "strict"
    """What to do with lines that are not UTF-8: ``strict`` refuses to start, ``replace`` puts U+FFFD, ``skip`` leaves
    them out."""


@attrs.frozen(kw_only=True)
class AnswersConfig(_FoundConfig):
    """What sources have in common of which answers alone are learned, in JSON Lines (also ``.gz`` and ``.zst``),
    tokenised in memory by every process when it starts.

    Each line is a document, kept apart from the others in its sample: attention does not cross, and positions start
    again at 0. Documents are packed by best fit, and the rest of a sample has no targets. ``validation`` holds out
    lines, chosen by a hash of the file's relative path and their number in it.
    """

    pattern: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which files to take from a folder, by default those with the format's endings; ``**`` crosses folders."""
    exclude: tuple[str, ...] = ()
    """Files to leave out: globs for their path in the folder."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    too_long: TooLong = "refuse"
    """What to do with a line of more than ``train.seq_len + 1`` tokens: ``refuse`` to start, ``cut`` its end off, or
    ``skip`` it. One whose answers are all in what is cut off is skipped. ``forge data inspect`` counts them."""


@attrs.frozen(kw_only=True)
class ChatConfig(AnswersConfig):
    """Conversations, written by the model's own chat template, of which the assistant's turns are learned.

    A line is ``{"messages": [{"role": "user", "content": "…"}, …]}``; ``tools`` beside it is given to the template. The
    template is that of the tokenizer. A turn is what the template adds to the conversation before it, without the
    generation prompt, and with the token that ends the turn. A template that marks answers by ``{% generation %}`` is
    taken at its word.
    """

    messages_field: str = attrs.field(default="messages", validator=min_len(1))
    """The key of each line that holds the messages."""
    date: str | None = attrs.field(default=None, validator=optional(is_date))
    """The day, as in ``2026-01-31``, for a template that writes down today's: with it, the data are the same tomorrow.
    Without it, such a template is refused."""


@attrs.frozen(kw_only=True)
class PromptCompletionConfig(AnswersConfig):
    """Prompts with their completions, of which the completions and the end of document are learned.

    A line is ``{"prompt": "…", "completion": "…"}``. Nothing is put between the two.
    """

    prompt_field: str = attrs.field(default="prompt", validator=min_len(1))
    """The key of each line that holds the prompt."""
    completion_field: str = attrs.field(default="completion", validator=min_len(1))
    """The key of each line that holds the completion."""


@attrs.frozen(kw_only=True)
class HubConfig(DataSourceConfig):
    """A data set of the Hugging Face ``datasets`` library. Documents without text are left out."""

    path: str = attrs.field(validator=_not_empty)
    """A folder of ``save_to_disk``, a folder of files, a name of the Hugging Face Hub, or, with ``data_files``, a
    format (``parquet``, ``json``, ``csv``, ``text``). Relative to the working directory; ``~`` is the home
    directory."""
    subset: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which configuration of a data set that has several, such as a language."""
    split: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which split, by default ``train``. For a folder that has a single one, there is nothing to choose."""
    data_files: str | tuple[str, ...] | None = attrs.field(default=None, validator=optional(_not_empty))
    """Files of the folder or the format, by their names or globs."""
    column: str = attrs.field(default="text", validator=min_len(1))
    """The column that holds the text."""
    revision: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """A commit, tag or branch of a data set on the hub. A run that goes on should find what it began with."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    document_mask: bool = False
    """Keep documents that share a sample apart, as in ``text_files``."""

    @property
    def words(self) -> str:
        """For messages."""
        return f"the data set {self.path!r}" + (f" ({self.subset})" if self.subset is not None else "")

    def missing(self) -> Iterable[str]:
        """The library, or a path that can be no name of the hub."""
        from forge_plugins_data.hub_dataset import what_is_missing  # validation does not need it

        yield from what_is_missing(self)


@attrs.frozen(kw_only=True)
class HuggingFaceConfig(HubConfig):
    """A data set of the Hugging Face ``datasets`` library, tokenised into token files when it is opened first.

    One process of a node does so, with others to help it; the ranks of the node wait. What was finished stays after an
    interruption. ``validation`` holds out the last windows of every file. Needs the extra ``huggingface``.
    """

    validation: float = attrs.field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """The part that is held out for evaluation, 0 to 1."""
    cache: str = attrs.field(default="prepared", validator=_not_empty)
    """The folder for token files; each data set, with its tokenizer, has a folder of its own in it, by a fingerprint.
    Where nodes share it, they tokenise once. Relative to the working directory; ``~`` is the home directory."""
    processes: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """How many tokenise, by default as many as there are cores. The files are the same for any number."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Evaluation must have data, and what is held out must be used by somebody."""
        yield from _check_held_out(self, job)


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
        """Evaluation must have data of its own, which are no streams; each stream has the same part of a step."""
        if job.eval.data is not None and job.eval.data.config is self:
            yield "streams", "have no end, so that they cannot be evaluated; name other data under [eval.data]"
        if job.data.config is not self:
            return
        if job.eval.interval > 0 and job.eval.data is None:
            yield (
                "streams",
                "hold nothing out, so that eval.interval has nothing to evaluate; name data under [eval.data]",
            )
        total = _samples_per_step(job)
        if total is not None and total % self.streams:
            sentence = f"must divide train.global_batch_size, {total}, as each has the same part of a step"
            yield "streams", f"{sentence}; it is {self.streams}"


def _samples_per_step(job: Job) -> int | None:
    """Over all ranks; ``None`` where it depends on how many there are."""
    train, ranks = job.train, job.parallel.dp_replicate * job.parallel.dp_shard
    if train.global_batch_size is not None or ranks < 0:
        return train.global_batch_size
    return train.batch_size * (train.grad_accumulation or 1) * ranks


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


@attrs.frozen(kw_only=True)
class MixtureSource:
    """One source of a mixture."""

    name: str = attrs.field(validator=matches_re(r"[A-Za-z0-9][A-Za-z0-9_.-]*"))
    """Its name in metrics, as in ``loss/<name>``: letters, digits, ``_``, ``.`` and ``-``. With the run's seed, it
    decides the order of the source's samples."""
    weight: float = attrs.field(validator=ge(0.0))
    """Its share of the samples, in proportion to the others'; weights need not add up to 1. 0 switches it off."""
    source: Annotated[ComponentRef, Slot("data_source")]
    """The data, any source with its keys, but for ``shuffle``, ``workers`` and ``prefetch``."""
    loss_weight: float = attrs.field(default=1.0, validator=ge(0.0))
    """How much a target of this source counts in the training loss, beside those of the others. ``loss/<name>`` and
    evaluations stay without it."""

    @property
    def holds_out(self) -> bool:
        """Whether it has samples for evaluation, as far as its keys say."""
        return bool(getattr(self.source.config, "validation", True))


def _sources(_: object, __: object, value: tuple[MixtureSource, ...]) -> None:
    if not value:
        raise ValueError("must have at least one source")
    names = [one.name for one in value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"names the source {twice[0]!r} twice; give each a name of its own")
    if not any(one.weight for one in value):
        raise ValueError("has weights that are all 0, so that there is nothing to train on; give one a weight")
    if not any(one.weight * one.loss_weight for one in value):
        raise ValueError("has a loss_weight of 0 for each source with a weight, so that there is nothing to learn")


@attrs.frozen(kw_only=True)
class MixturePhase:
    """``phases.data`` of a mixture."""

    weights: Mapping[str, float] = attrs.field(validator=min_len(1))
    """Weights of sources by name, from the phase on to the next that has some; others keep those of ``[data]``."""


@attrs.frozen(kw_only=True)
class MixtureConfig(DataSourceConfig):
    """Several sources, each with its share of the samples. Each position of the run has its source, on any number of
    ranks, and before any position each source has had its share, give or take two samples.

    A source that comes to its end begins another epoch, in another order. Evaluations have all that the sources hold
    out.
    """

    has_own_order: ClassVar[bool] = True
    Phase: ClassVar[type] = MixturePhase
    sources: tuple[MixtureSource, ...] = attrs.field(validator=_sources)
    """Arrays of tables: ``[[data.sources]]``, each with ``name``, ``weight`` and ``source``."""
    temperature: float = attrs.field(default=1.0, validator=gt(0.0))
    """Shares are in proportion to ``weight ** (1 / temperature)``: above 1 brings them closer together."""

    def shares(self, phase: MixturePhase | None = None) -> tuple[float, ...]:
        """The share of each source, which add up to 1.

        Args:
            phase: whose weights count.
        """
        weights = [one.weight if phase is None else phase.weights.get(one.name, one.weight) for one in self.sources]
        powers = [(weight / max(weights)) ** (1 / self.temperature) for weight in weights]
        return tuple(power / sum(powers) for power in powers)

    def missing(self) -> Iterable[str]:
        """Paths of the sources that are not there."""
        for one in self.sources:
            yield from one.source.config.missing()

    def entries(self) -> Mapping[str, Entry]:
        """Those of its sources."""
        return {name: entry for one in self.sources for name, entry in one.source.config.entries().items()}

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Mixtures within it; what is held out of what is evaluated whole; an evaluation of nothing; phases."""
        if job.data.config is self:
            yield from self._check_phases(job)
        own = job.eval.data.config if job.eval.data is not None else None
        for index, one in enumerate(self.sources):
            if isinstance(one.source.config, MixtureConfig):
                yield f"sources[{index}].source", "is a mixture itself; name its sources here, with their own weights"
            if own is self and getattr(one.source.config, "validation", 0) and hasattr(one.source.config, "path"):
                key = f"sources[{index}].source.validation"
                yield key, "has no effect here: data named under [eval.data] are evaluated whole; remove it"
        holds_out = any(one.holds_out for one in self.sources)
        if job.data.config is self and own is None and job.eval.interval > 0 and not holds_out:
            sentence = (
                "hold nothing out and there is no [eval.data], so that eval.interval has nothing to evaluate; set "
                "validation in one of them, name data under [eval.data], or set eval.interval = 0"
            )
            yield "sources", sentence

    def _check_phases(self, job: Job) -> Iterable[tuple[str, str]]:
        names = [one.name for one in self.sources]
        for index, phase in enumerate(job.phases):
            weights = phase.data.get("weights")
            if not isinstance(weights, Mapping):
                continue
            for name, weight in weights.items():
                if name not in names:
                    hint = f"; did you mean {near!r}?" if (near := nearest(name, names)) else ""
                    yield "sources", f"phases[{index}].data.weights names {name!r}, and there is no such source{hint}"
                elif isinstance(weight, (int, float)) and weight < 0:
                    yield "sources", f"phases[{index}].data.weights gives {name!r} the weight {weight}, below 0"
            if not any(weights.get(one.name, one.weight) for one in self.sources):
                yield "sources", f"phases[{index}].data.weights are all 0, so that there is nothing to train on"


def _for_documents(config: TokenFilesConfig, _: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and not config.document_mask and config.packing == "windows":
        raise ValueError('has no effect without document_mask = true or packing = "best_fit"; set one, or remove it')


@attrs.frozen(kw_only=True)
class TokenFilesConfig(_FilesConfig):
    """Memory-mapped token ids: a folder written by ``forge data prepare``, its ``.bin`` files, or ``.npy`` of one row.
    Also what other programs have written: ``.bin`` with ``.idx`` (Megatron), ``.ds`` (nanotron, datatrove), a folder of
    chunks with an ``index.json`` (litgpt), and ``.bin`` that are nothing but ids of a ``dtype``.

    ``validation`` holds out the last windows of every file, or with ``best_fit`` documents at equal distances.
    """

    tokenizer: Annotated[ComponentRef | None, Slot("tokenizer")] = None
    """The tokenizer of files that do not carry theirs. Prepared folders do."""
    vocab_size: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """For files that do not say, without a ``tokenizer``: all ids are below this, which is checked by reading them."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """The type of little-endian ids in files that do not say it. Nothing is guessed from the size of a file."""
    end_of_document: int | None = attrs.field(default=None, validator=[optional(ge(0)), _for_documents])
    """For files that do not say, without a ``tokenizer``: the id that ends a document, for ``document_mask`` and
    ``best_fit``."""
    verify: Literal["before", "first_read", "never"] = "first_read"
    """When rank 0 compares files with the checksums that ``forge data prepare`` has noted: ``before`` the first step,
    which waits, and is refused if one is damaged; in the background from the ``first_read`` on, which tells; or
    ``never``."""
