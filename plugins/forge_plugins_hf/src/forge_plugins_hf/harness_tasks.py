"""Tasks of lm-evaluation-harness, found and made ready."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lm_eval.api.task  # type: ignore[import-untyped]  # it has no types
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

from forge_core.errors import ConfigError
from forge_plugins_hf.harness_config import HarnessConfig

_OF_LIKELIEST_TOKENS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
"""Settings of an answer that are followed, or change nothing about the likeliest tokens."""


def load_tasks(config: HarnessConfig) -> dict[str, dict[str, Any]]:
    """The tasks that a configuration names, with their data, as the harness's ``evaluate`` takes them.

    Raises:
        ConfigError: there is no such task, it cannot be loaded, or it asks for something that is not done here.
    """
    lm_eval.api.task.tqdm = lambda documents, **_: documents  # else a bar of each task on each rank
    manager = _manager(config)
    found: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in config.tasks:
        try:
            loaded: Mapping[str, Any] = manager.load([name])
        except Exception as error:
            raise ConfigError(_cannot_be_loaded(name, error)) from error
        found["tasks"] |= loaded["tasks"]
        found["groups"] |= loaded["groups"]
    for name, task in found["tasks"].items():
        if problem := _problem(task):
            raise ConfigError(f"lm_eval: the task {name!r} {problem}")
        _set_examples(task, config.num_fewshot)
    return found


def refuse_long_answers(tasks: Mapping[str, Any], max_length: int) -> None:
    """
    Raises:
        ConfigError: an answer may be so long that a sequence has no room for its question.
    """
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until" and (longest := _settings(task)["max_gen_toks"]) >= max_length:
            raise ConfigError(
                f"lm_eval: an answer to the task {name!r} has up to {longest} tokens (max_gen_toks), which leaves no "
                f"room for its question in max_length = {max_length}"
            )


def _manager(config: HarnessConfig) -> TaskManager:
    """It knows the folder's tasks alone where these are all that is asked for: the harness's own are 10,000 files."""
    folder = None if config.include_path is None else Path(config.include_path).expanduser()
    passed_over: list[str] = []
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"include_path = {config.include_path!r}: there is no such folder")
        with _passed_over() as passed_over:
            own = TaskManager(include_path=str(folder), include_defaults=False)
        if set(config.tasks) <= {*own.all_subtasks}:
            return own
    every = TaskManager(include_path=None if folder is None else str(folder))
    for name in config.tasks:
        if name not in every.all_tasks:
            near = [repr(one) for one in get_close_matches(name, every.all_tasks, n=3)]
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            where = " or a file in include_path" if folder is not None else ""
            files = f". Passed over there: {'; '.join(passed_over[:3])}" if passed_over else ""
            raise ConfigError(f"tasks: {name!r} is no task of lm_eval{where}{hint}{files}")
    return every


@contextmanager
def _passed_over() -> Iterator[list[str]]:
    """The files that are no task, with the reason, which the harness tells its log for debugging alone."""
    logger = logging.getLogger("lm_eval.tasks._index")
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(" ".join(record.getMessage().removeprefix("Skip ").split()))  # type: ignore[method-assign]
    handler.addFilter(lambda record: str(record.msg).startswith("Skip "))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _cannot_be_loaded(name: str, error: Exception) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"lm_eval: the task {name!r} cannot be loaded: {type(error).__name__}: {first_line}. Data of the hub need a "
        "network, or a cache (HF_HOME) that has been filled where there is one"
    )


def _problem(task: Any) -> str | None:
    if getattr(task, "UNSAFE_CODE", False):
        return "runs code that the model writes, which is not done here"
    if getattr(task, "MULTIMODAL", False):
        return "asks about more than text"
    if task.OUTPUT_TYPE != "generate_until":
        return None
    settings = _settings(task)
    if settings["do_sample"]:
        return "samples its answers (do_sample); the evaluation gives the likeliest tokens alone"
    if others := sorted(key for key in settings if key not in _OF_LIKELIEST_TOKENS and settings[key] != 1):
        return f"asks for {', '.join(others)} in generation_kwargs; the evaluation gives the likeliest tokens alone"
    return None


def _settings(task: Any) -> Mapping[str, Any]:
    """How a task wants its answers, by the harness's names and with its defaults."""
    settings: Mapping[str, Any] = normalize_gen_kwargs(task.get_config("generation_kwargs") or {})
    return settings


def _set_examples(task: Any, number: int | None) -> None:
    """How many answered questions come first, as the harness's ``simple_evaluate`` decides it."""
    said = task.get_config("num_fewshot")
    if said is None or (number is not None and said != 0):
        task.set_config(key="num_fewshot", value=number or 0)
