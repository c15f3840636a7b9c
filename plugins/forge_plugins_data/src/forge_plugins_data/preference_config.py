"""The keys of preference tuning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from attrs.validators import gt, min_len, optional

from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.evaluation import EvaluationConfig
from forge_plugins_data.answers_config import AnswersConfig, is_date


@attrs.frozen(kw_only=True)
class PreferencePairsConfig(AnswersConfig):
    """Prompts with two answers each, of which one is preferred, for the loss ``dpo``.

    A line is ``{"prompt": "…", "chosen": "…", "rejected": "…"}``, or has arrays of messages in their place, which the
    tokenizer's chat template writes. Without messages in ``prompt``, those of ``chosen`` and ``rejected`` are whole
    conversations that differ in their last message. Both answers of a pair stand in one sample, each with its prompt
    and kept apart from the other. ``too_long`` is about both of them together, which take up to ``train.seq_len``
    tokens; ``cut`` takes the ends of answers off, the longer one's first.
    """

    reference: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """The file with the log-probabilities of the answers under the weights that training begins with, as the evaluation
    ``preference_reference`` writes it. Relative to the working directory; ``~`` is the home directory."""
    prompt_field: str = attrs.field(default="prompt", validator=min_len(1))
    """The key of each line that holds the prompt."""
    chosen_field: str = attrs.field(default="chosen", validator=min_len(1))
    """The key of each line that holds the answer that is preferred."""
    rejected_field: str = attrs.field(default="rejected", validator=min_len(1))
    """The key of each line that holds the other answer."""
    date: str | None = attrs.field(default=None, validator=optional(is_date))
    """The day, as in ``2026-01-31``, for a template that writes down today's."""

    def entries(self) -> Mapping[str, Entry]:
        """Those for the loss; without a reference, the number of each pair in its place."""
        by_position = ("sample", "position")
        answers = Entry(dims=by_position, wanted_by="loss")
        if self.reference is None:
            return {"answers": answers, "pair": Entry(dims=by_position, wanted_by="engine")}
        return {"answers": answers, "reference": Entry(dims=by_position, dtype="float32", wanted_by="loss")}

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Training needs the reference, and so does an evaluation of its loss."""
        yield from AnswersConfig.check(self, job)
        evaluated = job.eval.data.config if job.eval.data is not None else None
        if self.reference is None and (job.data.config is self or evaluated is self):
            sentence = (
                "is missing: name the file that forge eval RUN --evaluation preference_reference --job CONFIG is to "
                "write, with the run that training begins with"
            )
            yield "reference", sentence


@attrs.frozen(kw_only=True)
class PreferenceReferenceConfig(EvaluationConfig):
    """Log-probabilities of the answers of pairs, written to the file that preference tuning reads as ``reference``. It
    is for ``forge eval`` of the run that the tuning begins with."""

    job: str = attrs.field(validator=min_len(1))
    """The configuration file of the tuning, whose ``[data]`` are the pairs, and name the file to write."""


@attrs.frozen(kw_only=True)
class ReferenceCheckConfig:
    """Ends preference tuning at its first step if the reference is not of the weights that the run begins with. For
    models without dropout, whose noise looks the same."""

    tolerance: float = attrs.field(default=0.005, validator=gt(0.0))
    """How far the loss of the first step may be from log 2, in nats."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Other data have no reference."""
        if not isinstance(job.data.config, PreferencePairsConfig):
            yield "name", f"is for data of preference_pairs, and [data] is {job.data.name}; remove it"
