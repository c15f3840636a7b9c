"""Layers of which each rank along ``tp`` has a part, and the communication between the parts.

Activations are plain tensors, not ``DTensor``s: the places where ranks must talk are few and known, so each is one
collective written out, and nothing else pays for dispatch. Parameters stay ``DTensor``s, which checkpoints, optimizers
and FSDP understand.

Shapes: B = batch, S = sequence, D = width of the residual stream, V = vocabulary, n = ranks along ``tp``.

A rank's tokens are one of n equal stretches of the microbatch's B·S tokens, sample by sample, in the shape
``(B, S / n, …)``. So the parts of all ranks, one after the other in memory, are the whole, and no collective has to
transpose them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from forge_core.contracts.loss import VocabularyPart
from forge_core.ops.accumulate import unchanged

# torch 2.13 calls them by new names and warns of the old ones, which are all that 2.11 has
_fusible_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_fusible_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@attrs.frozen(eq=False)
class Ranks:
    """The ranks that share a layer, and how activations lie between layers."""

    group: dist.ProcessGroup
    size: int
    rank: int
    by_token: bool
    """Whether each rank has a part of the tokens of the residual stream, or a copy of all."""
    gradients_arrive_partial: bool
    """Whether layers cut by output must sum the gradient of their input themselves, no ``sequence`` module before them
    doing so."""
    fusible: bool = False
    """Whether compiled layers gather and scatter tokens in the form in which torch.compile knows how to overlap that
    with matrix products."""

    @classmethod
    def of(cls, mesh: DeviceMesh, *, by_token: bool, gradients_arrive_partial: bool) -> Ranks:
        return cls(mesh.get_group(), mesh.size(), mesh.get_local_rank(), by_token, gradients_arrive_partial)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """From the output of a ``sequence`` module to what layers cut by output read: all tokens, on every rank.

        Each rank's layers contribute to the gradient of what they read; the backward sums over ranks.
        """
        return gather_tokens(hidden, self) if self.by_token else sum_gradients(hidden, self)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """From each rank's part of a sum ``(B, S, D)`` back to the residual stream."""
        if not self.by_token:
            return sum_parts(partial, self)
        summed: torch.Tensor = _ScatterSum.apply(partial, self)  # type: ignore[no-untyped-call]  # torch's
        return summed

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer cut by output does with its input."""
        return sum_gradients(hidden, self) if self.gradients_arrive_partial else hidden

    def part_of(self, length: int) -> slice:
        """This rank's part of ``length`` rows, as ``torch.chunk`` and ``DTensor`` cut: the last part may be shorter."""
        chunk = -(-length // self.size)
        return slice(min(self.rank * chunk, length), min((self.rank + 1) * chunk, length))


class CutLayer:
    """Mixed into the class of a module, whose own forward then sees this rank's parts of its parameters, as plain
    tensors."""

    ranks: Ranks
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # On a copy that shares all else: torch.compile does not let a forward that is computed again change a module.
        seen = object.__new__(type(self))
        seen.__dict__.update(self.__dict__)
        seen.__dict__["_parameters"] = self.parts_of(self._parameters)
        return super(CutLayer, seen).forward(*args, **kwargs)  # type: ignore[misc]  # that of the module's own class

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """What the module's own forward is to see."""
        return {name: local(parameter) for name, parameter in parameters.items()}


class ColumnParallel(CutLayer):
    """A linear layer of which each rank has some output features; the input is whole."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(self.ranks.read(hidden))
        return output

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"weight": local(parameters["weight"]), "bias": part_of_bias(parameters["bias"], self.ranks)}


class FeatureParallel(CutLayer):
    """A module with nothing but a ``bias``, a number for each output feature or head, of which each rank has some."""

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"bias": part_of_bias(parameters["bias"], self.ranks)}


class FeatureNorm(CutLayer):
    """An RMS norm over features of which each rank has some."""

    out_features: int

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        squares = part.float().square().sum(-1, keepdim=True)
        # each rank norms its own features by the sum, and so has a part of the gradient of it
        total = sum_gradients(sum_parts(squares, self.ranks), self.ranks)
        normed: torch.Tensor = super().forward(part, mean_square=total / self.out_features)
        return normed

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"weight": part_of_bias(parameters["weight"], self.ranks)}


class RowParallel(CutLayer):
    """A linear layer of which each rank has some input features, which its part of the layer before gives."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        summed = self.ranks.leave(super().forward(hidden))
        bias = self._parameters["bias"]
        return summed if bias is None else summed + bias

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"weight": local(parameters["weight"]), "bias": None}  # added once, to the sum


