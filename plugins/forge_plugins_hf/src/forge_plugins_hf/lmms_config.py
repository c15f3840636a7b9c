"""The keys of the evaluation ``lmms_eval``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import attrs

from forge_core.contracts.evaluation import EvaluationConfig
from forge_plugins_hf.harness_config import are_tasks

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class LmmsConfig(EvaluationConfig):
    """Tasks about images and videos of lmms-eval, answered by a model that was trained on ``image_text``, in the layout
    of the run. Images, and frames of videos, stand before the question, as that data's keys have it. Tasks of several
    rounds are not done."""

    tasks: tuple[str, ...] = attrs.field(validator=are_tasks)
    """Names of tasks or groups."""
    include_path: str | None = None
    """A folder with task files of one's own (YAML). Relative to the working directory."""
    limit: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many questions of each task, from the first; 0 takes all."""
    max_new_tokens: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """The most tokens of an answer, where a task allows more."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """What to do with questions that leave no room for their answers: ``refuse`` all before the first is asked, or
    ``cut`` the beginnings of their texts, and tell how many there are. Images are never cut."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """The data must say how images are read."""
        try:
            from forge_plugins_vlm.sampling import image_text_of
        except ImportError:  # which is told with what to install
            return
        if image_text_of(job) is None:
            yield (
                "tasks",
                f"data.name = {job.data.name!r}: it has no images (image_text), and says not how to read them",
            )
