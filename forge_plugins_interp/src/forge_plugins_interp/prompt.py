"""A prompt of the command line, as tokens and as their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.errors import ConfigError
from forge_plugins_inference.prompt import prompt_ids

if TYPE_CHECKING:
    from forge_core.contracts.tokenizer import Tokenizer
    from forge_plugins_interp.session import Session


def tokenizer_of(session: Session) -> Tokenizer:
    """
    Raises:
        ConfigError: the model has none.
    """
    if session.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer: its data did not name one, so text means nothing to it")
    return session.tokenizer


def encoded(session: Session, option: str, text: str) -> list[int]:
    """The tokens of a prompt that an option gives, as ``forge generate`` reads it.

    Raises:
        ConfigError: there are none.
    """
    tokenizer = tokenizer_of(session)
    if not len(tokenizer.encode(text)):
        raise ConfigError(f"{option}: it has no token")
    return prompt_ids(tokenizer, text)


def texts(session: Session, tokens: list[int]) -> list[str]:
    """The text of each token."""
    tokenizer = tokenizer_of(session)
    return [tokenizer.decode([token]) for token in tokens]


def one_token(session: Session, option: str, text: str) -> int:
    """
    Raises:
        ConfigError: the text is not exactly one token.
    """
    tokens: list[int] = tokenizer_of(session).encode(text).tolist()
    if len(tokens) != 1:
        raise ConfigError(f"{option} {text!r}: is {len(tokens)} tokens, and must be one: {texts(session, tokens)}")
    return tokens[0]
