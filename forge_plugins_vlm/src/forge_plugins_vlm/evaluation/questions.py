"""Questions about images, as the samples of a data source have them.

Shapes: B = batch, S = sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from forge_core.contracts.batch import KNOWN, DescribedSource
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError


@attrs.frozen(eq=False)
class Question:
    """The beginning of a sample, up to its first answer."""

    prompt: list[int]
    """Token ids."""
    answer: list[int]
    """Token ids, without an end of document."""
    identity: str
    """A hash of prompt and images: equal ones are one question with several references."""


class Questions:
    """The first questions of a source, and the entries with which a model answers them. Samples without an answer, as
    those whose images cannot be read, are left out."""

    def __init__(self, source: DataSource, samples: int, end_of_document: int) -> None:
        """
        Args:
            samples: how many, from the first; 0 takes all.

        Raises:
            ConfigError: samples are packed, or none has an answer.
        """
        self._source = source
        number = min(samples or len(source), len(source))
        found = {index: _question(source.read(np.array([index])), end_of_document) for index in range(number)}
        asked = {index: question for index, question in found.items() if question is not None}
        if not asked:
            raise ConfigError(f"none of {number} samples has an answer to compare with")
        self.questions, self._indices = [*asked.values()], np.array([*asked])
        described = source.entries() if isinstance(source, DescribedSource) else {}
        self._dims = {name: entry.dims for name, entry in {**KNOWN, **described}.items()}

    def references(self, texts: Sequence[str]) -> list[list[str]]:
        """For each question the answers of all that are equal to it, its own first.

        Args:
            texts: the answers.
        """
        of_question: dict[str, list[str]] = {}
        for question, text in zip(self.questions, texts, strict=True):
            of_question.setdefault(question.identity, []).append(text)
        found = []
        for question, text in zip(self.questions, texts, strict=True):
            others = [*of_question[question.identity]]
            others.remove(text)
            found.append([text, *others])
        return found

    def inputs(self, source: DataSource, numbers: Sequence[int], width: int) -> dict[str, np.ndarray]:
        """Further entries of the questions with these numbers, in sequences of a length: as in the sample up to the
        answer, and from there on as of text that sees what the prompt's last token does.

        Args:
            source: with the same samples, and perhaps other images.
        """
        batch = source.read(self._indices[[*numbers]])
        return {
            name: self._continued(name, entry, numbers, width)
            for name, entry in batch.items()
            if name not in ("tokens", "targets", "positions", "document")
        }

    def _continued(self, name: str, entry: np.ndarray, numbers: Sequence[int], width: int) -> np.ndarray:
        if self._dims[name][1:2] != ("position",):
            return entry
        rows = np.empty((len(entry), width, *entry.shape[2:]), entry.dtype)
        for row, number in enumerate(numbers):
            length = len(self.questions[number].prompt)
            rows[row, :length] = entry[row, :length]
            rows[row, length:] = -1 if name == "image_slots" else entry[row, length - 1]
        return rows


def _question(batch: Mapping[str, np.ndarray], end_of_document: int) -> Question | None:
    """
    Args:
        batch: of one sample.

    Returns:
        Nothing, if it has no answer.
    """
    if "document" in batch:
        raise ConfigError("the data are packed, and a question needs a sample of its own; set packing = false")
    tokens, targets = batch["tokens"][0], batch["targets"][0]
    learned = np.flatnonzero(targets != IGNORED)
    if not len(learned):
        return None
    first = int(learned[0])
    behind = np.flatnonzero(targets[first:] == IGNORED)
    answer = targets[first : first + int(behind[0]) if len(behind) else None].tolist()
    if end_of_document in answer:
        answer = answer[: answer.index(end_of_document)]
    digest = hashlib.sha256(tokens[: first + 1].tobytes())
    if "pixels" in batch:
        digest.update(batch["pixels"].tobytes())
    return Question(tokens[: first + 1].tolist(), answer, digest.hexdigest())
