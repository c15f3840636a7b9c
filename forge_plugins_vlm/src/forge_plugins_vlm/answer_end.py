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
        self._texts = [] if template is None or not (text := template.end_of_turn()) else [text]

    @classmethod
    def of_any(cls, tokenizer: Tokenizer, ends: Sequence[AnswerEnd]) -> AnswerEnd:
        """The ends of all sources of a mixture, which may write their answers differently."""
        found = cls(tokenizer)
        found._ids = found._ids.union(*(one._ids for one in ends))
        found._texts = [*dict.fromkeys(text for one in ends for text in one._texts)]
        return found

    def has_come(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of these new tokens completes an answer."""
        if tokens[-1] in self._ids:
            return True
        said = self._tokenizer.decode(tokens) if self._texts else ""
        return any(text in said for text in self._texts)

    def text_before(self, tokens: Sequence[int]) -> str:
        """The answer alone."""
        stop = next((place for place, token in enumerate(tokens) if token in self._ids), len(tokens))
        answer = self._tokenizer.decode(tokens[:stop])
        for text in self._texts:
            answer = answer.partition(text)[0]
        return answer
