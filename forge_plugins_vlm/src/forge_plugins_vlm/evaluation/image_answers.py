"""The evaluations ``image_answers`` and ``image_dependence``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_core.contracts.data_source import DataSource
from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.mixture_parts import WatchedParts
from forge_plugins_inference.generate_in_layout import generate_in_layout
from forge_plugins_vlm.answer_end import AnswerEnd
from forge_plugins_vlm.evaluation.config import ImageAnswersConfig
from forge_plugins_vlm.evaluation.metrics import METRICS
from forge_plugins_vlm.evaluation.pictures import Images, WithImages
from forge_plugins_vlm.evaluation.questions import Questions


class ImageAnswers(Evaluation):
    """Answers by the likeliest tokens, against those of the data."""

    def __init__(
        self, config: ImageAnswersConfig, /, *, open_data: OpenData, tokenizer: Tokenizer | None, seq_len: int
    ) -> None:
        if tokenizer is None:
            raise ConfigError("answers about images: the training data have no tokenizer, so that none can be read")
        self._config = config
        self._source = open_data(config.data, "data")
        sources = [*_sources_in(self._source)]
        self._end = AnswerEnd.of_any(tokenizer, [one.answer_end for one in sources if hasattr(one, "answer_end")])
        self._forbidden = sorted({token for one in sources for token in getattr(one, "forbidden", ())})
        self._questions = Questions(self._source, config.samples, tokenizer.end_of_document)
        longest = max(len(one.prompt) for one in self._questions.questions)
        if longest + config.max_new_tokens > seq_len:
            raise ConfigError(
                f"answers about images: a prompt has {longest} tokens, and {config.max_new_tokens} new ones "
                f"(max_new_tokens) are more than train.seq_len, {seq_len}"
            )

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        return self._measured(context, self._source)

    def _measured(self, context: EvaluationContext, source: DataSource, title: str = "") -> dict[str, float]:
        """What the metrics say of the answers to the questions of ``source``.

        Args:
            title: of the lines that show some.
        """
        if context.looks_ahead():
            context.log("images: the model looks ahead, so that it cannot answer token by token; nothing is measured")
            return {}
        questions = self._questions.questions
        given = generate_in_layout(
            context,
            [one.prompt for one in questions],
            max_new_tokens=self._config.max_new_tokens,
            has_ended=self._end.has_come,
            inputs=functools.partial(self._questions.inputs, source),
            forbidden=self._forbidden,
        )
        answers, wanted = [self._text(one) for one in given], [self._text(one.answer) for one in questions]
        for answer, own in list(zip(answers, wanted, strict=True))[: self._config.shown]:
            context.log(f"{title or 'images'}: {answer!r}, expected {own!r}")
        references = self._questions.references(wanted)
        found: dict[str, float] = {}
        for name in self._config.measures:
            found |= METRICS[name](answers, references)
        return found

    def _text(self, tokens: Sequence[int]) -> str:
        return self._end.text_before(tokens).strip()


def _sources_in(source: Any) -> Iterator[Any]:
    """The source itself, or those of a mixture, at any depth."""
    if isinstance(source, WatchedParts):
        for part in source.parts:
            yield from _sources_in(part.source)
    else:
        yield source


class ImageDependence(ImageAnswers):
    """The same, and the loss, with real images, with those of other samples, and with blank ones."""

    def __init__(
        self, config: ImageAnswersConfig, /, *, open_data: OpenData, tokenizer: Tokenizer | None, seq_len: int
    ) -> None:
        super().__init__(config, open_data=open_data, tokenizer=tokenizer, seq_len=seq_len)
        if len(self._questions.questions) < 2:
            raise ConfigError("image_dependence: there is one question, which has no other's images; give more data")

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        found: dict[str, float] = {}
        ways: tuple[Images, ...] = ("real", "shuffled", "blank")
        for images in ways:
            source = WithImages(self._source, images, self._config.samples)
            loss = context.losses(source, samples=self._config.samples).mean
            measured = {"loss": loss, **self._measured(context, source, f"{images} images")}
            found |= {f"{name}/{images}": value for name, value in measured.items()}
        if found["loss/shuffled"] < 1.01 * found["loss/real"]:
            context.log(
                f"image_dependence: the loss is {found['loss/real']:.4f} with real images and "
                f"{found['loss/shuffled']:.4f} with those of other samples; the model hardly looks at its images"
            )
        return found
