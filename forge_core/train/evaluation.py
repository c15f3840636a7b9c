"""The evaluations of a run: ``[eval]`` and ``[[evaluations]]``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import attrs
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.evaluation import Evaluation, EvaluationConfig, OpenData, label_of
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import PluginError, noting
from forge_core.train.metrics import Metrics
from forge_core.train.model_evaluator import GivenUpError, ModelEvaluator
from forge_core.train.run import Run


@attrs.frozen
class NamedEvaluation:
    """An entry of ``[[evaluations]]``."""

    evaluation: Evaluation
    interval: int
    label: str
    words: str
    """Names the component in messages."""

    def run(self, context: ModelEvaluator) -> dict[str, float]:
        """Its values, by the names under which they are logged.

        Raises:
            PluginError: one of them is no number, or is NaN.
        """
        with noting(f"raised by {self.words}"):
            values = self.evaluation.run(context)
        if not isinstance(values, Mapping):
            raise PluginError(f"{self.words} returned a {type(values).__name__}; it must return numbers by name")
        return {f"eval/{self.label}/{name}": self._number(name, value) for name, value in values.items()}

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            hint = "; read a tensor with .item()" if isinstance(value, torch.Tensor) else ""
            raise PluginError(f"{self.words} returned a {type(value).__name__} as {name!r}, not a number{hint}")
        if math.isnan(value):
            raise PluginError(f"{self.words} returned NaN as {name!r}; leave out what it cannot measure")
        return float(value)


def build_evaluations(
    job: Job, build: ComponentBuilder, open_data: OpenData, tokenizer: Tokenizer | None
) -> list[NamedEvaluation]:
    """The evaluations that a job names, with their data opened. Messages about data name the entry.

    Args:
        tokenizer: of the training data.

    Raises:
        ConfigError: what one of them needs is not there.
        PluginError: the config of one lacks the keys that every evaluation has.
    """
    for use in job.evaluations:
        if not isinstance(use.config, EvaluationConfig):
            raise PluginError(
                f"{build.words_for(use)}: its config {type(use.config).__qualname__} must extend EvaluationConfig. "
                f"This is a bug in {use.provider}."
            )

    def opener(path: str) -> OpenData:
        return lambda use, key: open_data(use, f"{path}.{key}")

    return [
        NamedEvaluation(
            build(use, open_data=opener(f"evaluations[{index}]"), tokenizer=tokenizer, seq_len=job.train.seq_len),
            use.config.interval,
            label_of(use),
            build.words_for(use),
        )
        for index, use in enumerate(job.evaluations)
    ]


@attrs.frozen
class Evaluations:
    """All ranks call it at the same steps."""

    run: Run
    evaluator: ModelEvaluator
    validation: DataSource | None
    """The data of ``[eval]``, if it is asked for."""
    named: Sequence[NamedEvaluation]
    metrics: Metrics
    """They measure training alone."""

    def run_if_due(self, step: int) -> Mapping[str, float]:
        """Evaluate, log and return the values; nothing if none is due, or it is given up as the run is to stop."""
        run, job = self.run, self.run.job
        due = [one for one in self.named if run.is_due(step, one.interval or job.train.steps)]
        validation = self.validation if run.is_due(step, job.eval.interval) else None
        if validation is None and not due:
            return {}
        self.metrics.log_pending()
        values: dict[str, float] = {}
        try:
            with self.evaluator.evaluating():
                run.emit("eval_start", step=step, model=self.evaluator)
                if validation is not None:
                    samples = job.eval.batches * (job.train.global_batch_size or 0)
                    values |= held_out_loss(self.evaluator, validation, samples)
                for one in due:
                    values |= one.run(self.evaluator)
        except GivenUpError:  # a resumed run goes on from this step, and does not evaluate it
            run.log(f"step {step}: the evaluation is given up, as the run is to stop; forge eval measures a checkpoint")
            return {}
        run.record({"step": step, **values})
        best = job.checkpoint.best_metric
        alike = [name for name in values if name.split("/")[:2] == best.split("/")[:2]]
        if job.checkpoint.keep_best and alike and best not in values:
            run.log(f"step {step}: checkpoint.best_metric = {best!r} was not measured, only {', '.join(alike)}")
        run.emit("eval_end", step=step, metrics=values)
        self.metrics.restart()
        return values


def held_out_loss(context: ModelEvaluator, validation: DataSource, samples: int) -> dict[str, float]:
    """The values of ``[eval]``."""
    loss = context.losses(validation, samples=samples)
    perplexity = {"eval/perplexity": loss.perplexity} if loss.has_perplexity else {}
    values = {"eval/loss": loss.mean, **perplexity, "eval/tokens": loss.count}
    values |= {f"eval/loss/{name}": of_one.mean for name, of_one in loss.sources.items() if of_one.count}
    if context.looks_ahead():
        values["eval/looks_ahead"] = 1
    return values
