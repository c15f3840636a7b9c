"""The keys of this package's components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import attrs

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class PerplexityConfig(EvaluationConfig):
    """The loss and the perplexity on data of its own."""

    data: Annotated[ComponentRef | None, Slot("data_source")] = None
    """Evaluated whole; by default the part that ``[data]`` holds out."""
    samples: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many sequences of ``train.seq_len`` tokens, from the first; 0 takes all."""


@attrs.frozen(kw_only=True)
class AccuracyConfig(PerplexityConfig):
    """How often the next token is the likeliest one, and among the likeliest."""

    top: int = attrs.field(default=5, validator=attrs.validators.ge(1))
    """``accuracy_top_<top>`` counts the next token among so many likeliest."""


def _not_empty(_: object, __: object, value: str) -> None:
    if not value:
        raise ValueError("must be a file, got an empty string")


@attrs.frozen(kw_only=True)
class ExactMatchConfig(EvaluationConfig):
    """Questions with one right answer, which the model answers token by token. Each token costs a forward of whole
    sequences."""

    path: str = attrs.field(validator=_not_empty)
    """A JSON Lines file, each line with ``prompt`` and ``answer``. Relative to the working directory."""
    max_new_tokens: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """The longest answer."""
    stop: str = "\n"
    """An answer ends before this text, or with the document. Spaces around it do not count. Empty: no such text."""
    samples: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many questions, from the first; 0 takes all."""
    shown: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many questions are printed with their answers each time."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Same as ``room_for_questions``."""
        yield from room_for_questions(self.max_new_tokens, job)


def room_for_questions(max_new_tokens: int, job: Job) -> Iterator[tuple[str, str]]:
    """What is wrong with the key ``max_new_tokens`` of an evaluation that generates answers, if anything is: they leave
    no token of a sequence to the question."""
    if max_new_tokens >= job.train.seq_len:
        sentence = f"{max_new_tokens} leave no room for a question in train.seq_len = {job.train.seq_len}; lower it"
        yield "max_new_tokens", sentence
