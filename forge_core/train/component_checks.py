"""Checks of what a loss and a schedule return, while the run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from forge_core.contracts.batch import Entry
from forge_core.contracts.loss import IGNORED, Loss, LossSum, apply_loss
from forge_core.contracts.scheduler import Schedule
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import ConfigError, PluginError, noting


class CheckedLoss:
    """Check in each call what costs nothing. After ``look``, the first call with targets is looked into, for which the
    host waits: its count, and whether it is a sum. Only some ranks of a pipeline compute a loss, and all of them have
    to end, so that ``refuse_if_wrong`` tells what is wrong there. A loss that is compiled with its model is not looked
    into.

    Args:
        words: names the component in messages.
    """

    def __init__(self, loss: Loss, words: str, entries: Mapping[str, Entry | None] | None = None) -> None:
        self._loss: Any = loss  # which takes more than targets, if it says so
        self._not_for_model = {name for name, one in (entries or {}).items() if one and one.wanted_by != "model"}
        self._taken: Sequence[str] = getattr(loss, "takes_entries", ())
        self.by_position = {name for name, one in (entries or {}).items() if one and "position" in one.dims}
        """Entries of which a part of the positions has a part."""
        self.words = words
        self._steps_left = 0
        self.is_watched = False
        self.problem = ""
        self.sums_of_sources: torch.Tensor | None = None
        """``(N, 2)`` fp32 or nothing: for each number of a source, the sum of losses and of targets of the microbatches
        since this was set to zeros."""
        self.parts_of_rows: torch.Tensor | None = None
        """``(B,)`` int64 or nothing: numbers that take the place of the sources' for the next microbatch."""

    def bind(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Loss]:
        """Same as ``BatchLoss.bind``."""
        inputs = {name: tensor for name, tensor in batch.items() if name not in self._not_for_model}
        taken = {name: batch[name] for name in self._taken if name in batch}
        parts = batch.get("source") if self.parts_of_rows is None else self.parts_of_rows
        sums = None if parts is None else self.sums_of_sources
        if sums is None and "weights" not in batch and not taken:
            return inputs, self
        return inputs, _LossOfBatch(self, batch.get("weights"), parts, sums, taken)

    def has_perplexity(self, entries: Iterable[str]) -> bool:
        """Return whether its loss of a batch with these entries is a negative log-likelihood."""
        return getattr(self._loss, "has_perplexity", True) or not set(self._taken).issubset(entries)

    def look(self, steps: int) -> None:
        """Look into a call of the next ``steps`` steps."""
        self._steps_left, self.is_watched = steps, True

    def refuse_if_wrong(self) -> None:
        """After the last microbatch of a step, on all ranks.

        Raises:
            PluginError: what the loss has returned is not what its contract says.
        """

        def refuse() -> None:
            if self.problem:
                raise PluginError(self.problem)

        if self._steps_left:
            self._steps_left -= 1
            run_on_all_ranks(refuse)
            self.is_watched &= self._steps_left > 0

    def __call__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        **taken: torch.Tensor,
    ) -> LossSum:
        loss = partial(self._loss, **taken)
        if torch.compiler.is_compiling():  # in a graph the host can read nothing
            return self._sum(loss, hidden, head, targets, weights)
        with noting(f"raised by {self.words}"):
            # Sums over other entries may be sums over ranks, which all must make.
            if self.is_watched and not self._taken:
                # before what is kept for backward takes its memory
                self._look_into(loss, hidden, head, targets)
            return self._sum(loss, hidden, head, targets, weights)

    def refuse_model(self, model: nn.Module, name: str, entries: Collection[str]) -> None:
        """For the model, and the names of entries in batches.

        Raises:
            ConfigError: the loss takes no weights of targets, which batches have; or the model predicts tokens ahead,
                for whose targets there are neither weights nor what the loss takes.
        """
        has_weights = "weights" in entries
        looks_ahead = getattr(model, "n_predictors", 0) > 0
        if looks_ahead and self._taken:
            raise ConfigError(
                f"{self.words} takes {self._taken[0]!r} of batches, which {name} cannot give to its targets of tokens "
                "ahead; choose another loss, or a model that predicts the next token alone"
            )
        if has_weights and not getattr(self._loss, "takes_weights", False):
            raise ConfigError(
                f"data: batches have weights of targets, which {self.words} does not take (takes_weights); choose "
                "another loss, or data without weights"
            )
        if has_weights and looks_ahead:
            raise ConfigError(
                f"data: batches have weights of targets, which {name} cannot give to its targets of tokens ahead; "
                "choose data without weights, or a model that predicts the next token alone"
            )

    def refuse_entries(self, entries: Mapping[str, Entry | None]) -> None:
        """For the entries of the training data.

        Raises:
            ConfigError: they lack one that the loss takes, or have one for a loss that takes it.
        """
        choose = "choose the loss that these data are for, or other data"
        if lacking := [name for name in self._taken if name not in entries]:
            has = ", ".join(entries)
            raise ConfigError(f"data: {self.words} takes {lacking[0]!r} of batches, which have {has}; {choose}")
        given = [name for name, entry in entries.items() if entry and entry.wanted_by == "loss"]
        if left := [name for name in given if name not in self._taken]:
            raise ConfigError(f"data: batches have {left[0]!r} for the loss, and {self.words} takes no such; {choose}")

    def _sum(
        self, loss: Loss, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> LossSum:
        found = apply_loss(loss, hidden, head, targets, weights)
        if not isinstance(found, LossSum):
            raise PluginError(self._bug(f"returns a {type(found).__name__}, which must be a LossSum"))
        for name, tensor in (("total", found.total), ("count", found.count)):
            if not isinstance(tensor, torch.Tensor):
                raise PluginError(self._bug(f"returns a {type(tensor).__name__} as the {name}, which must be a tensor"))
            if tensor.ndim:
                shape = tuple(tensor.shape)
                raise PluginError(self._bug(f"returns a {name} of the shape {shape}, which must be a scalar"))
        if torch.is_grad_enabled() and hidden.requires_grad and not found.total.requires_grad:
            raise PluginError(self._bug("returns a total through which no gradient reaches the model"))
        if found.each is not None and getattr(found.each, "shape", None) != targets.shape:
            raise PluginError(self._bug("returns an each that is no tensor of the targets' shape"))
        return found

    @torch.no_grad()
    def _look_into(self, loss: Loss, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> None:
        """A sum over all targets is that over every other one, and that over the others; a mean is half of it."""
        valid = targets != IGNORED
        place = valid.flatten().cumsum(0).view_as(valid)
        n_valid = int(valid.sum())
        if n_valid < 2:
            return
        self.is_watched = False
        n_even = n_valid // 2  # as many of them as of the others, but for one
        devices = [hidden.device] if hidden.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # a step draws what it would have drawn without this
            whole, even, odd = (
                self._sum(loss, hidden, head, torch.where(part, targets, IGNORED), None)
                for part in (valid, valid & (place % 2 == 0), valid & (place % 2 == 1))
            )
        for found, expected in ((whole, n_valid), (even, n_even)):
            if (count := int(found.count)) != expected:
                self.problem = self._bug(
                    f"counts {count} targets where {expected} are not {IGNORED}; it must return the sum over these and "
                    "their number"
                )
                return
        total, of_parts = float(whole.total), float(even.total + odd.total)
        if abs(of_parts - total) > 0.4 * abs(total):  # a mean is 1 apart, and losses that are no plain sum less
            self.problem = self._bug(
                f"returns {total:.4g} for {n_valid} targets and {of_parts:.4g} for the two halves of them together; it "
                "must return the sum over targets, not their mean"
            )

    def refuse_count(self, counted: float, n_valid: float) -> None:
        """After an evaluation: what was counted, and what there is to count, over all ranks.

        Raises:
            PluginError: they differ.
        """
        if counted != n_valid:
            what = f"counts {counted:.0f} targets of the validation data, where {n_valid:.0f} are not {IGNORED}"
            raise PluginError("" if dist.get_rank() else self._bug(what))

    def _bug(self, what: str) -> str:
        return f"{self.words} {what}. This is a bug in the loss."


@attrs.define(eq=False, slots=False)
class _LossOfBatch:
    """The loss of one microbatch, a ``LossOfPositions``. The weights of its targets count in training, and not in
    evaluations, whose losses are compared with those of runs without weights. The first sum is also added up by source;
    a model's further ones (of tokens ahead) are not."""

    _loss: CheckedLoss
    _weights: torch.Tensor | None
    _source: torch.Tensor | None
    _sums: torch.Tensor | None
    _taken: Mapping[str, torch.Tensor]
    _is_first: bool = attrs.field(default=True, init=False)

    def of_part(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> _LossOfBatch:
        """Same as ``LossOfPositions.of_part``."""
        weights = None if self._weights is None else cut(self._weights)
        by_position = self._loss.by_position
        taken = {name: cut(entry) if name in by_position else entry for name, entry in self._taken.items()}
        return attrs.evolve(self, weights=weights, taken=taken)

    def __call__(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> LossSum:
        weights = self._weights if torch.is_grad_enabled() else None
        if weights is not None and weights.shape != targets.shape:
            raise PluginError(
                f"a pass has cut targets to {tuple(targets.shape)} and not the weights of the loss, "
                f"{tuple(weights.shape)}; it must give the model loss.of_part(cut)"
            )
        found = self._loss(hidden, head, targets, weights, **self._taken)
        if self._is_first and self._sums is not None and self._source is not None and found.each is not None:
            of_samples = torch.stack((found.each.sum(1), (targets != IGNORED).sum(1)), dim=1)
            self._sums.index_add_(0, self._source, of_samples.to(self._sums.dtype))
        self._is_first = False
        return found


_LOOKED_AT_BEFORE = 1000
"""Steps, spread over the run, whose multipliers are computed before the first one: for a run of any length, in
milliseconds."""


def checked_schedule(schedule: Schedule, words: str, total_steps: int) -> Schedule:
    """The same schedule, whose every multiplier is looked at.

    Args:
        words: names the component in messages.

    Raises:
        PluginError: a multiplier of the run is not finite or negative; here if it is found before the run.
    """

    def checked(step: int, /) -> float:
        with noting(f"raised by {words} at step {step}"):
            multiplier: Any = schedule(step)
        if isinstance(multiplier, bool) or not isinstance(multiplier, Real):
            found = f"a {type(multiplier).__name__}"
        elif not (math.isfinite(multiplier) and float(multiplier) >= 0):
            found = str(multiplier)
        else:
            return float(multiplier)
        raise PluginError(
            f"{words} gives {found} as the learning rate's multiplier of step {step}; it must be a finite number, and "
            "not negative. This is a bug in the schedule."
        )

    for step in range(1, total_steps + 1, -(-total_steps // _LOOKED_AT_BEFORE)):
        checked(step)
    return checked
