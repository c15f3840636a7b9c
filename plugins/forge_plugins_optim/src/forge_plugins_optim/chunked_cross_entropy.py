"""Head and cross-entropy together, in chunks of tokens: the full logits never exist.

Shapes: B sequences of S tokens, T = B · S, D model width, V vocabulary, C tokens of one chunk.
"""

# Names end in their shape, in capitals:

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from forge_core.contracts.loss import IGNORED, LossSum
from forge_core.errors import ConfigError
from forge_plugins_optim.loss_config import ChunkedCrossEntropyConfig
from forge_plugins_optim.token_weights import weighted
from forge_plugins_optim.vocabulary_parallel import part_of_head, softmax_parts, subtract_targets

if TYPE_CHECKING:
    from forge_plugins_optim.fused_softmax import FusedSoftmax


def chunked_cross_entropy(config: ChunkedCrossEntropyConfig, /) -> ChunkedCrossEntropy:
    """Build the loss.

    Raises:
        ConfigError: its kernel does not run here.
    """
    return ChunkedCrossEntropy(config.chunk_size, _fused_softmax() if config.kernel == "triton" else Softmax)


def _fused_softmax() -> type[FusedSoftmax]:
    if find_spec("triton") is None:
        raise ConfigError(
            "loss.kernel: 'triton' needs the package triton, which comes with torch for GPUs; pip install triton, or "
            "leave kernel out"
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("loss.kernel: 'triton' needs a GPU, and torch sees none on this machine; leave kernel out")
    from forge_plugins_optim.fused_softmax import FusedSoftmax

    return FusedSoftmax


class ChunkedCrossEntropy:
    """The same value as ``cross_entropy``, in memory that does not grow with the number of tokens.

    The gradients of ``hidden``, ``head.weight`` and ``head.bias`` are computed in the forward, where a chunk's logits
    are at hand, and scaled in the backward: three matrix products a chunk and no recomputation (as in Liger Kernel,
    https://arxiv.org/abs/2410.10989). Softmax, loss and the sums over chunks are fp32; the matrix products run in the
    compute dtype, as those of ``cross_entropy`` do.
    """

    takes_weights = True

    def __init__(self, chunk_size: int, softmax: type[Softmax | FusedSoftmax] | None = None) -> None:
        self._chunk_size = chunk_size
        self._softmax = softmax or Softmax

    def __call__(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> LossSum:
        """The contract's.

        Raises:
            ConfigError: ``head`` does more than multiply by ``weight``, add ``bias`` and cap.
        """
        return self.with_z_loss(hidden, head, targets, 0.0, weights)[0]

    def with_z_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        coefficient: float,
        weights: torch.Tensor | None = None,
    ) -> tuple[LossSum, torch.Tensor]:
        """Same as ``ZLossInside``; the gradient of the total has that of the penalty in it.

        Raises:
            ConfigError: as a call.
        """
        part = part_of_head(hidden, head)
        cap = getattr(head, "cap", None)
        if part is None and cap is None and getattr(type(head), "forward", None) is not nn.Linear.forward:
            raise ConfigError(
                f"loss 'chunked_cross_entropy' multiplies by the head's weight itself, and would skip what "
                f"{type(head).__qualname__}.forward does; use loss 'cross_entropy' with this model."
            )
        inputs = (hidden, head.weight, head.bias) if part is None else (part.hidden, part.weight, part.bias)
        wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)
        columns = None if part is None else (part.start, part.group)
        flat = (inputs[0].flatten(0, 1), *inputs[1:], targets.flatten(), None if weights is None else weights.flatten())
        softmax = Softmax if isinstance(inputs[0], FakeTensor) else self._softmax  # of `forge plan`, without a kernel
        options = (self._chunk_size, wanted, columns, coefficient, cap, softmax)
        total, each, penalty = _ChunkedCrossEntropy.apply(*flat, *options)  # type: ignore[no-untyped-call]  # torch's
        return LossSum(total, (targets != IGNORED).sum(), each.view(targets.shape)), penalty


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor | None,
        chunk_size: int,
        wanted: tuple[bool, bool, bool],
        columns: tuple[int, dist.ProcessGroup] | None,
        coefficient: float,
        cap: float | None,
        make_softmax: type[Softmax | FusedSoftmax],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            columns: where this rank's part of a vocabulary that is shared out begins, and over which ranks.
            coefficient: of the squared log-partition, whose gradient is added to that of the total.
            cap: of the logits.
            make_softmax: of a chunk.
        """
        for_hidden, for_weight, for_bias = wanted
        accumulate = torch.promote_types(hidden_TD.dtype, torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD) if for_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=accumulate) if for_weight else None
        grad_bias_V = torch.zeros_like(weight_VD[:, 0], dtype=accumulate) if for_bias else None
        losses_T = hidden_TD.new_zeros(len(targets_T), dtype=accumulate)
        penalty = losses_T.new_zeros(())

        for start in range(0, len(targets_T), chunk_size):
            chunk = slice(start, start + chunk_size)
            ignored_C1 = (targets_T[chunk] == IGNORED).unsqueeze(1)
            targets_C1 = targets_T[chunk].unsqueeze(1).masked_fill(ignored_C1, 0)
            # Zero rows instead of ignored ones keep what they hold, NaN too, out of all sums.
            hidden_CD = hidden_TD[chunk].masked_fill(ignored_C1, 0)

            softmax = make_softmax(F.linear(hidden_CD, weight_VD, bias_V), targets_C1, cap, columns)
            losses_T[chunk] = softmax.losses.masked_fill(ignored_C1, 0).squeeze(1)
            if coefficient:
                partitions_C1 = softmax.partitions.masked_fill(ignored_C1, 0)
                penalty += coefficient * weighted(partitions_C1.square().squeeze(1), _part(weights_T, chunk)).sum()
            if not any(wanted):
                continue

            valid_C1 = ~ignored_C1
            of_partitions_C1 = 2 * coefficient * partitions_C1 if coefficient else None
            grad_logits_CV = softmax.gradient(valid_C1, _part(weights_T, chunk), of_partitions_C1)
            if grad_bias_V is not None:
                grad_bias_V += _sum_of_rows(grad_logits_CV, valid_C1, accumulate)
            grad_logits_CV = grad_logits_CV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = (grad_logits_CV @ weight_VD).masked_fill(ignored_C1, 0)
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_logits_CV.T, hidden_CD)
            del softmax, grad_logits_CV  # before there are those of the next chunk

        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD, grad_bias_V)
        ctx.dtype = hidden_TD.dtype
        ctx.mark_non_differentiable(losses_T, penalty)
        return weighted(losses_T, weights_T).sum(), losses_T, penalty

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        return *(_scaled(grad, grad_total, ctx.dtype) for grad in ctx.saved_tensors), *[None] * 8


class Softmax:
    """Of the logits of a chunk, by torch's operations, in fp32 or wider."""

    losses: torch.Tensor
    """−log softmax(logits)[target], ``(C, 1)``."""
    partitions: torch.Tensor
    """The logarithm of the sum of exp(logits), ``(C, 1)``."""

    def __init__(
        self,
        logits_CV: torch.Tensor,
        targets_C1: torch.Tensor,
        cap: float | None,
        columns: tuple[int, dist.ProcessGroup] | None,
    ) -> None:
        """
        Args:
            logits_CV: in the compute dtype, before the cap. They may be written over.
            targets_C1: ids of the whole vocabulary.
            cap: of the logits.
            columns: as for ``_ChunkedCrossEntropy``.
        """
        self._targets_C1 = targets_C1
        self._first, group = columns or (0, None)
        accumulate = torch.promote_types(logits_CV.dtype, torch.float32)
        logits_CV, self._slopes_CV = _capped(logits_CV, cap, accumulate)
        if group is None:
            log_probabilities_CV = torch.log_softmax(logits_CV, dim=1, dtype=accumulate)
            self.partitions = logits_CV[:, :1].to(accumulate) - log_probabilities_CV[:, :1]
            self.losses = -log_probabilities_CV.gather(1, targets_C1)
            self._probabilities_CV = log_probabilities_CV.exp_()
        else:
            found = softmax_parts(logits_CV.to(accumulate), targets_C1, self._first, group)
            self.losses, self._probabilities_CV, self.partitions = found

    def gradient(
        self, valid_C1: torch.Tensor, weights_C: torch.Tensor | None, of_partitions_C1: torch.Tensor | None
    ) -> torch.Tensor:
        """d total / d logits = softmax − one_hot(target); that of a log-partition is softmax. Asked for once.

        Args:
            valid_C1: where there is a target. Elsewhere rows are 0 or have no meaning.
            weights_C: of the tokens.
            of_partitions_C1: d penalty / d log-partition.
        """
        if of_partitions_C1 is not None:
            self._probabilities_CV *= 1 + of_partitions_C1
        gradient_CV = subtract_targets(self._probabilities_CV, self._targets_C1, self._first)
        if weights_C is not None:
            gradient_CV *= weights_C.unsqueeze(1)
        if self._slopes_CV is not None:
            gradient_CV *= self._slopes_CV
        return gradient_CV


def _capped(
    logits_CV: torch.Tensor, cap: float | None, accumulate: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits, and where they are capped, how they change with what is capped."""
    if cap is None:
        return logits_CV, None
    tanh_CV = torch.tanh(logits_CV.to(accumulate) / cap)
    return cap * tanh_CV, 1 - tanh_CV.square()


def _sum_of_rows(rows_CV: torch.Tensor, valid_C1: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    """Over valid ones; those in a narrower dtype are 0 elsewhere."""
    if rows_CV.dtype == accumulate:
        return valid_C1.to(accumulate).squeeze(1) @ rows_CV
    return rows_CV.sum(0, dtype=accumulate)


def _part(weights_T: torch.Tensor | None, chunk: slice) -> torch.Tensor | None:
    return None if weights_T is None else weights_T[chunk]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, rounding the product to its own dtype only where there is no kernel that need not."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(grad: torch.Tensor | None, by: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """``grad · by``, rounded once to ``dtype``, without a temporary in ``grad``'s dtype."""
    return None if grad is None else torch.mul(grad, by, out=torch.empty_like(grad, dtype=dtype))
