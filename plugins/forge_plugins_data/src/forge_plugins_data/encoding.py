"""One document of any bytes to token ids."""

from __future__ import annotations

import numpy as np

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.config import EncodingErrors


def reads_bytes(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the optional method ``encode_bytes(bytes) → ids`` and so needs no valid UTF-8."""
    return hasattr(tokenizer, "encode_bytes")


def encode_document(
    tokenizer: Tokenizer, content: bytes | str | None, errors: EncodingErrors | None, where: object
) -> np.ndarray | None:
    """Ids of a document ``(N,)`` int64, without its end; ``None`` if it is to be skipped.

    Args:
        content: the bytes of a file, or text from a format that has decoded it already; ``None`` is skipped.
        errors: what becomes of content that is not valid UTF-8; ``None`` refuses it where there is no such key.
        where: names the document in a message.

    Raises:
        ConfigError: the content is not valid UTF-8 and ``errors`` is ``"strict"`` or ``None``.
    """
    if isinstance(content, bytes) and reads_bytes(tokenizer):
        ids: np.ndarray = tokenizer.encode_bytes(content)  # type: ignore[attr-defined]  # just looked for
        return ids
    text = valid_text(content, errors, where)
    return None if text is None else begun(tokenizer, tokenizer.encode(text))


def begun(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """The ids of a text with which a document begins, after the tokenizer's optional ``begin_of_document``. One that is
    spelled out in the text stays the only one; a text without ids stays so."""
    begin = getattr(tokenizer, "begin_of_document", None)
    return ids if begin is None or not len(ids) or ids[0] == begin else np.concatenate([[begin], ids])


def valid_text(content: bytes | str | None, errors: EncodingErrors | None, where: object) -> str | None:
    """Text that can be written as UTF-8. Strings may need it too: JSON can spell half of a surrogate pair."""
    if content is None:
        return None
    try:
        if isinstance(content, bytes):
            return content.decode()
        content.encode()
        return content
    except UnicodeError as error:
        if errors == "skip":
            return None
        if errors == "replace":
            raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
            return raw.decode("utf-8", "replace")
        choice = (
            ', or choose what to do with such text: encoding_errors "replace" (puts U+FFFD) or "skip" (leaves the '
            "document out)"
        )
        advice = f"Convert or exclude it{choice * (errors is not None)}."
        raise ConfigError(f"{where} is not valid UTF-8 ({error}). {advice}") from error
