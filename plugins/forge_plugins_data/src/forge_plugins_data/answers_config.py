"""The keys of data of which answers alone are learned."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, Literal

import attrs
from attrs.validators import min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_data.config import HeldOutConfig, missing_paths
from forge_plugins_data.dataset_config import DatasetConfig, not_empty

TooLong = Literal["refuse", "cut", "skip"]


def is_date(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """Validate a day such as 2026-01-31.

    Raises:
        ValueError: it is none.
    """
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"'{attribute.name}' must be a day such as 2026-01-31, got {value!r}") from None


def _is_in_place_of_path(config: AnswersConfig, _: attrs.Attribute[Any], value: DatasetConfig | None) -> None:
    if (config.path is None) == (value is None):
        given = "missing, and so is path" if value is None else f"there, and so is path = {config.path!r}"
        raise ValueError(f"is {given}; give one of the two: path for JSON Lines, or dataset")


def _is_of_files(config: AnswersConfig, _: attrs.Attribute[Any], value: Any) -> None:
    if value and config.dataset is not None:
        raise ValueError("is about JSON Lines, and has no effect beside dataset, which has data_files; remove it")


@attrs.frozen(kw_only=True)
class AnswersConfig(HeldOutConfig):
    """What sources have in common of which answers alone are learned, in JSON Lines (also ``.gz`` and ``.zst``) or a
    data set of the ``datasets`` library, tokenised in memory by every process when it starts.

    Each line, or row, is a document, kept apart from the others in its sample: attention does not cross, and positions
    start again at 0. Documents are packed by best fit, and the rest of a sample has no targets. ``validation`` holds
    out lines, chosen by a hash of the file's relative path, or the split's name, and their number in it.
    """

    path: str | tuple[str, ...] | None = attrs.field(default=None, validator=optional(not_empty))
    """JSON Lines: a folder, a file or a glob (``**`` crosses folders), or an array of them. Relative to the working
    directory; ``~`` is the home directory."""
    dataset: DatasetConfig | None = attrs.field(default=None, validator=_is_in_place_of_path)
    """A data set whose rows have the keys that a line has, in place of ``path``."""
    pattern: str | None = attrs.field(default=None, validator=[optional(min_len(1)), _is_of_files])
    """Which files to take from a folder, by default those with the format's endings; ``**`` crosses folders."""
    exclude: tuple[str, ...] = attrs.field(default=(), validator=_is_of_files)
    """Files to leave out: globs for their path in the folder."""
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]
    """How text becomes tokens."""
    too_long: TooLong = "refuse"
    """What to do with a line of more than ``train.seq_len + 1`` tokens: ``refuse`` to start, ``cut`` its end off, or
    ``skip`` it. One whose answers are all in what is cut off is skipped. ``forge data inspect`` counts them."""

    @property
    def document_mask(self) -> bool:
        """Samples have documents that are kept apart."""
        return True

    @property
    def place(self) -> str:
        """The key that says where the data are, with its value, for messages."""
        return f"path = {self.path!r}" if self.dataset is None else f"dataset.path = {self.dataset.path!r}"

    def missing(self) -> Iterable[str]:
        """Paths that are not there, or what the data set needs."""
        if self.dataset is not None:
            yield from self.dataset.missing()
        if self.path is not None:
            yield from missing_paths(self.path)


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
