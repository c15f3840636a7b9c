"""Documents: conversations as tokens, with the places of their images.

Shapes: L = tokens of a document, M = tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers import learned_tokens
from forge_plugins_data.encoding import begun, valid_text
from forge_plugins_vlm.contracts.image_processor import Layout
from forge_plugins_vlm.data.references import Reference
from forge_plugins_vlm.data.writing import Written

TEXT = -1
"""In ``slots``: it is text."""


@attrs.frozen
class Placed:
    """An image of a document."""

    reference: Reference
    at: int
    """Its first position."""
    layout: Layout
    length: int
    """Tokens that it takes."""


@attrs.frozen(eq=False)
class Document:
    """A conversation as tokens, of which the last one is learned."""

    tokens: np.ndarray
    """``(L,)`` int64."""
    learned: np.ndarray
    """``(L,)`` bool: which of them may be targets."""
    slots: np.ndarray
    """``(L,)`` int64, as the entry ``image_slots``, of its own tiles."""
    images: tuple[Placed, ...]
    where: str
    is_cut: bool = False
    """It is the beginning of a longer one."""

    @property
    def n_tiles(self) -> int:
        """Of all of its images."""
        return sum(image.layout.n_tiles for image in self.images)

    def positions(self, seq_len: int) -> int:
        """Positions that it takes of a sample: one for each token, unless the last one fits as a target alone."""
        return min(len(self.tokens), seq_len)

    def ranges(self) -> np.ndarray:
        """``(L, 3)`` int64: the entry ``image_range``, of its own tiles."""
        starts = np.array([image.at for image in self.images], dtype=np.int64)
        ends = np.cumsum([0, *(image.layout.n_tiles for image in self.images)])
        latest = [0]
        for number, image in enumerate(self.images):
            before = self.images[number - 1]
            follows = number > 0 and before.at + before.length == image.at
            latest.append(latest[-1] if follows else int(ends[number]))
        begun = np.searchsorted(starts, np.arange(len(self.tokens)), side="right")
        return np.stack([np.zeros_like(begun), np.array(latest)[begun], ends[begun]], axis=1)

    def cut(self, length: int, n_images: int) -> Document | None:
        """Its beginning, of so many tokens and whole images at most, up to the last that is learned; or nothing, if
        none is."""
        for number, image in enumerate(self.images):
            if number == n_images or image.at + image.length > length:
                length = min(length, image.at)
        return self.up_to(length)

    def up_to(self, length: int) -> Document | None:
        """Its first tokens, up to the last that is learned; or nothing, if none is."""
        learned = np.flatnonzero(self.learned[1:length]) + 1
        if not len(learned):
            return None
        stop = int(learned[-1]) + 1
        return attrs.evolve(
            self,
            tokens=self.tokens[:stop],
            learned=self.learned[:stop],
            slots=self.slots[:stop],
            images=tuple(image for image in self.images if image.at < stop),
        )

    def unlearned(self) -> Document:
        """Without targets."""
        return attrs.evolve(self, learned=np.zeros_like(self.learned))


class Encoder:
    """Turns written conversations into documents.

    Args:
        placeholder: what stands for an image in a text.
        tokens_a_tile: M.
        one_token_an_image: an image takes one token, in any layout.

    Attributes:
        placeholder_id: the token at positions of images.
    """

    def __init__(self, tokenizer: Tokenizer, *, placeholder: str, tokens_a_tile: int, one_token_an_image: bool) -> None:
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._tokens_a_tile = tokens_a_tile
        self._is_one_token = one_token_an_image
        self.placeholder_id = placeholder_id(tokenizer, placeholder)

    def __call__(
        self, written: Written, images: Sequence[tuple[Reference, Layout]], where: str, *, is_prompt: bool = False
    ) -> Document:
        """
        Args:
            images: in the order of their placeholders.
            where: names the conversation in messages.
            is_prompt: it is to be continued: all of it is kept, and there need be no answer.

        Raises:
            ConfigError: placeholders and images differ in number; there is nothing to learn; the token of the
                placeholder comes from something else in the text; it is not UTF-8.
        """
        text = str(valid_text(written.text, None, where))
        found = text.count(self._placeholder)
        if found != len(images):
            raise ConfigError(f"{where} has {found} placeholders {self._placeholder!r} and {len(images)} images")
        tokens: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        placed: list[Placed] = []
        if self._must_begin(text):
            begin = self._tokenizer.begin_of_document  # type: ignore[attr-defined]  # it has one
            tokens, learned, slots = [np.array([begin])], [np.zeros(1, bool)], [np.array([TEXT])]
        at, tiles = len(tokens), 0
        for start, stop, kind in self._pieces(text, written.ends):
            if kind == "image":
                reference, layout = images[len(placed)]
                own = np.array([TEXT]) if self._is_one_token else layout.slots
                placed.append(Placed(reference, at, layout, len(own)))
                ids, is_learned = np.full(len(own), self.placeholder_id), np.zeros(len(own), dtype=bool)
                own = np.where(own >= 0, own + tiles * self._tokens_a_tile, own)
                tiles += layout.n_tiles
            elif kind == "end":
                ids, is_learned, own = np.array([self._tokenizer.end_of_document]), np.ones(1, bool), np.array([TEXT])
            else:
                ids, is_learned = self._text(text[start:stop], start, written.answers)
                own = np.full(len(ids), TEXT)
                self._refuse_placeholder(ids, where)
            tokens.append(ids)
            learned.append(is_learned)
            slots.append(own)
            at += len(ids)
        document = Document(
            tokens=_joined(tokens, np.int64),
            learned=_joined(learned, bool),
            slots=_joined(slots, np.int64),
            images=tuple(placed),
            where=where,
        )
        if is_prompt:
            return document
        if (ended := document.up_to(len(document.tokens))) is None:
            raise ConfigError(f"{where} has nothing to learn: its answers are empty")
        return ended

    def _must_begin(self, text: str) -> bool:
        """Return whether the tokenizer has a token with which documents begin, and the text does not spell it."""
        ids = self._tokenizer.encode(text)
        return len(begun(self._tokenizer, ids)) > len(ids)

    def _pieces(self, text: str, ends: Sequence[int]) -> list[tuple[int, int, str]]:
        """Where texts, images and ends of documents stand, in order."""
        marks = [(end, end, "end") for end in ends]
        start = text.find(self._placeholder)
        while start >= 0:
            stop = start + len(self._placeholder)
            marks.append((start, stop, "image"))
            start = text.find(self._placeholder, stop)
        pieces, at = [], 0
        for start, stop, kind in sorted(marks, key=lambda mark: (mark[0], mark[2] != "end")):
            if start > at:
                pieces.append((at, start, "text"))
            pieces.append((start, stop, kind))
            at = stop
        return pieces if at == len(text) else [*pieces, (at, len(text), "text")]

    def _text(self, text: str, start: int, answers: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = self._tokenizer.encode_with_ends(text)  # type: ignore[attr-defined]  # tokenizer_of looked for it
        own = ((max(0, first - start), min(len(text), last - start)) for first, last in answers)
        spans = [(first, _without_lost_space(text, last, ends)) for first, last in own if first < last]
        return ids, learned_tokens(ends, spans)

    def _refuse_placeholder(self, ids: np.ndarray, where: str) -> None:
        if self.placeholder_id != self._tokenizer.end_of_document and (ids == self.placeholder_id).any():
            raise ConfigError(f"{where} has the token of the placeholder {self._placeholder!r} in a text; remove it")


def _without_lost_space(text: str, stop: int, ends: np.ndarray) -> int:
    """Where an answer ends, without spaces that are in no token, beyond which the next token would be taken for it."""
    stripped = len(text[:stop].rstrip())
    return stop if ((ends > stripped) & (ends <= stop)).any() else stripped


def placeholder_id(tokenizer: Tokenizer, placeholder: str) -> int:
    """The id of the placeholder, if the tokenizer has it as a token, and else that of its end of document."""
    ids = tokenizer.encode(placeholder).tolist()
    is_token = len(ids) == 1 and tokenizer.decode(ids).strip() == placeholder
    return int(ids[0]) if is_token else tokenizer.end_of_document


def forbidden_ids(tokenizer: Tokenizer, placeholder: str) -> list[int]:
    """Token ids that stand for images alone, which are not to be sampled."""
    found = placeholder_id(tokenizer, placeholder)
    return [] if found == tokenizer.end_of_document else [found]


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
