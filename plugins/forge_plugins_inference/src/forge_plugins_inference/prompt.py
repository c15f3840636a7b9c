"""Prompts: texts that a model continues."""

from __future__ import annotations

from forge_core.contracts.tokenizer import Tokenizer


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt, as a document begins: after the tokenizer's optional ``begin_of_document``, unless the text
    spells it. An empty prompt is what stands before a document: that token, or the end of the document before."""
    begin = getattr(tokenizer, "begin_of_document", None)
    ids: list[int] = tokenizer.encode(text).tolist()
    if begin is None:
        return ids or [tokenizer.end_of_document]
    return ids if ids[:1] == [begin] else [begin, *ids]
