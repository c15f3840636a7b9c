"""The evaluation ``image_choices``.

Shapes: B = batch, S = sequence, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import ImageProcessor, Layout, Processed
from forge_plugins_vlm.data.collation import Shape, collate
from forge_plugins_vlm.data.config import entries_of
from forge_plugins_vlm.data.document import Document, Encoder
from forge_plugins_vlm.data.references import Reference, UnreadableError
from forge_plugins_vlm.data.video import open_images
from forge_plugins_vlm.data.writing import Written
from forge_plugins_vlm.evaluation.choice_questions import ChoiceQuestion, read_choice_questions
from forge_plugins_vlm.evaluation.config import ImageChoicesConfig


class ImageChoices(Evaluation):
    """Multiple choice by log-likelihood."""

    def __init__(
        self,
        config: ImageChoicesConfig,
        /,
        *,
        open_data: OpenData,
        tokenizer: Tokenizer | None,
        seq_len: int,
        build: Builder,
    ) -> None:
        if tokenizer is None or not hasattr(tokenizer, "encode_with_ends"):
            raise ConfigError(
                "the training data have no tokenizer with encode_with_ends, by which the tokens of a choice are told; "
                "choose one for them, such as tokenizer_file"
            )
        self._questions = read_choice_questions(config)
        self._choices = _Choices(config, self._questions, tokenizer, build(config.processor))
        if (longest := self._choices.longest) > seq_len:
            raise ConfigError(
                f"a prompt with its choice has {longest + 1} tokens, and train.seq_len + 1 is {seq_len + 1}; shorten "
                "it, or raise train.seq_len"
            )

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        if context.looks_ahead():
            context.log("image_choices: the model looks ahead, so that it cannot be asked; nothing is measured")
            return {}
        parallel = context.job.parallel
        self._choices.pad_to_multiple(2 * parallel.cp * parallel.tp)
        sums = {str(number): 0.0 for number in range(len(self._choices))}
        for batch in context.batches(self._choices):
            numbers = batch["targets"][:, 0].tolist()
            inputs = {name: entry for name, entry in batch.items() if name != "targets"}
            logits = context.predict(inputs)
            if logits is None:  # as on earlier stages of a pipeline
                continue
            likelihoods = [
                _log_likelihood(row, self._choices.documents[number])
                for row, number in zip(logits, numbers, strict=True)
                if number != IGNORED
            ]
            if likelihoods:
                values = torch.stack(likelihoods).tolist()
                sums |= dict(zip((str(one) for one in numbers if one != IGNORED), values, strict=True))
        summed = context.sum_over_ranks(sums)
        return self._measured([summed[str(number)] for number in range(len(self._choices))])

    def _measured(self, likelihoods: Sequence[float]) -> dict[str, float]:
        """
        Args:
            likelihoods: of the choices of all questions, one question after the other.
        """
        hits = normalised_hits = right = 0.0
        start = 0
        for question in self._questions:
            own = slice(start, start + len(question.choices))
            sums = np.array(likelihoods[own])
            means = sums / [int(document.learned.sum()) for document in self._choices.documents[own]]
            hits += int(sums.argmax()) == question.answer
            normalised_hits += int(means.argmax()) == question.answer
            right += float(sums[question.answer])
            start = own.stop
        total = len(self._questions)
        return {"accuracy": hits / total, "normalised": normalised_hits / total, "log_likelihood": right / total}


def _log_likelihood(logits: torch.Tensor, document: Document) -> torch.Tensor:
    """The sum over the tokens of a choice, in nats, fp32 without dimensions.

    Args:
        logits: ``(S, V)`` of its row.
    """
    places = np.flatnonzero(document.learned)
    tokens = torch.from_numpy(document.tokens[places]).to(logits.device)
    before = torch.from_numpy(places - 1).to(logits.device)
    return logits[before].float().log_softmax(-1).gather(-1, tokens[:, None]).sum()


class _Choices:
    """Prompts with each of their choices as samples, each with its number as its first target, by which a rank knows
    what it was dealt.

    Attributes:
        documents: of each sample; what is learned of it is the choice.
    """

    def __init__(
        self,
        config: ImageChoicesConfig,
        questions: Sequence[ChoiceQuestion],
        tokenizer: Tokenizer,
        processor: ImageProcessor,
    ) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.vocab_size, self.fingerprint = tokenizer.vocab_size, ""
        self._config, self._processor = config, processor
        rows, columns = config.token_grid
        self._tokens_a_tile = rows * columns
        encode = Encoder(
            tokenizer,
            placeholder=config.placeholder,
            tokens_a_tile=self._tokens_a_tile,
            one_token_an_image=config.one_token_an_image,
        )
        self.documents: list[Document] = []
        for question in questions:
            images = [(image, self._layout(image, question.where)) for image in question.images]
            for number, choice in enumerate(question.choices):
                prompt = question.prompt + config.separator
                text = prompt + choice
                written = Written(text, [(len(prompt), len(text))])
                document = encode(written, images, f"choice {number} of {question.where}")
                if document.learned[0]:
                    raise ConfigError(f"{document.where} has nothing before it; set separator, or change the prompt")
                self.documents.append(document)
            self._processed(self.documents[-1])  # what cannot be read is found before the first step
        self.longest = max(len(document.tokens) - 1 for document in self.documents)
        self._width = self.longest

    def __len__(self) -> int:
        return len(self.documents)

    def pad_to_multiple(self, multiple: int) -> None:
        """From now on, samples have so many positions, or a multiple of it, which a layout can cut."""
        self._width = -(-self.longest // multiple) * multiple

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return entries_of(self._config.processor_config, None)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        assert self.tokenizer is not None, "there is one"
        shape = Shape(
            seq_len=self._width,
            fill=self.tokenizer.end_of_document,
            processor=self._config.processor_config,
            tokens_a_tile=self._tokens_a_tile,
            packed=False,
        )
        own = [self.documents[number] for number in indices.tolist()]
        batch = collate([[(document, self._processed(document))] for document in own], shape)
        batch["targets"][:] = IGNORED
        batch["targets"][:, 0] = indices
        return batch

    def _layout(self, image: Reference, where: str) -> Layout:
        try:
            return self._processor.layout(image.size(), self._config.token_grid)
        except OSError as error:
            raise ConfigError(f"{where}: {UnreadableError(image, error)}") from error

    def _processed(self, document: Document) -> list[Processed]:
        at_least = self._config.processor_config.at_least
        try:
            pictures = open_images([image.reference for image in document.images], at_least)
            return [self._processor(picture, self._config.token_grid) for picture in pictures]
        except UnreadableError as error:
            raise ConfigError(f"{document.where}: {error}") from error
