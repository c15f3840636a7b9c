"""The model of a run as lmms-eval sees one."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.instance import GenerationResult  # type: ignore[import-not-found]
from lmms_eval.api.model import lmms  # type: ignore[import-not-found]  # it is an extra
from PIL import Image

from forge_core.contracts.evaluation import EvaluationContext
from forge_core.errors import ConfigError
from forge_plugins_hf.continuations import score_continuations
from forge_plugins_vlm.data.prompts import Prompt, PromptReader
from forge_plugins_vlm.data.references import DecodedPicture
from forge_plugins_vlm.sampling import entries_of_prompts, say

_CHANGES_NOTHING = ("max_new_tokens", "until", "num_beams", "top_p", "top_k")


class ImagesInLayout(lmms):  # type: ignore[misc]  # it has no types
    """Answers on all ranks together: each asks the same, and what it asks is dealt to the data-parallel ranks."""

    def __init__(self, context: EvaluationContext, reader: PromptReader, max_new_tokens: int) -> None:
        super().__init__()
        self._context, self._reader, self._max_new_tokens = context, reader, max_new_tokens
        job = context.job
        self._longest = getattr(job.model.config, "max_seq_len", None) or job.train.seq_len
        parallel = job.parallel
        self._at_once = job.train.batch_size * (context.world_size // (parallel.tp * parallel.cp * parallel.pp))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The likeliest tokens behind each question, before what is to end them."""
        self._context.log(f"lmms_eval: {len(requests):,} answers")
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        answers = [""] * len(requests)
        for numbers in alike.values():
            settings = requests[numbers[0]].args[1]
            room = min(int(settings.get("max_new_tokens") or self._max_new_tokens), self._max_new_tokens)
            for start in range(0, len(numbers), self._at_once):
                chunk = numbers[start : start + self._at_once]
                prompts = [self._prompt(requests[one].args[0], requests[one].args[2:], room) for one in chunk]
                said = say(self._context, self._reader, prompts, max_new_tokens=room)
                for one, text in zip(chunk, said, strict=True):
                    answers[one] = _until(text, settings.get("until"))
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        """Of each continuation, nats a token, negated: lmms-eval takes the least for the best, as its own models give
        a loss; and whether it is the likeliest one. A bare pair it would make text of (0.7)."""
        self._context.log(f"lmms_eval: {len(requests):,} continuations")
        found: list[Any] = []
        for start in range(0, len(requests), self._at_once):
            pairs: list[tuple[list[int], list[int]]] = []
            prompts = []
            for request in requests[start : start + self._at_once]:
                if len(request.args) < 6:
                    raise ConfigError("lmms_eval: acc_mutual_info asks without an image, which is not done here")
                context, target, visual, document, task, split = request.args
                if callable(target):
                    target = target(self.task_dict[task][split][document])
                ids = [int(one) for one in self._reader.tokenizer.encode(str(target))]
                prompts.append(self._prompt(context, (visual, document, task, split), len(ids)))
                pairs.append((prompts[-1].tokens, ids))
            inputs = functools.partial(entries_of_prompts, self._reader, prompts)
            scores = score_continuations(self._context, pairs, max_length=self._longest, inputs=inputs)
            for one, (_, ids) in zip(scores, pairs, strict=True):
                found.append(GenerationResult(text=(-one.log_likelihood / len(ids), one.is_likeliest)))
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not done."""
        raise ConfigError("lmms_eval: tasks of several rounds are not done here")

    def _prompt(self, text: str, rest: Sequence[Any], room: int) -> Prompt:
        """A question with its images before it.

        Args:
            rest: what gives its images, its number, its task and its split.
            room: tokens of the answer.

        Raises:
            ConfigError: it has something else than images, or is too long.
        """
        visual, document, task, split = rest
        where = f"lmms_eval: question {document} of {task}"
        visuals = visual(self.task_dict[task][split][document]) if callable(visual) else []
        images = [one for one in visuals or () if one is not None]
        if wrong := [one for one in images if not isinstance(one, Image.Image)]:
            raise ConfigError(f"{where} has a {type(wrong[0]).__name__} where an image should be")
        pictures = [DecodedPicture(one, f"image {number} of {where}") for number, one in enumerate(images, 1)]
        prompt = self._reader(self._reader.asked(text, len(images)), pictures, where)
        if len(prompt.tokens) + room > self._longest:
            raise ConfigError(
                f"{where} has {len(prompt.tokens)} tokens, and an answer {room}; the model takes {self._longest}"
            )
        return prompt


def refuse_settings(task: str, settings: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a task samples its answers.
    """
    if settings.get("do_sample") or settings.get("temperature"):
        raise ConfigError(
            f"lmms_eval: the task {task!r} samples its answers; the evaluation gives the likeliest tokens alone"
        )
    known = (*_CHANGES_NOTHING, "do_sample", "temperature")
    if others := sorted(name for name in settings if name not in known):
        raise ConfigError(f"lmms_eval: the task {task!r} asks for {', '.join(others)}, which is not done here")


def _until(text: str, ends: str | Sequence[str] | None) -> str:
    """The text before the first of what is to end it."""
    for end in [ends] if isinstance(ends, str) else ends or ():
        if end:
            text = text.partition(end)[0]
    return text
