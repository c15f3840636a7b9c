"""Optimizers that step all parameters of a group at once, by torch's foreach operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from forge_core.contracts.gpu import planned_gpu
from forge_core.contracts.optimizer import NamedParameter
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.compiled_step import CompiledStep, Number
from forge_plugins_optim.config import Rounding
from forge_plugins_optim.split_weights import joined, split
from forge_plugins_optim.stochastic_rounding import noise, positions_in, round_into, rounded, seed_of

Tensors = list[torch.Tensor]
TAIL = "tail"
"""The slot of what rounding to bf16 has cut off from a parameter."""
_IN_CACHE = 2**16
"""Elements. Four such tensors in fp32 take 1 MiB."""
_BUCKET = 2**26
"""Elements whose fp32 values exist at one time beside what is kept: a step makes some of each element."""


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimizer says by ``update`` how the parameters of a group change, given what this rank holds of them.

    Where ``left_out`` is 1, gradients are zero, ``decay`` keeps a state as it is, and ``shrink`` and ``move`` leave
    parameters as they are: an update that is made of these changes nothing.

    Where ``splits`` is set, a parameter in bf16 is the upper half of a weight that is exact in fp32, and the lower half
    is state (``split_weights``): ``pieces`` gives such weights, and other states, in fp32. Both halves begin as a
    parameter that has none, and go on as one in fp32 would.

    Where there are ``seeds``, ``pieces`` gives fp32 copies of a parameter in bf16 and of its states, and rounds them up
    or down by chance afterwards (``stochastic_rounding``). Chance follows from the parameter's name, the count of its
    steps and the place of the element in the whole parameter: a resumed run goes on bit for bit, and copies on other
    ranks stay copies. The state ``step`` is that count.
    """

    leaves_out = True
    left_out: torch.Tensor | None = None
    scales_gradients = False
    gradient_scale: torch.Tensor | None = None
    splits = False
    seeds: Mapping[torch.Tensor, int] = MappingProxyType({})
    compiled: CompiledStep | None = None
    """Takes the place of foreach operations in ``update``, and scales gradients."""

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        """Change parameters and state in place.

        Args:
            group: the hyper-parameters.
            held: the group's parameters that have a gradient.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not self.splits:
                for parameter in held:  # of a run that had tails before it was resumed
                    self.state.get(parameter, {}).pop(TAIL, None)
            if held:
                self.update(group, held)
        return loss

    def round_as(self, rounding: Rounding, parameters: Sequence[NamedParameter]) -> None:
        """Keep parameters in bf16 as the key ``rounding`` says."""
        self.splits = rounding == "split"
        if rounding == "stochastic":
            self.seeds = {one.parameter: seed_of(one.name) for one in parameters}

    def is_split(self, parameter: torch.Tensor) -> bool:
        """Return whether a tail belongs to it."""
        return self.splits and parameter.dtype == torch.bfloat16

    def is_rounded_by_chance(self, parameter: torch.Tensor) -> bool:
        """Return whether it and its states in bf16 are rounded up or down."""
        return parameter in self.seeds and parameter.dtype == torch.bfloat16 and not self.splits

    def has_copy(self, parameter: torch.Tensor) -> bool:
        """Return whether it is updated in fp32 beside what is kept."""
        return self.is_split(parameter) or self.is_rounded_by_chance(parameter)

    def count(self, held: Tensors) -> None:
        """Count a step, for an optimizer that needs the number for chance alone."""
        for parameter in held:
            if self.is_rounded_by_chance(parameter):
                steps = self.state[parameter].setdefault("step", torch.zeros((), device=parameter.device))
                steps.add_(1.0 if self.left_out is None else 1 - self.left_out)
            else:  # of a run that rounded by chance before it was resumed
                self.state.get(parameter, {}).pop("step", None)

    def slot(self, held: Tensors, name: str, dtype: torch.dtype | None = None) -> Tensors:
        """This rank's parts of a state of the parameters' shape and layout; zero before the first step.

        Args:
            dtype: that of the parameters by default, fp32 beside a tail. A resumed run may have had another; then it is
                cast.
        """
        for parameter in held:
            state, own = self.state[parameter], dtype or self._dtype_of_state(parameter)
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=own)
            elif state[name].dtype != own:
                state[name] = state[name].to(own)
        return [local_tensor(self.state[parameter][name]) for parameter in held]

    def _dtype_of_state(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.is_split(parameter) else parameter.dtype

    def exact(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part in fp32, with its tail: a copy, unless the parameter is in fp32."""
        local = local_tensor(parameter)
        tail = self.state[parameter].get(TAIL) if self.is_split(parameter) and parameter in self.state else None
        return local.float() if tail is None else joined(local, local_tensor(tail))

    def keep(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Make ``values``, which ``exact`` gave, this rank's part of the parameter."""
        local = local_tensor(parameter)
        if self.is_split(parameter):
            _keep_halves(local, self.slot([parameter], TAIL, torch.int16)[0], values)
        elif self.is_rounded_by_chance(parameter):
            self.round(parameter, [(local, values)])
        elif values is not local:
            local.copy_(values)

    def round(
        self, parameter: torch.Tensor, kept: Sequence[tuple[torch.Tensor, torch.Tensor]], *, first: int = 0
    ) -> None:
        """Write fp32 values into a parameter and its states, as ``round_into`` does."""
        round_into(kept, parameter, self.seeds[parameter], self.state[parameter]["step"], first=first)

    def parts(self, held: Tensors) -> tuple[Tensors, Tensors]:
        """This rank's parts of parameters, and of their gradients, which are zero in a step that is left out."""
        gradients = [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None]
        if self.left_out is not None:
            for gradient in gradients:
                gradient.masked_fill_(self.left_out.bool(), 0)
        return [local_tensor(parameter) for parameter in held], gradients

    def buckets(self, held: Tensors) -> Iterator[Tensors]:
        """Parameters that are updated together: on a CPU each alone, elsewhere as many as ``_BUCKET`` allows."""
        bucket, n_elements = Tensors(), 0
        limit = -1 if _fits_a_cache(local_tensor(held[0])) else _BUCKET  # not 0: a part may be empty
        for parameter in held:
            n_elements += local_tensor(parameter).numel()
            if bucket and (n_elements > limit or self.has_copy(bucket[0]) is not self.has_copy(parameter)):
                yield bucket
                bucket, n_elements = [], local_tensor(parameter).numel()
            bucket.append(parameter)
        yield bucket

    def pieces(self, held: Tensors, *slots: str) -> Iterator[list[Tensors]]:
        """Parameters, their gradients, and states, for an update that treats each element by itself and in place.

        On a CPU they come in pieces that stay in its cache from the first operation to the last. A parameter that is
        split, or rounded by chance, is in fp32 for as long as the caller has its piece.
        """
        for bucket in self.buckets(held):
            parameters, gradients = self.parts(bucket)
            kept = [parameters, gradients, *(self.slot(bucket, name) for name in slots)]
            if self.is_split(bucket[0]):
                yield from self._put_together(kept, self.slot(bucket, TAIL, torch.int16))
            elif self.is_rounded_by_chance(bucket[0]):
                yield from self._rounded_afterwards(kept, bucket)
            else:
                yield from _cut(kept)

    def _put_together(self, kept: list[Tensors], tails: Tensors) -> Iterator[list[Tensors]]:
        for parameters, gradients, *states, own_tails in _cut([*kept, tails]):
            weights = [joined(*halves) for halves in zip(parameters, own_tails, strict=True)]
            yield [weights, [gradient.float() for gradient in gradients], *states]
            for upper, lower, values in zip(parameters, own_tails, weights, strict=True):
                _keep_halves(upper, lower, values)

    def _rounded_afterwards(self, kept: list[Tensors], bucket: Tensors) -> Iterator[list[Tensors]]:
        bits = [noise(positions_in(one), self.seeds[one], self.state[one]["step"]) for one in bucket]
        for *own, own_bits in _cut([*kept, bits]):
            copies = [[one.float() for one in some] for some in own]
            yield copies
            parameters, _, *states = zip(own, copies, strict=True)
            for index, (some, new) in enumerate([parameters, *states]):
                for one, values, chance in zip(some, new, own_bits, strict=True):
                    one.copy_(rounded(values, chance >> (16 * index)))

    def compile(self, new_values: Callable[..., Sequence[torch.Tensor]], slots: Sequence[str], n_numbers: int) -> None:
        """Make ``compiled``, as ``CompiledStep`` takes it, for states in ``slots``.

        Raises:
            ConfigError: there is no compiler.
        """
        self.compiled, self.scales_gradients = CompiledStep(new_values), True
        every = (parameter for group in self.param_groups for parameter in group["params"])
        for one in {(parameter.device, parameter.dtype): parameter for parameter in every}.values():
            dtypes = [self._dtype_of_state(one)] * len(slots)
            self.compiled.try_out(one, dtypes, has_tail=self.is_split(one), n_numbers=n_numbers)

    def step_compiled(self, held: Tensors, slots: Sequence[str], numbers: Sequence[Number]) -> None:
        """Step by ``compiled``."""
        assert self.compiled is not None, "compile has made it"
        gradients = [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None]
        tails = [self.slot([one], TAIL, torch.int16)[0] if self.is_split(one) else None for one in held]
        states = [self.slot(held, name) for name in slots]
        told = self.left_out, self.gradient_scale
        self.compiled(told, [local_tensor(one) for one in held], gradients, tails, states, numbers)

    def decay(self, state: Tensors, factor: float) -> None:
        """Multiply a state by ``factor`` in place."""
        torch._foreach_mul_(state, self._unless_left_out(factor, state[0]))

    def shrink(self, parameters: Tensors, part: float) -> None:
        """Multiply by ``1 − part`` in place: decoupled weight decay."""
        if part:
            torch._foreach_mul_(parameters, self._unless_left_out(1 - part, parameters[0]))

    def move(self, parameters: Tensors, steps: Tensors | tuple[torch.Tensor, ...], lr: float) -> None:
        """Subtract ``lr · steps`` in place."""
        if self.left_out is not None:
            steps = torch._foreach_mul(steps, 1 - self.left_out)
        torch._foreach_add_(parameters, steps, alpha=-lr)

    def _unless_left_out(self, factor: float, like: torch.Tensor) -> Any:
        """The factor, as a tensor where a number would be rounded to the dtype of what it multiplies first, as a CPU
        does."""
        if self.left_out is None and (like.dtype == torch.float32 or like.device.type != "cpu"):
            return factor
        given = torch.full((), factor, device=like.device)
        return given if self.left_out is None else torch.where(self.left_out.bool(), 1.0, given)


def _fits_a_cache(tensor: torch.Tensor) -> bool:
    """Whether small pieces, one after another, are faster than all at once: a CPU's cache has them."""
    return tensor.device.type == "cpu" and planned_gpu(tensor) is None


def _cut(lists: list[Tensors]) -> Iterator[list[Tensors]]:
    """Pieces of tensors, all lists alike; on a CPU small ones of one tensor at a time."""
    if not _fits_a_cache(lists[0][0]):
        yield lists
        return
    for of_one in zip(*lists, strict=True):
        is_flat = all(tensor.is_contiguous() for tensor in of_one)
        cut = [tensor.view(-1).split(_IN_CACHE) if is_flat else (tensor,) for tensor in of_one]
        for piece in zip(*cut, strict=True):
            yield [[tensor] for tensor in piece]


def _keep_halves(upper: torch.Tensor, lower: torch.Tensor, values: torch.Tensor) -> None:
    weights, tails = split(values)
    upper.copy_(weights)
    lower.copy_(tails)
