"""Text that others have written, fit to be shown: it steers no terminal, and gives no password away."""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and ends of lines, marks of writing direction, and halves of characters."""
_PASSWORD = re.compile(r"(://[^\s:@/'\"]*):(?!\d+/)[^\s'\"]+@")
_TOKEN = re.compile(r"([?&][^\s=&]*(?:sig|token|secret|password|passwd|key)[^\s=&]*=)[^\s&'\"]+", re.IGNORECASE)


def printable(text: str) -> str:
    """``text`` with control characters as escapes, and without the passwords of URLs."""
    return _STEERING.sub(_escaped, without_passwords(text))


def without_passwords(text: str) -> str:
    """``ftp://user:***@host/path``, in any text."""
    return _TOKEN.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text)) if "://" in text else text


def has_password(url: str) -> bool:
    """Whether a URL gives away what opens it: a password, a signature, a token."""
    return without_passwords(url) != url


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