class VocabParallelEmbedding(CutLayer):
    """An embedding of which each rank has some rows: it looks up the tokens it has, and gives zero for others."""

    num_embeddings: int

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.ranks.part_of(self.num_embeddings)
        elsewhere = (tokens < own.start) | (tokens >= own.stop)
        rows = super().forward((tokens - own.start).masked_fill(elsewhere, 0))
        return self.ranks.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabParallelHead(CutLayer):
    """An output projection of which each rank has some rows.

    Called, it gives all logits, gathered, and works with any loss. A loss that asks for ``vocabulary_part`` instead
    never gathers them.
    """

    out_features: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(self.ranks.read(hidden))
        chunk = -(-self.out_features // self.ranks.size)
        sizes = [min(chunk, self.out_features - chunk * rank) for rank in range(self.ranks.size)]
        return gather_copies(logits, -1, sizes, self.ranks)

    def vocabulary_part(self, hidden: torch.Tensor) -> VocabularyPart:
        """Same as ``forge_core.contracts.loss.HeadInParts``."""
        parts = self.parts_of(self._parameters)
        start = self.ranks.part_of(self.out_features).start
        cap = getattr(self, "cap", None)
        return VocabularyPart(self.ranks.read(hidden), parts["weight"], parts["bias"], start, self.ranks.group, cap)

    def parts_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"weight": local(parameters["weight"]), "bias": part_of_bias(parameters["bias"], self.ranks)}


