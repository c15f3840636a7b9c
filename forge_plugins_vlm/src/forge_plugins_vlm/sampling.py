"""What the model of a run says of images, in any layout.

Shapes: B = prompts, S = positions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.evaluation import EvaluationContext
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_core.job import catalog_of
from forge_core.registry.discovery import discover
from forge_plugins_inference.generate_in_layout import generate_in_layout
from forge_plugins_vlm.config import image_sources
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.prompts import Prompt, PromptReader


def reader_of(job: Job, tokenizer: Tokenizer | None) -> PromptReader:
    """What reads prompts as the job's data have them.

    Raises:
        ConfigError: they have no images, or no tokenizer.
    """
    config = image_text_of(job)
    if config is None or tokenizer is None:
        raise ConfigError(f"data.name = {job.data.name!r}: it has no images (image_text), or no tokenizer")
    build = ComponentBuilder(catalog_of(job, discover))
    return PromptReader(config, tokenizer, build(config.processor))


def image_text_of(job: Job) -> ImageTextConfig | None:
    """The first source ``image_text`` of a job's data."""
    sources = (one for _, one in image_sources(job.data.config, "data"))
    return next((one for one in sources if isinstance(one, ImageTextConfig)), None)


def say(model: EvaluationContext, reader: PromptReader, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[str]:
    """Continue prompts by the likeliest tokens, up to the end of an answer. All ranks call it together.

    Args:
        model: as evaluations and callbacks (``eval_start``) are given it.
        prompts: the same on all ranks.
        max_new_tokens: with the longest prompt at most what the model takes.

    Returns:
        The texts of the new tokens, the same on all ranks.
    """
    found = generate_in_layout(
        model,
        [one.tokens for one in prompts],
        max_new_tokens=max_new_tokens,
        has_ended=reader.answer_end.has_come,
        inputs=functools.partial(entries_of_prompts, reader, prompts),
        forbidden=reader.forbidden,
    )
    return [reader.answer_end.text_before(tokens).strip() for tokens in found]


def entries_of_prompts(
    reader: PromptReader, prompts: Sequence[Prompt], numbers: Sequence[int], width: int
) -> Mapping[str, np.ndarray]:
    """The entries beside tokens of the prompts with these numbers, in sequences of a length; what follows a prompt sees
    what its last token does."""
    own = [prompts[number] for number in numbers]
    batch = reader.collated(own, width)
    for row, prompt in enumerate(own):
        length = len(prompt.tokens)
        batch["image_range"][row, length:] = batch["image_range"][row, length - 1]
    return {name: entry for name, entry in batch.items() if name not in ("tokens", "targets")}
