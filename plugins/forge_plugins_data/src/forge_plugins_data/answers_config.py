"""The keys of data of which answers alone are learned."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

import attrs
from attrs.validators import min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_data.config import FilesConfig

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


@attrs.frozen(kw_only=True)
class AnswersConfig(FilesConfig):
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
