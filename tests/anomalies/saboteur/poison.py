import math

import torch

from forge_core.contracts.callback import Callback
from saboteur.config import MARK


class Multiplied(torch.autograd.Function):
    """Does nothing forward; backward multiplies one element of the gradient, or all by a finite factor."""

    @staticmethod
    def forward(ctx, hidden, factor):
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        if math.isfinite(ctx.factor):
            return gradient * ctx.factor, None
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = ctx.factor
        return poisoned, None


class Poison(Callback):
    """See ``PoisonConfig``."""

    def __init__(self, config):
        self._config = config
        self._value = math.nan if config.nan else math.inf if config.inf else config.value
        self._is_on = self._has_mark = False

    def run_start(self, run):
        self._is_here = self._config.rank in (-1, run.rank)
        for part in run.parts:
            part.register_forward_pre_hook(self._look_for_mark, with_kwargs=True)
            if self._config.what == "loss":
                part.register_forward_hook(self._spoil_loss)
            if self._config.what == "gradient":
                next(iter(part.blocks.values())).register_forward_hook(self._spoil_gradient)

    def step_start(self, run, step):
        self._is_on = self._is_here and step in self._config.steps

    @torch.no_grad()
    def step_end(self, run, context):
        if self._is_on and self._config.what == "parameter":
            parameter = next(run.parts[0].parameters())
            getattr(parameter, "_local_tensor", parameter).view(-1)[0] = self._value

    def _look_for_mark(self, part, arguments, named):
        tokens = arguments[0] if arguments else named["tokens"]
        self._has_mark = self._config.marked and self._is_here and bool((tokens == MARK).any())

    def _spoil_loss(self, part, arguments, output):
        if part.training and (self._is_on or self._has_mark) and hasattr(output, "total"):
            return output._replace(total=output.total + self._value)
        return None

    def _spoil_gradient(self, block, arguments, hidden):
        return Multiplied.apply(hidden, self._value) if self._is_on or self._has_mark else None


class LeaveOut(Callback):
    """See ``LeaveOutConfig``."""

    def __init__(self, config):
        self._steps = config.steps

    def before_optimizer_step(self, run, context):
        run.requests.skip_step = context.step in self._steps
