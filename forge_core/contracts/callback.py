"""Callbacks: what else happens during a run, such as progress display, health checks, freeze schedules, captures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.config.sections import Job
    from forge_core.contracts.evaluation import EvaluationContext
    from forge_core.contracts.tokenizer import Tokenizer


T = TypeVar("T")

TIME_LIMIT = "the time limit"
PREEMPTIONS = ("SIGUSR1", "SIGTERM", "SIGHUP", TIME_LIMIT)
"""Reasons to stop with which a run loses its machine or its terminal, and should go on elsewhere or later.
With any other, somebody wanted it to end."""


@attrs.define
class Requests:
    """The three things a callback can ask for. What any rank asks, all ranks do."""

    skip_step: bool = False
    """In ``before_optimizer_step`` only: leave out this update."""
    save_now: bool = False
    """Write a checkpoint after this or the next step."""
    stop: str = ""
    """Not empty: save, and end the run with exit code 3 after this or the next step. The text is the reason: the name
    of a signal, ``TIME_LIMIT``, or a callback's own words."""


class RanksByAxis(Protocol):
    """The ranks of a run, along the axes ``pp``, ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp``."""

    @property
    def degrees(self) -> Mapping[str, int]:
        """How many ranks there are along each axis."""

    def sum_over(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """Sum ``value`` in place over the axes, and return it. All ranks along them call it; size 1 costs nothing."""

    def gather_over(self, axis: str, value: T) -> list[T]:
        """The values of all ranks along ``axis``, in order, each of which calls it; the host waits."""


class OneRank:
    """``RanksByAxis`` of a process alone."""

    degrees: Mapping[str, int] = defaultdict(lambda: 1)

    def sum_over(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        return value

    def gather_over(self, axis: str, value: T) -> list[T]:
        return [value]


@attrs.frozen
class RunContext:
    """Facts that a callback may use for the whole run."""

    job: Job
    run_dir: Path
    rank: int
    world_size: int
    device: torch.device
    parts: Sequence[nn.Module]
    """This rank's parts of the model: one, unless a pipeline interleaves. They have the parameters of its own pipeline
    stages only (``sum_over_stages``), by their names in the whole model. A sharded parameter is a ``DTensor``: its
    ``full_tensor()`` is the whole one, and all ranks that have a part must ask for it. A callback that calls backward
    by itself sums what ranks have parts of: ``forge_core.ops.partial_gradients``."""
    optimizer: torch.optim.Optimizer
    total_steps: int
    requests: Requests
    log: Callable[[str], None]
    """Prints a line and writes it to ``log.txt``, on rank 0 only."""
    parameters: Mapping[str, nn.Parameter] = attrs.field(factory=dict)
    """Those of ``parts`` by their names in the whole model; a tied one once."""
    mesh: RanksByAxis = attrs.field(factory=OneRank)
    """For what is summed or gathered over ranks."""
    tokenizer: Tokenizer | None = None
    """The training data's; ``None`` if they have none."""
    report: Callable[[Mapping[str, torch.Tensor]], None] = lambda values: None
    """Takes device scalars by name, to be logged with the step's own values in ``metrics.jsonl`` and by trackers: one
    step late, so that the host does not wait. Called in ``before_optimizer_step`` and ``step_end``; nothing happens in
    a step that is not logged. All ranks must report alike but for pipeline stages, over which values are summed, and
    which have to report at the first logged step what they ever will. One that is computed from parameters, each a
    ``DTensor`` if it is cut over ranks, is made whole."""
    track_series: Callable[[int, Mapping[str, Sequence[float]]], None] = lambda step, series: None
    """Sends values that belong together to the trackers, as ``Tracker.log_series`` has them; on rank 0 only."""
    track_figure: Callable[[int, str, Path], None] = lambda step, name, path: None
    """Sends a picture to the trackers, as ``Tracker.log_figure`` has it; on rank 0 only. The file must stay."""
    sum_over_stages: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    """Adds up, in place, what each pipeline stage has of a sum over the whole model, such as the square of a norm. All
    ranks must call it; without a pipeline nothing happens."""
    write_event: Callable[..., None] = lambda event, **facts: None
    """Writes a line of ``events.jsonl``: its name, and keys with values, of which ``step`` should be one; on rank 0
    only."""
    patient: Callable[[float], AbstractContextManager[None]] = lambda seconds: nullcontext()
    """A context in which this rank may take so many seconds longer than ``run.step_timeout``, such as for files."""


@attrs.frozen
class StepContext:
    """One step, as it is known at that moment."""

    step: int
    """Counts from 1."""
    tokens: int
    """Tokens trained on by all ranks, this step included."""
    metrics: Mapping[str, torch.Tensor]
    """Device scalars; reading one on the host makes it wait for the device. ``grad_norm`` is global and measured before
    clipping; ``loss`` is this rank's part of the step's mean, and in ``step_end`` of a logged step all ranks'."""
    logged: bool
    """The host values of this step will be logged. Look at tensors only then."""
    left_out: torch.Tensor | None = None
    """In ``step_end``: fp32 scalar on the device, 1 where the update of this step was left out, so that the parameters
    are as before it, and otherwise 0; the same on all ranks."""


class Callback:
    """Base class. Override what you need; an event without an override costs nothing.

    A method may take any subset of its event's parameters. Callbacks are called in the order in which the job names
    them. One that raises ends the run, and the error names it.

    One that keeps averages of the parameters to be evaluated in their place has ``evaluation_weights``
    (``forge_core.contracts.optimizer.HasEvaluationWeights``). While the model is evaluated, ``eval_start`` and
    ``eval_batch`` included, the parameters hold what is evaluated.
    """

    state_version: int = 1
    """Saved with the state; ``load_state`` is given the saved one."""

    def run_start(self, run: RunContext) -> None:
        """Before the first step, after a checkpoint has been loaded."""

    def step_start(self, run: RunContext, step: int) -> None:
        """Before the microbatches of ``step`` are run."""

    def before_optimizer_step(self, run: RunContext, context: StepContext) -> None:
        """Gradients are summed, normalised and not yet clipped; ``run.requests.skip_step`` may be set."""

    def step_end(self, run: RunContext, context: StepContext) -> None:
        """After the update; gradients are gone."""

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Host values of an earlier step have arrived, on rank 0 only (as in ``metrics.jsonl``)."""

    def eval_start(self, run: RunContext, step: int, model: EvaluationContext) -> None:
        """Before the first batch of an evaluation; the parts are in evaluation mode, and ``model`` predicts as for an
        evaluation, in every layout: all ranks call its methods together."""

    def eval_batch(self, run: RunContext, step: int, batch: Mapping[str, torch.Tensor]) -> None:
        """After each batch of an evaluation; ``batch`` is this rank's, on the device."""

    def eval_end(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation; values are global and equal on all ranks."""

    def checkpoint_saved(self, run: RunContext, step: int, path: Path) -> None:
        """After a checkpoint has been committed."""

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        """The run reached its end, or was stopped and saved. ``stopped`` is why, on all ranks the same; empty at the
        end."""

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        """The run ends with an error; collectives must not be used here."""

    def state(self) -> Mapping[str, Any]:
        """State that survives a resume, as JSON values. Saved under ``plugin.<distribution>.callback.<name>``."""
        return {}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        """Given what ``state`` returned, before ``run_start``, and again whenever the run goes back to a checkpoint."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors that survive a resume, by name, saved as ``plugin.<distribution>.callback.<name>.<tensor's name>``.

        They are there at the end of ``run_start``, when the engine fills them in place from the checkpoint that the run
        goes on from, and keep their names, shapes and dtypes. Change them in ``step_end`` alone: in ``step_start`` a
        checkpoint may still be copied.

        Returns:
            Tensors that are equal on all ranks which have the name; or a ``DTensor`` each, sharded like a parameter
            (``torch.zeros_like(parameter)``), which a resume lays out anew on another mesh.
        """
        return {}


class CallbackFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> Callback:
        """Build the callback."""
