"""The model of a run as lmms-eval sees one."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.instance import GenerationResult  # type: ignore[import-not-found]
from lmms_eval.api.model import lmms  # type: ignore[import-not-found]  # it is an extra

from forge_core.contracts.evaluation import EvaluationContext
from forge_core.errors import ConfigError
from forge_plugins_hf.continuations import score_continuations
from forge_plugins_hf.lmms_config import LmmsConfig
from forge_plugins_hf.lmms_pictures import PictureReader, Pictures
from forge_plugins_vlm.data.document import Document
from forge_plugins_vlm.data.prompts import Prompt, PromptReader
from forge_plugins_vlm.sampling import entries_of_prompts, say

_CHANGES_NOTHING = ("max_new_tokens", "until", "num_beams", "top_p", "top_k")


class ImagesInLayout(lmms):  # type: ignore[misc]  # it has no types
    """Answers on all ranks together: each asks the same, and what it asks is dealt to the data-parallel ranks."""

    def __init__(
        self, context: EvaluationContext, reader: PromptReader, config: LmmsConfig, data: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._context, self._reader, self._pictures = context, reader, PictureReader(reader, data)
        self._max_new_tokens, self._cuts = config.max_new_tokens, config.too_long == "cut"
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
        rooms = [self._room(request.args[1]) for request in requests]
        self._look_at_lengths([(one.args[0], one.args[2:], room) for one, room in zip(requests, rooms, strict=True)])
        for numbers in alike.values():
            settings, room = requests[numbers[0]].args[1], rooms[numbers[0]]
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
        asked = [self._continuation(request.args) for request in requests]
        self._look_at_lengths([(text, rest, len(ids)) for text, rest, ids in asked])
        found: list[Any] = []
        for start in range(0, len(asked), self._at_once):
            chunk = asked[start : start + self._at_once]
            prompts = [self._prompt(text, rest, len(ids)) for text, rest, ids in chunk]
            pairs = [(prompt.tokens, ids) for prompt, (_, _, ids) in zip(prompts, chunk, strict=True)]
            inputs = functools.partial(entries_of_prompts, self._reader, prompts)
            scores = score_continuations(self._context, pairs, max_length=self._longest, inputs=inputs)
            for one, (_, ids) in zip(scores, pairs, strict=True):
                found.append(GenerationResult(text=(-one.log_likelihood / len(ids), one.is_likeliest)))
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not done."""
        raise ConfigError("lmms_eval: tasks of several rounds are not done here")

    def _room(self, settings: Mapping[str, Any]) -> int:
        """Tokens of an answer."""
        return min(int(settings.get("max_new_tokens") or self._max_new_tokens), self._max_new_tokens)

    def _continuation(self, args: Sequence[Any]) -> tuple[str, Sequence[Any], list[int]]:
        """A question, what gives its images and so on, and the tokens of a continuation.

        Raises:
            ConfigError: it has none; or is asked without images.
        """
        if len(args) < 6:
            raise ConfigError("lmms_eval: acc_mutual_info asks without an image, which is not done here")
        text, target, *rest = args
        visual, document, task, split = rest
        if callable(target):
            self._pictures(visual, document, task, split)  # of the same row, which is not kept
            target = target(self._pictures.row(document, task, split))
        if not (ids := [int(one) for one in self._reader.tokenizer.encode(str(target))]):
            raise ConfigError(f"lmms_eval: question {document} of {task} has an empty continuation")
        return text, rest, ids

    def _look_at_lengths(self, asked: Sequence[tuple[str, Sequence[Any], int]]) -> None:
        """Refuse questions that are too long before the first is asked, or tell how many are cut.

        Args:
            asked: text, what gives its images and so on, and tokens of the answer.

        Raises:
            ConfigError: some are, and such are refused; or images alone are.
        """
        said = [sentence for one in asked if (sentence := self._too_long(*one))]
        if not said:
            return
        number = f"{len(said):,} of {len(asked):,} questions are too long"
        if not self._cuts:
            raise ConfigError(f'lmms_eval: {number}; {said[0]}. Set too_long = "cut", or another max_new_tokens')
        self._context.log(f"lmms_eval: {number}, and lose the beginnings of their texts; {said[0]}")

    def _too_long(self, text: str, rest: Sequence[Any], room: int) -> str:
        """A sentence about a question that is; nothing about another."""
        pictures = self._pictures(*rest)
        if (length := self._length(text, pictures)) + room <= self._longest:
            return ""
        sentence = f"{pictures.where} has {length} tokens, and an answer {room}; the model takes {self._longest}"
        if self._cuts and self._length(" ", pictures) + room > self._longest:
            raise ConfigError(f"lmms_eval: {sentence}; its {len(pictures.tiles)} images alone are too long")
        return sentence

    def _prompt(self, text: str, rest: Sequence[Any], room: int) -> Prompt:
        """A question with its images before it, cut to leave room for an answer."""
        pictures = self._pictures(*rest)
        left_out, most = 0, len(text)
        if self._length(text, pictures) + room > self._longest:
            while left_out < most:  # the fewest characters without which it fits
                middle = (left_out + most) // 2
                fits = self._length(text[middle:] or " ", pictures) + room <= self._longest
                left_out, most = (left_out, middle) if fits else (middle + 1, most)
        return Prompt(*self._asked(text[left_out:], pictures), pictures.tiles)

    def _length(self, text: str, pictures: Pictures) -> int:
        return len(self._asked(text, pictures)[1].tokens)

    def _asked(self, text: str, pictures: Pictures) -> tuple[str, Document]:
        """A question behind its images, as text and as tokens."""
        asked = self._reader.asked(text, len(pictures.tiles))
        return asked, self._reader.document(asked, pictures.references, f"lmms_eval: {pictures.where}")


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
