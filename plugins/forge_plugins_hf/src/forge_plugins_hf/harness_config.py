"""The keys of the evaluation ``lm_eval``."""

from __future__ import annotations

import attrs

from forge_core.contracts.evaluation import EvaluationConfig


def are_tasks(_: object, __: object, value: tuple[str, ...]) -> None:
    """Validate names of tasks.

    Raises:
        ValueError: there is none, or one is there twice.
    """
    if not value or not all(value):
        raise ValueError('must name a task, as in ["hellaswag", "arc_easy"]')
    if twice := [name for name in value if value.count(name) > 1]:
        raise ValueError(f"names {twice[0]!r} twice")


@attrs.frozen(kw_only=True)
class HarnessConfig(EvaluationConfig):
    """Tasks of EleutherAI's lm-evaluation-harness, run by the model in the layout of the run. Keys have the names of
    the harness's own options."""

    tasks: tuple[str, ...] = attrs.field(validator=are_tasks)
    """Names of tasks, groups or tags."""
    include_path: str | None = None
    """A folder with task files of one's own (YAML). Relative to the working directory."""
    limit: float = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many questions of each task, from the first; below 1 a fraction of them; 0 takes all."""
    num_fewshot: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    """Answered questions before each question; by default what the task says. A task that says 0 keeps it."""
    max_length: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """The longest sequence, in tokens; what is longer loses its beginning. 0 is the model's ``max_seq_len``."""
    apply_chat_template: bool = False
    """Write each question as a message, by the template that the tokenizer brings along."""
    bootstrap_iters: int = attrs.field(default=1000, validator=attrs.validators.ge(0))
    """Samples for the standard error of metrics that have no formula for it; 0 computes no standard errors."""
