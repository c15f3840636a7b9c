"""What can be set for evaluations of answers about images."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import attrs
from attrs.validators import ge

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.evaluation import EvaluationConfig

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


@attrs.frozen(kw_only=True)
class ImageDependenceConfig(ImageAnswersConfig):
    """The same with real images, with those of other samples, and with blank ones, beside the loss of each: whether
    the model looks at its images."""
