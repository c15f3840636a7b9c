"""The evaluation ``lm_eval``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # type: ignore[import-untyped]  # it has no types
from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]

from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_hf.harness_config import HarnessConfig
from forge_plugins_hf.harness_model import ModelInLayout
from forge_plugins_hf.harness_results import values_of
from forge_plugins_hf.harness_tasks import load_tasks, refuse_long_answers
from forge_plugins_hf.harness_tokenizer import harness_tokenizer


class Harness(Evaluation):
    """Runs lm-evaluation-harness on each rank, with a model that all ranks are together.

    Each rank has the tasks, draws the same random numbers and asks the same questions.
    """

    def __init__(
        self, config: HarnessConfig, /, *, open_data: OpenData, tokenizer: Tokenizer | None, seq_len: int
    ) -> None:
        if tokenizer is None:
            raise ConfigError("lm_eval: the training data have no tokenizer, so that questions cannot be read")
        self._config = config
        self._tokenizer = harness_tokenizer(tokenizer)
        self._ends = tuple(getattr(tokenizer, "ends_of_turn", ()))
        if config.apply_chat_template:
            self._tokenizer.converse([{"role": "user", "content": "?"}], add_generation_prompt=True)
        with _random_numbers():
            random.seed(DEFAULT_RANDOM_SEED)
            np.random.seed(DEFAULT_OTHER_SEED)
            self._tasks = load_tasks(config)
            self._drawn = _states()
        if config.max_length:
            refuse_long_answers(self._tasks["tasks"], config.max_length)

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        if context.looks_ahead():
            context.log("lm_eval: the model looks ahead, so that it cannot be asked; nothing is measured")
            return {}
        max_length = self._config.max_length or _longest(context)
        refuse_long_answers(self._tasks["tasks"], max_length)
        for task in self._tasks["tasks"].values():
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        model = ModelInLayout(context, self._tokenizer, self._ends, max_length)
        with _random_numbers(), _one_process():
            _restore(self._drawn)
            results = evaluate(
                lm=model,
                task_dict=self._tasks,
                limit=self._config.limit or None,
                bootstrap_iters=self._config.bootstrap_iters,
                log_samples=False,
                apply_chat_template=self._config.apply_chat_template,
                fewshot_as_multiturn=True,
            )
        return dict(values_of(results["results"]))


def _longest(context: EvaluationContext) -> int:
    """The model's longest sequence, in tokens; of a model that does not say it, that of its training."""
    return getattr(context.job.model.config, "max_seq_len", None) or context.job.train.seq_len


@contextmanager
def _random_numbers() -> Iterator[None]:
    """Those of Python and numpy, which tasks may draw, are the run's again afterwards."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


@contextmanager
def _one_process() -> Iterator[None]:
    """Standard errors are sampled here: a rank, which has threads and a process group, is not forked."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("DISABLE_MULTIPROC", None)
        else:
            os.environ["DISABLE_MULTIPROC"] = before
