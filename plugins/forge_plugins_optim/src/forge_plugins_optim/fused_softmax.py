"""Losses of a chunk of logits, and their gradient in the memory of the logits, by two Triton kernels: two reads and one
write of what plain operations read and write several times, in fp32.

Shapes: C tokens of one chunk, V columns of this rank.
"""

# Names end in their shape, in capitals:

from __future__ import annotations

import torch
import torch.distributed as dist
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # torch for CUDA brings it
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_BLOCK = 4096
"""Columns that a program has at one time."""


class FusedSoftmax:
    """Same as ``Softmax`` of ``chunked_cross_entropy``. All sums are fp32; the gradient has the logits' dtype."""

    def __init__(
        self,
        logits_CV: torch.Tensor,
        targets_C1: torch.Tensor,
        cap: float | None,
        columns: tuple[int, dist.ProcessGroup] | None,
    ) -> None:
        self._first, group = columns or (0, None)
        self._logits_CV, self._targets_C1, self._cap = logits_CV, targets_C1, cap
        maxima_C1, sums_C1, chosen_C1 = logits_CV.new_empty((3, len(logits_CV), 1), dtype=torch.float32)
        self._launch(_find_sums, maxima_C1, sums_C1, chosen_C1)
        if group is not None:
            own_C1 = maxima_C1.clone()
            dist.all_reduce(maxima_C1, dist.ReduceOp.MAX, group=group)
            both_2C1 = torch.stack((sums_C1 * (own_C1 - maxima_C1).exp(), chosen_C1))
            dist.all_reduce(both_2C1, group=group)
            sums_C1, chosen_C1 = both_2C1
        self.partitions = maxima_C1 + sums_C1.log()
        self.losses = self.partitions - chosen_C1

    def gradient(
        self, valid_C1: torch.Tensor, weights_C: torch.Tensor | None, of_partitions_C1: torch.Tensor | None
    ) -> torch.Tensor:
        """See ``Softmax``; 0 in rows without a target."""
        of_target_C1 = valid_C1.float() if weights_C is None else valid_C1 * weights_C.float().unsqueeze(1)
        of_softmax_C1 = of_target_C1 if of_partitions_C1 is None else of_target_C1 * (1 + of_partitions_C1)
        self._launch(_write_gradient, self.partitions, of_softmax_C1, of_target_C1)
        return self._logits_CV

    def _launch(self, kernel: triton.JITFunction, *rows: torch.Tensor) -> None:
        n_tokens, n_columns = self._logits_CV.shape
        block = min(_BLOCK, triton.next_power_of_2(n_columns))
        place = (self._logits_CV, self._logits_CV.stride(0), self._targets_C1.contiguous(), self._first, n_columns)
        kernel[(n_tokens,)](*place, self._cap or 1.0, *rows, is_capped=self._cap is not None, block=block, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def _find_sums(  # type: ignore[no-untyped-def]  # Triton's language has no such types
    logits, stride, targets, first, n_columns, cap, maxima, sums, chosen, is_capped: tl.constexpr, block: tl.constexpr
):
    """Of a row: the maximum, the sum of exp(logit − maximum) in one pass (Milakov and Gimelshein, 2018,
    https://arxiv.org/abs/1805.02867, algorithm 3), and the target's logit, 0 where another rank has it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = float("-inf")
    total = 0.0
    for start in range(0, n_columns, block):
        columns = start + tl.arange(0, block)
        values = tl.load(logits + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
        if is_capped:
            values = cap * (2 * tl.sigmoid(2 * values / cap) - 1)
        values = tl.where(columns < n_columns, values, float("-inf"))
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    target = tl.load(targets + row) - first
    is_here = (target >= 0) & (target < n_columns)
    value = tl.load(logits + target, mask=is_here, other=0.0).to(tl.float32)
    if is_capped:
        value = cap * (2 * tl.sigmoid(2 * value / cap) - 1)
    tl.store(maxima + row, largest)
    tl.store(sums + row, total)
    tl.store(chosen + row, value)


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def _write_gradient(  # type: ignore[no-untyped-def]  # Triton's language has no such types
    logits,
    stride,
    targets,
    first,
    n_columns,
    cap,
    partitions,
    of_softmax,
    of_target,
    is_capped: tl.constexpr,
    block: tl.constexpr,
):
    """In the place of a row: ``of_softmax · softmax − of_target · one_hot(target)``, by the logits before their cap."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row) - first
    partition = tl.load(partitions + row)
    for_all = tl.load(of_softmax + row)
    for_target = tl.load(of_target + row)
    for start in range(0, n_columns, block):
        columns = start + tl.arange(0, block)
        values = tl.load(logits + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
        slopes = 1.0
        if is_capped:
            tanh = 2 * tl.sigmoid(2 * values / cap) - 1
            values = cap * tanh
            slopes = 1 - tanh * tanh
        gradient = for_all * tl.exp(values - partition) - tl.where(columns == target, for_target, 0.0)
        tl.store(logits + columns, (gradient * slopes).to(logits.dtype.element_ty), mask=columns < n_columns)
