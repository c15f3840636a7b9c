"""Multiple-choice questions about images, as lines of a file have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import attrs

from forge_core.errors import ConfigError
from forge_plugins_data.documents import read_records
from forge_plugins_vlm.data.references import Reference
from forge_plugins_vlm.data.rows import Row, shown
from forge_plugins_vlm.evaluation.config import ImageChoicesConfig


@attrs.frozen
class ChoiceQuestion:
    """A line."""

    prompt: str
    """With a placeholder for each image."""
    images: Sequence[Reference]
    choices: Sequence[str]
    answer: int
    """The place of the right choice."""
    where: str
    """For messages."""


def read_choice_questions(config: ImageChoicesConfig) -> list[ChoiceQuestion]:
    """The questions of a file.

    Raises:
        ConfigError: it is not there, or empty; a line is no question.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"path = {config.path!r} is no file; it must be JSON Lines of questions with choices")
    folder = path.parent if config.images is None else Path(config.images).expanduser()
    records = itertools.islice(read_records(path), config.samples or None)
    found = [
        _question(Row(record, str(where), f"{path.name}:{number}", folder.joinpath), config.placeholder)
        for number, (record, where) in enumerate(records, 1)
    ]
    if not found:
        raise ConfigError(f"path = {config.path!r} has no questions")
    return found


def _question(row: Row, placeholder: str) -> ChoiceQuestion:
    prompt = row.text(row.field("prompt"), "'prompt'")
    choices = [row.text(one, f"choice {number}") for number, one in enumerate(row.listed("choices"))]
    answer = row.field("answer")
    if not prompt.strip():
        raise ConfigError(f"{row.where}: 'prompt' is empty; a choice needs something before it")
    if len(choices) < 2:
        raise ConfigError(f"{row.where}: 'choices' must be two or more, it is {shown(choices)}")
    if len(set(choices)) < len(choices):
        raise ConfigError(f"{row.where}: 'choices' must be different ones, it is {shown(choices)}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ConfigError(
            f"{row.where}: 'answer' must be the place of the right choice, 0 to {len(choices) - 1}, it is "
            f"{shown(answer)}"
        )
    for number, choice in enumerate(choices):
        if placeholder in choice:
            raise ConfigError(f"{row.where}: choice {number} has the placeholder {placeholder!r}; remove it")
    value = row.record.get("image")
    images = [row.picture(one) for one in (value if isinstance(value, list) else [] if value is None else [value])]
    return ChoiceQuestion(prompt, images, choices, answer, row.where)