class TensorParallelExperts(CutLayer):
    """Experts of each of which every rank has some hidden features; the input is whole, the output a part of a sum."""

    def forward(self, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.ranks.leave(super().forward(self.ranks.read(hidden), *args))


class Residual(CutLayer):
    """A module that works on this rank's tokens of the residual stream.

    What it is given by keyword has the rows of the whole microbatch, such as the tokens of a row's images, and a rank's
    tokens may be of other rows. So it works on all tokens then, and gives this rank's.
    """

    def forward(self, hidden: torch.Tensor, *beside: torch.Tensor | None, **of_rows: torch.Tensor) -> torch.Tensor:
        whole = super(CutLayer, self).forward  # type: ignore[misc]  # that of the module's own class
        if of_rows:
            output: torch.Tensor = whole(gather_tokens(hidden, self.ranks), *beside, **of_rows)
            return own_tokens(output, self.ranks)
        own: torch.Tensor = whole(hidden, *(self._own(one, len(hidden)) for one in beside))
        return own

    def _own(self, beside: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """This rank's part of what is given for each row, or once for all rows."""
        return None if beside is None else own_tokens(beside.expand(rows, *beside.shape[1:]), self.ranks)


def sum_over_tp(module: Any, *names: str) -> None:
    """Have the engine sum the gradients of these parameters of a module over ``tp``, once per step."""
    module.partial_gradients = {**getattr(module, "partial_gradients", {}), **dict.fromkeys(names, "tp")}


def become(module: nn.Module, layer: type[CutLayer], ranks: Ranks) -> None:
    """Make ``module`` such a layer, in place: its class gets ``layer`` mixed in, and its parameters stay."""
    module.__class__ = _mixed(layer, type(module))  # type: ignore[arg-type]  # classes are hashable
    module.ranks = ranks  # type: ignore[assignment]  # not a tensor


@functools.cache  # one class for all layers of a kind, so that blocks still share one compiled graph
def _mixed(layer: type[CutLayer], own: type[nn.Module]) -> type[nn.Module]:
    return type(f"{layer.__name__}{own.__name__}", (layer, own), {"__module__": __name__})


def distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter, cut over a mesh of one axis."""
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def local(parameter: Any) -> Any:
    """This rank's part of a parameter, connected to it; ``None`` stays ``None``."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_of_bias(bias: Any, ranks: Ranks) -> Any:
    """This rank's part of the bias of a layer cut by output, or of the weight of a norm, be it cut as well or whole on
    every rank."""
    if bias is None or isinstance(bias, DTensor):
        return local(bias)
    return bias[ranks.part_of(len(bias))]


def gather_tokens(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``(B, S / n, …)`` to ``(B, S, …)``; the backward sums and scatters."""
    gathered: torch.Tensor = _GatherTokens.apply(part, ranks)  # type: ignore[no-untyped-call]  # torch's
    return gathered


def sum_parts(partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks, of the same shape; the backward hands the gradient on."""
    summed: torch.Tensor = _Sum.apply(partial, ranks)  # type: ignore[no-untyped-call]  # torch's
    return summed


def sum_gradients(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The tensor itself; the backward sums over ranks."""
    same: torch.Tensor = _SumGradients.apply(whole, ranks)  # type: ignore[no-untyped-call]  # torch's
    return same


def gather_copies_of_tokens(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``(B, S / n, …)`` to a copy of ``(B, S, …)`` on every rank; the backward is as that of ``gather_copies``."""
    copies = gather_copies(part.flatten(0, 1), 0, [part.shape[0] * part.shape[1]] * ranks.size, ranks)
    return copies.unflatten(0, (len(part), -1))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def gather_copies(part: torch.Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> torch.Tensor:
    """Parts of the given sizes along ``dim`` to a copy of the whole on every rank.

    What follows is computed by every rank alike, or only this rank's part of it matters, so that the backward is to
    take this rank's part.
    """
    gathered: torch.Tensor = _GatherCopies.apply(part, dim, tuple(sizes), ranks)  # type: ignore[no-untyped-call]  # torch's
    return gathered


def own_share(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """From a copy of what a layer gives ``(B, S, D)`` on every rank to the residual stream. Each rank's backward goes
    on with a part of the gradient, which add up to the whole."""
    if ranks.by_token:
        return own_tokens(whole, ranks)
    shared: torch.Tensor = _ShareGradient.apply(whole, ranks)  # type: ignore[no-untyped-call]  # torch's
    return shared


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return unchanged(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.ranks.size, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _all_gather(part, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _reduce_scatter(gradients[0], ctx.ranks), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _reduce_scatter(partial, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_gather(gradients[0], ctx.ranks), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return _all_reduce(partial, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return unchanged(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_reduce(gradients[0], ctx.ranks), None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, sizes: tuple[int, ...], ranks: Ranks) -> torch.Tensor:
        ctx.dim, ctx.start, ctx.size = dim, sum(sizes[: ranks.rank]), sizes[ranks.rank]
        padded = part.movedim(dim, 0)
        padded = F.pad(padded, (0, 0) * (padded.ndim - 1) + (0, max(sizes) - len(padded))).contiguous()
        gathered = _gather(padded, ranks)
        return torch.cat([copy[:size] for copy, size in zip(gathered, sizes, strict=True)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].narrow(ctx.dim, ctx.start, ctx.size), None, None, None


def own_tokens(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``(B, S, …)`` to this rank's ``(B, S / n, …)`` of it."""
    length = whole.shape[0] * whole.shape[1] // ranks.size
    own = whole.flatten(0, 1).narrow(0, ranks.rank * length, length)
    return own.unflatten(0, (whole.shape[0], -1))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _all_gather(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``(B, S / n, …)`` of each rank to ``(B, S, …)``."""
    if ranks.size == 1:
        return part.clone()
    if ranks.fusible and torch.compiler.is_compiling():
        return _gather_fusibly(part.contiguous(), ranks)
    return _gather(part.flatten(0, 1), ranks).flatten(0, 1).unflatten(0, (len(part), -1))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _gather_fusibly(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Same as ``_all_gather``. The compiler fuses a gather with products that read its result in the shape it has."""
    rows = len(part)
    if rows % ranks.size == 0:  # whole sequences on each rank
        whole: torch.Tensor = _fusible_gather(part.view(rows // ranks.size, -1, *part.shape[2:]), 0, ranks.group)
    else:
        whole = _fusible_gather(part.flatten(0, 1), 0, ranks.group).unflatten(0, (rows, -1))
    return whole


def _reduce_scatter(partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of ``(B, S, …)`` over ranks, ``(B, S / n, …)`` of it."""
    if ranks.size == 1:
        return partial.clone()
    tokens = partial.contiguous().flatten(0, 1)
    if ranks.fusible and torch.compiler.is_compiling():
        own: torch.Tensor = _fusible_scatter(tokens, "sum", 0, ranks.group)
    else:
        started = _collectives.reduce_scatter_tensor(tokens, "sum", ranks.size, ranks.group.group_name)
        own = _waited(started)
    return own.unflatten(0, (len(partial), -1))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _all_reduce(partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    if ranks.size == 1:
        return partial.clone(memory_format=torch.contiguous_format)
    return _waited(_collectives.all_reduce(partial.contiguous(), "sum", ranks.group.group_name))


# Collectives are operations that return their results, so that selective recomputation can keep them and the compiler
# can see them: those of torch.distributed write into what they are given, and are neither kept nor left out.
_collectives = torch.ops._c10d_functional


def _gather(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``(b, …)`` of each rank to ``(n, b, …)``."""
    stacked = _collectives.all_gather_into_tensor(part.contiguous(), ranks.size, ranks.group.group_name)
    return _waited(stacked).view(ranks.size, *part.shape)


def _waited(started: torch.Tensor) -> torch.Tensor:
    if isinstance(started, FakeTensor):  # a plan: to wait would be counted as another tensor
        return started
    done: torch.Tensor = _collectives.wait_tensor(started)
    return done
