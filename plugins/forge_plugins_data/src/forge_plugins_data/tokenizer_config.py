"""The keys of tokenizers."""

from __future__ import annotations

import attrs
from attrs.validators import min_len, optional


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
    begin_of_document: str | None = None
    """The token with which documents and prompts begin, if the model knows them so, as Gemma and Llama 3 do:
    ``<bos>``. It is put before texts that do not spell it. Conversations have what their template says."""
    chat_template: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """A Jinja template of conversations, for the data source ``chat`` and ``forge generate --chat``. By default the
    model's own: ``chat_template.jinja`` beside a ``tokenizer.json``, or the ``chat_template`` of its
    ``tokenizer_config.json``. Relative to what ``path`` is relative to."""
