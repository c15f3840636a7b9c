"""The canonical sample: a conversation whose messages have texts and images in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from forge_plugins_vlm.data.references import Reference

ASSISTANT = "assistant"
"""The role whose texts are learned."""


@attrs.frozen
class Message:
    """One turn. A video is its frames."""

    role: str
    content: Sequence[str | Reference]


@attrs.frozen
class Sample:
    """A conversation."""

    messages: Sequence[Message]
    where: str
    """For messages: file and line."""
    name: str
    """What it is held out by: the file's relative name, and its number in it."""

    @property
    def references(self) -> list[Reference]:
        """Its images, in order."""
        return [part for message in self.messages for part in message.content if not isinstance(part, str)]
