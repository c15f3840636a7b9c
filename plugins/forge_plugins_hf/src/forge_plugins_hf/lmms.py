"""The evaluation ``lmms_eval``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmms_eval.evaluator import evaluate  # type: ignore[import-not-found]  # it is an extra
from lmms_eval.tasks import TaskManager, get_task_dict  # type: ignore[import-not-found]

from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_hf.harness_results import values_of
from forge_plugins_hf.lmms_config import LmmsConfig
from forge_plugins_hf.lmms_model import ImagesInLayout, refuse_settings
from forge_plugins_vlm.sampling import reader_of

_ASKED = ("generate_until", "loglikelihood", "multiple_choice")
"""Kinds of tasks that are done."""


class Lmms(Evaluation):
    """Runs lmms-eval on each rank, with a model that all ranks are together: each asks the same questions."""

    def __init__(
        self, config: LmmsConfig, /, *, open_data: OpenData, tokenizer: Tokenizer | None, seq_len: int
    ) -> None:
        if tokenizer is None:
            raise ConfigError("lmms_eval: the training data have no tokenizer, so that questions cannot be read")
        self._config, self._tokenizer = config, tokenizer
        with _one_process():
            self._tasks = _load(config)

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        if context.looks_ahead():
            context.log("lmms_eval: the model looks ahead, so that it cannot be asked; nothing is measured")
            return {}
        data = {name: task.dataset for name, task in _leaves(self._tasks)}
        model = ImagesInLayout(context, reader_of(context.job, self._tokenizer), self._config, data)
        model.accelerator = SimpleNamespace()  # else one of ``accelerate`` is made, which is for several processes
        with _one_process():
            results = evaluate(
                lm=model,
                task_dict=self._tasks,
                limit=self._config.limit or None,
                bootstrap_iters=0,
                log_samples=False,
                cli_args=SimpleNamespace(process_with_media=True),
            )
        return dict(values_of(results["results"]))


def _load(config: LmmsConfig) -> dict[str, Any]:
    """
    Raises:
        ConfigError: there is no such task, it cannot be loaded, or asks for something that is not done here.
    """
    folder = None if config.include_path is None else Path(config.include_path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"include_path = {config.include_path!r}: there is no such folder")
    where = None if folder is None else str(folder)
    manager = None if where is None else TaskManager(include_path=where, include_defaults=False)
    if manager is None or not set(config.tasks) <= {*manager.all_tasks}:
        manager = TaskManager(include_path=where)
    for name in config.tasks:
        if name not in manager.all_tasks:
            raise ConfigError(f"tasks: {name!r} is no task of lmms_eval, nor of a file in include_path")
    try:
        tasks: dict[str, Any] = get_task_dict([*config.tasks], manager)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"lmms_eval: the tasks cannot be loaded: {type(error).__name__}: {line}. Data of the hub need a network, "
            "or a cache (HF_HOME) that has been filled where there is one"
        ) from error
    for name, task in _leaves(tasks):
        if task.OUTPUT_TYPE not in _ASKED:
            raise ConfigError(f"lmms_eval: the task {name!r} is {task.OUTPUT_TYPE}; what is done: {', '.join(_ASKED)}")
        if task.get_config("doc_to_visual") is None and task.get_config("doc_to_messages") is not None:
            raise ConfigError(f"lmms_eval: the task {name!r} has doc_to_messages alone, which is not done here")
        refuse_settings(name, task.get_config("generation_kwargs") or {})
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return tasks


def _leaves(tasks: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tasks in groups, by name."""
    for name, one in tasks.items():
        task = one[1] if isinstance(one, tuple) else one
        if isinstance(task, Mapping):
            yield from _leaves(task)
        elif task is not None:
            yield str(name), task


@contextmanager
def _one_process() -> Iterator[None]:
    """lmms-eval deals questions to the ranks that the environment names; here the model does so."""
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
