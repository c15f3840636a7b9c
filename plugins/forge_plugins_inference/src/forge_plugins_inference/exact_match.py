"""The evaluation ``exact_match``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_inference.config import ExactMatchConfig
from forge_plugins_inference.generate_in_layout import generate_in_layout
from forge_plugins_inference.prompt import prompt_ids


@attrs.frozen
class Question:
    """A line of the file."""

    prompt: str
    answer: str


class ExactMatch(Evaluation):
    """The fraction of questions that the model answers as the file does, by its likeliest tokens."""

    def __init__(
        self, config: ExactMatchConfig, /, *, open_data: OpenData, tokenizer: Tokenizer | None, seq_len: int
    ) -> None:
        if tokenizer is None:
            raise ConfigError("exact_match: the training data have no tokenizer, so that questions cannot be read")
        self._tokenizer = tokenizer
        self._config = config
        self._questions = read_questions(Path(config.path).expanduser())[: config.samples or None]
        self._prompts = [prompt_ids(tokenizer, one.prompt) for one in self._questions]
        for number, prompt in enumerate(self._prompts, start=1):
            if len(prompt) + config.max_new_tokens > seq_len:
                raise ConfigError(
                    f"{config.path}: question {number} has {len(prompt)} tokens, and {config.max_new_tokens} new ones "
                    f"(max_new_tokens) are more than train.seq_len, {seq_len}"
                )
        for number, one in enumerate(self._questions, start=1):
            if config.stop and config.stop in one.answer.strip():
                raise ConfigError(
                    f"{config.path}: question {number} has the answer {one.answer!r}, and answers end before "
                    f"stop = {config.stop!r}, so that none equals it; set stop"
                )

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        if context.looks_ahead():
            context.log(
                "exact_match: the model looks ahead, so that it cannot answer token by token; nothing is measured"
            )
            return {}
        given = generate_in_layout(
            context, self._prompts, max_new_tokens=self._config.max_new_tokens, has_ended=self._has_ended
        )
        answers = [self._text(tokens) for tokens in given]
        for question, answer in zip(self._questions[: self._config.shown], answers, strict=False):
            context.log(f"exact_match: {question.prompt!r} → {answer!r}, expected {question.answer!r}")
        hits = sum(answer == one.answer.strip() for one, answer in zip(self._questions, answers, strict=True))
        return {"exact_match": hits / len(answers), "questions": len(answers)}

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        if tokens[-1] == self._tokenizer.end_of_document:
            return True
        return bool(self._config.stop) and self._config.stop in self._tokenizer.decode(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(tokens)
        return (text.partition(self._config.stop)[0] if self._config.stop else text).strip()


def read_questions(file: Path) -> list[Question]:
    """The questions of a JSON Lines file.

    Raises:
        ConfigError: it is not there or empty, or a line is no object with texts as ``prompt`` and ``answer``.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # texts may have other ends of lines, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        said = f"evaluations exact_match: path = {str(file)!r} cannot be read as questions: {why}"
        raise ConfigError(said) from error
    questions = [_question(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise ConfigError(f"{file}: has no question; write one a line, as {_EXAMPLE}")
    return questions


_EXAMPLE = '{"prompt": "2 + 2 = ", "answer": "4"}'


def _question(file: Path, number: int, line: str) -> Question:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}:{number}: is no JSON ({error}); write a line as {_EXAMPLE}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}:{number}: must be an object, as {_EXAMPLE}")
    for key in ("prompt", "answer"):
        if not isinstance(found.get(key), str) or (key == "prompt" and not found[key]):
            raise ConfigError(f"{file}:{number}: needs a text as {key!r}, as {_EXAMPLE}")
    return Question(found["prompt"], found["answer"])
