"""The model of a run as lm-evaluation-harness sees one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]  # it has no types
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]

from forge_core.contracts.evaluation import EvaluationContext
from forge_core.errors import ConfigError, PluginError
from forge_plugins_hf.continuations import Score, score_continuations
from forge_plugins_hf.harness_tokenizer import HarnessTokenizer, Messages
from forge_plugins_inference.generate_in_layout import generate_in_layout


class ModelInLayout(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """Does what the harness's ``HFLM`` does, on all ranks: each runs the harness and asks the same, what it asks is
    dealt to the data-parallel ranks, and each is told everything.

    Args:
        ends: tokens that end an answer.
        max_length: of a sequence, in tokens.
    """

    def __init__(
        self, context: EvaluationContext, tokenizer: HarnessTokenizer, ends: Sequence[int], max_length: int
    ) -> None:
        super().__init__()
        self._context = context
        self._tokenizer = tokenizer
        self._ends = {tokenizer.end, *ends}
        self._max_length = max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that has no context."""
        return self._tokenizer.prefix

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests, which is not used."""
        return "forge"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        return self._tokenizer.converse(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Of each continuation of a text, in nats, and whether it is the likeliest one."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Of whole texts, in nats, in windows that follow each other."""
        windows = [
            (number, *make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
        ]
        scores = self._score([(before, window) for _, before, window in windows], "windows of texts")
        totals = [0.0] * len(requests)
        for (number, _, _), score in zip(windows, scores, strict=True):
            totals[number] += score.log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The likeliest tokens behind each text, before what is to end them."""
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        self._begin([request.args for request in requests], "answers")
        for numbers in alike.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1])
            room = self._max_length - settings["max_gen_toks"]
            asked = {one: requests[one].args[0] for one in numbers}
            whole = {one: self._tokenizer.encode_prompt(text) or [self.prefix_token_id] for one, text in asked.items()}
            self._tell_of_cut(sum(len(prompt) > room for prompt in whole.values()), room)
            prompts = {one: prompt[-room:] for one, prompt in whole.items()}
            for chunk in self._by_length(prompts):
                texts = self._generate([prompts[one] for one in chunk], settings)
                for one, text in zip(chunk, texts, strict=True):
                    answers[one] = text
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = [(before, continuation) for _, before, continuation in requests]
        return [(score.log_likelihood, score.is_likeliest) for score in self._score(pairs, "continuations")]

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], words: str) -> list[Score]:
        self._begin(pairs, words)
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > self._max_length:
            raise ConfigError(f"lm_eval: a continuation has {longest} tokens, and max_length is {self._max_length}")
        lengths = [len(before) + len(continuation) - 1 for before, continuation in pairs]  # the last goes into no model
        self._tell_of_cut(sum(length > self._max_length for length in lengths), self._max_length)
        return score_continuations(self._context, pairs, max_length=self._max_length)

    def _tell_of_cut(self, number: int, longest: int) -> None:
        if number:
            self._context.log(f"lm_eval: {number:,} are longer than {longest} tokens, and lose their beginnings")

    def _begin(self, asked: Sequence[Any], words: str) -> None:
        """Say what is to be done. Ranks that do not ask the same would give each other wrong answers.

        Raises:
            PluginError: they do not.
        """
        self._context.log(f"lm_eval: {len(asked):,} {words}")
        own = zlib.crc32(repr(asked).encode()) % 2**20  # a sum of such is exact
        sums = self._context.sum_over_ranks({"hash": own, "ranks": 1})
        if sums["hash"] != own * sums["ranks"]:
            raise PluginError(
                "lm_eval: the ranks have made different questions of the same tasks; set the environment variable "
                "PYTHONHASHSEED to a number, and tell us of the task"
            )

    def _by_length(self, prompts: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """The numbers of prompts, from the longest, as many at a time as fit into a batch of each rank."""
        parallel, train = self._context.job.parallel, self._context.job.train
        size = train.batch_size * (self._context.world_size // (parallel.tp * parallel.cp * parallel.pp))
        ordered = sorted(prompts, key=lambda number: (-len(prompts[number]), number))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def _generate(self, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[str]:
        stops = [stop for stop in (*settings["until"], self._tokenizer.end_text) if stop]

        def has_ended(tokens: Sequence[int]) -> bool:
            if tokens[-1] in self._ends:
                return True
            text = self._tokenizer.decode(tokens)
            return any(stop in text for stop in stops)

        given = generate_in_layout(self._context, prompts, max_new_tokens=settings["max_gen_toks"], has_ended=has_ended)
        return [self._text(tokens, stops) for tokens in given]

    def _text(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        ended = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        text = self._tokenizer.decode(tokens[:ended])
        for stop in stops:
            text = text.partition(stop)[0]
        return text
