"""Where the answer of a model ends."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.contracts.tokenizer import Tokenizer
from forge_plugins_data.chat_template import ChatTemplate


class AnswerEnd:
    """An end of document; behind an answer by a chat template also the end of its turn, a token or a text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """
        Args:
            template: by which answers are written, if they are.
        """
        self._tokenizer = tokenizer
        of_turn = () if template is None else getattr(tokenizer, "ends_of_turn", ())
        self._ids = {tokenizer.end_of_document, *of_turn}
        self._text = "" if template is None else template.end_of_turn()

    def has_come(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of these new tokens completes an answer."""
        return tokens[-1] in self._ids or bool(self._text and self._text in self._tokenizer.decode(tokens))

    def text_before(self, tokens: Sequence[int]) -> str:
        """The answer alone."""
        stop = next((place for place, token in enumerate(tokens) if token in self._ids), len(tokens))
        text = self._tokenizer.decode(tokens[:stop])
        return text.partition(self._text)[0] if self._text else text
