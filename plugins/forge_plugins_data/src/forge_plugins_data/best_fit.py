"""Best-fit packing: samples of whole documents, cut only where one is longer than a sample.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), section 3: documents that are longer
than a sample are cut into samples, and what is left of them, with all that are shorter, is packed by best-fit
decreasing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_plugins_data.token_samples import TokenFacts, TokenSamples

_SCAN = 2**24
"""Ids looked at together for ends of documents."""


@attrs.frozen(eq=False)
class Documents:
    """Documents of one array of tokens."""

    tokens: np.ndarray
    """``(N,)``, any integer type; possibly memory-mapped."""
    starts: np.ndarray
    """``(D,)`` int64."""
    stops: np.ndarray
    """``(D,)`` int64: behind the id that ends the document, if it has one."""
    where: str = "the data"
    """For messages: the file."""
    learned: np.ndarray | None = None
    """``(N,)`` bool: the tokens that may be targets. ``None`` is all."""

    def those(self, chosen: np.ndarray) -> Documents:
        """The documents where ``chosen`` ``(D,)`` is true."""
        return attrs.evolve(self, starts=self.starts[chosen], stops=self.stops[chosen])


def find_documents(tokens: np.ndarray, end_of_document: int, where: str = "the data") -> Documents:
    """The documents of an array, each with the id that ends it. The last one may go without."""
    parts = (
        np.flatnonzero(tokens[start : start + _SCAN] == end_of_document) + start + 1
        for start in range(0, len(tokens), _SCAN)
    )
    stops = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    if len(tokens) and (not len(stops) or stops[-1] < len(tokens)):
        stops = np.append(stops, len(tokens))
    return Documents(tokens, np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(stops)], stops, where)


class PackedDocuments(TokenSamples):
    """Samples of ``S`` tokens, each of one or several pieces; a piece is a document, or a part of one that is longer.

    The target of a token is the one after it in its document, if that is ``learned``. Without ``separator`` the target
    of a document's last token is the first of the next document in the sample. Behind the last piece,
    ``end_of_document`` without targets fills up the sample. A piece of a single token has nothing to predict and is
    left out.

    Samples stand in the order of their first pieces in the data, so that the first of them are no other than the rest.
    """

    def __init__(self, documents: Sequence[Documents], facts: TokenFacts, *, end_of_document: int) -> None:
        """Args: ``documents`` are in order; ``end_of_document`` fills up samples."""
        decided = ["best_fit", end_of_document, *map(_checksum, documents)]
        number = sum(len(one.stops) for one in documents)
        super().__init__(attrs.evolve(facts, identity=[*facts.identity, *decided], documents=number))
        self._arrays = documents
        self._end_of_document = end_of_document
        pieces = [_cut(one, index, facts.seq_len) for index, one in enumerate(documents)]
        which, starts, lengths, continues = map(np.concatenate, zip(*pieces, strict=True))
        order, self._bounds = best_fit(lengths, facts.seq_len)
        self._which, self._starts = which[order], starts[order]
        self._lengths, self._continues = lengths[order], continues[order]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def filled(self) -> float:
        """The share of positions that are no padding."""
        return float(self._lengths.sum() / max(1, len(self) * self.seq_len))

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.full((len(indices), self.seq_len), self._end_of_document, dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        self._touch({self._arrays[self._which[piece]].where for index in indices for piece in self._pieces(index)})
        document, positions = np.empty_like(tokens), np.empty_like(tokens)
        for row, index in enumerate(indices.tolist()):
            self._fill(index, tokens[row], targets[row], document[row], positions[row])
        self.refuse_strangers(indices, tokens, targets)
        batch = {"tokens": tokens, "targets": targets}
        if self._separator is not None:
            return {**batch, "document": document, "positions": positions}
        return {**batch, "positions": np.where(positions < 0, -1, np.arange(self.seq_len))}

    def _fill(
        self, index: int, tokens: np.ndarray, targets: np.ndarray, document: np.ndarray, positions: np.ndarray
    ) -> None:
        """Write a sample into rows ``(S,)``. Each piece is a document of its own, and so is the padding, with positions
        of −1."""
        end = number = 0
        for number, piece in enumerate(self._pieces(index)):
            array, start, length = self._arrays[self._which[piece]].tokens, self._starts[piece], self._lengths[piece]
            here = slice(end, end + length)
            tokens[here] = array[start : start + length]
            if end and self._separator is None:
                targets[end - 1] = tokens[end]
            following = length - (not self._continues[piece])
            targets[end : end + following] = array[start + 1 : start + 1 + following]
            if (learned := self._arrays[self._which[piece]].learned) is not None:
                targets[end : end + following][~learned[start + 1 : start + 1 + following]] = IGNORED
            document[here], positions[here] = number, np.arange(length)
            end += length
        document[end:], positions[end:] = number + 1, -1

    def _place(self, index: int, column: int) -> tuple[str, int]:
        for piece in self._pieces(index):
            length = int(self._lengths[piece])
            if column < length + bool(self._continues[piece]):
                return self._arrays[self._which[piece]].where, int(self._starts[piece]) + column
            column -= length
        raise AssertionError("padding has a known id")

    def _pieces(self, index: int) -> Iterator[int]:
        return iter(range(self._bounds[index], self._bounds[index + 1]))


def best_fit(
    lengths: np.ndarray, room: int, counts: np.ndarray | None = None, most: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into samples by best-fit decreasing: the longest first, each where the least room is left over.

    Args:
        lengths: ``(P,)`` int64, 1 to ``room``.
        counts: ``(P,)`` int64, 0 to ``most``: what else each piece has, such as images.
        most: the most of it in a sample.

    Returns:
        ``order`` ``(P,)``, the pieces sample by sample, and ``bounds`` ``(N + 1,)``: those of sample ``n`` are
        ``order[bounds[n] : bounds[n + 1]]``, ascending. Samples are sorted by their first piece.
    """
    counts = np.zeros_like(lengths) if counts is None else counts
    decreasing = np.argsort(-lengths, kind="stable")
    whole = int(np.count_nonzero(lengths == room))
    samples, n_samples = [*range(whole)], whole
    with_room: list[list[list[int]]] = [[[] for _ in range(room + 1)] for _ in range(most + 1)]  # by count and room
    rooms = [0] * (most + 1)  # of a count, the bit ``r`` says that some sample has room for exactly ``r``
    for length, count in zip(lengths[decreasing[whole:]].tolist(), counts[decreasing[whole:]].tolist(), strict=True):
        least, had = room + 1, 0
        for found in range(most - count, -1, -1):  # of equals, the one that has most
            if (above := rooms[found] >> length) and (fits := length + (above & -above).bit_length() - 1) < least:
                least, had = fits, found
        if least <= room:
            sample = with_room[had][least].pop()
            if not with_room[had][least]:
                rooms[had] ^= 1 << least
        else:
            least, had, sample = room, 0, n_samples
            n_samples += 1
        samples.append(sample)
        if left := least - length:
            with_room[had + count][left].append(sample)
            rooms[had + count] |= 1 << left
    sample_of = np.empty(len(lengths), dtype=np.int64)
    sample_of[decreasing] = samples
    first = np.full(n_samples, len(lengths), dtype=np.int64)
    np.minimum.at(first, sample_of, np.arange(len(lengths)))
    rank = np.empty(n_samples, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(n_samples)
    order = np.argsort(rank[sample_of], kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(rank[sample_of], minlength=n_samples))])
    return order, bounds


def _cut(documents: Documents, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces: the array that they are of, where they start, how long they are, and whether the document goes on."""
    sizes = documents.stops - documents.starts
    counts = np.maximum(1, -(-(sizes - 1) // seq_len))  # a piece of the last token alone has nothing to predict
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(documents.starts, counts) + number * seq_len
    left = np.repeat(documents.stops, counts) - starts
    lengths = np.minimum(left, seq_len)
    useful = left > 1
    return (
        np.full(int(useful.sum()), index, dtype=np.int32),
        starts[useful],
        lengths[useful],
        (left > seq_len)[useful],
    )


def _checksum(documents: Documents) -> str:
    """Says which documents of an array there are."""
    learned = b"" if documents.learned is None else np.packbits(documents.learned).tobytes()
    return hashlib.sha256(documents.starts.tobytes() + documents.stops.tobytes() + learned).hexdigest()
