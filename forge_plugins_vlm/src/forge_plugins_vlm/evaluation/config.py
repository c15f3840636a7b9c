"""What can be set for evaluations of answers about images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import ge, min_len, optional

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.evaluation import EvaluationConfig
from forge_plugins_inference.config import room_for_questions
from forge_plugins_vlm.contracts.image_processor import ImageProcessorConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.data.config import from_one

if TYPE_CHECKING:
    from forge_core.config.sections import Job

Measure = Literal["cider", "exact_match", "vqa_accuracy", "yes_no_f1"]


def _different(_: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{attribute.name} must be different ones, at least one, got {[*value]}")


@attrs.frozen(kw_only=True)
class ImageAnswersConfig(EvaluationConfig):
    """Answers by the likeliest tokens, compared with those of the data. Each token costs a forward of whole
    sequences, which every layout can do."""

    data: Annotated[ComponentRef | None, Slot("data_source")] = None
    """Where the questions are, each sample one; by default the part that ``[data]`` holds out. Of several turns the
    first answer counts."""
    samples: int = attrs.field(default=0, validator=ge(0))
    """How many samples, from the first; 0 takes all."""
    measures: tuple[Measure, ...] = attrs.field(default=("exact_match",), validator=_different)
    """``exact_match``: the same text. ``vqa_accuracy``: agreement with people's answers (VQA). ``yes_no_f1``: of yes,
    among yes and no (POPE). ``cider``: weighted n-grams (CIDEr-D). Samples with the same prompt and images are several
    references of one question."""
    max_new_tokens: int = attrs.field(default=32, validator=ge(1))
    """The longest answer."""
    shown: int = attrs.field(default=0, validator=ge(0))
    """How many questions are printed with their answers each time."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Same as ``room_for_questions``."""
        yield from room_for_questions(self.max_new_tokens, job)


@attrs.frozen(kw_only=True)
class ImageDependenceConfig(ImageAnswersConfig):
    """The same with real images, with those of other samples, and with blank ones, beside the loss of each: whether
    the model looks at its images."""


@attrs.frozen(kw_only=True)
class ImageChoicesConfig(EvaluationConfig):
    """Multiple choice by log-likelihood: of the choices of a question, the one that the model likes most counts.

    A choice is written behind its prompt. Its log-likelihood is the sum over its own tokens, without an end;
    ``accuracy`` is by that, ``normalised`` by its mean over the tokens, and ``log_likelihood`` is the mean sum of the
    right choices, in nats. Each choice costs a forward of a whole sequence, which every layout can do.
    """

    path: str = attrs.field(validator=min_len(1))
    """JSON Lines (also ``.gz`` and ``.zst``): ``{"image": "a.png", "prompt": "<image> is it red ?", "choices": ["yes",
    "no"], "answer": 0}``. ``image`` is a name or an array of names, and missing where there is none; ``answer`` is the
    place of the right choice, from 0. Relative to the working directory; ``~`` is the home directory."""
    images: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """The folder that names of images are relative to, by default that of the file."""
    processor: Annotated[ComponentRef, Slot("image_processor", default="square")]
    """What makes tiles of images, as in the training data."""
    token_grid: Grid = attrs.field(validator=from_one)
    """Rows and columns of the tokens that the model's connector gives for a tile."""
    one_token_an_image: bool = False
    """An image is a single token of the text, as cross-attention has it."""
    placeholder: str = attrs.field(default="<image>", validator=min_len(1))
    """Stands for an image in a prompt."""
    separator: str = " "
    """Stands between a prompt and its choice."""
    samples: int = attrs.field(default=0, validator=ge(0))
    """How many questions, from the first; 0 takes all."""

    @property
    def processor_config(self) -> ImageProcessorConfig:
        """That of ``processor``."""
        config: ImageProcessorConfig = self.processor.config
        return config
