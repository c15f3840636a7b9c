"""The products of a GPU in float8, by products in fp32: what they take, and what they refuse, is an H100's."""

from __future__ import annotations

import torch


def register() -> torch.library.Library:
    """They last as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm", _multiply, "CUDA")
    library.impl("_scaled_grouped_mm", _multiply_groups, "CUDA")
    return library


def _multiply(rows, columns, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """With a scale for all, or one for each row and each column."""
    _must_fit(rows, columns)
    (count, _), (_, width) = rows.shape, columns.shape
    of_tensors = scale_a.numel() == scale_b.numel() == 1
    _must(of_tensors or (scale_a.shape, scale_b.shape) == ((count, 1), (1, width)), "one scale, or one for each row")
    _must(of_tensors or out_dtype == torch.bfloat16, "scales of rows give bf16")
    product = (rows.float() * scale_a) @ (columns.float() * scale_b)
    return (product if bias is None else product + bias).to(out_dtype or rows.dtype)


def _multiply_groups(
    rows,
    columns,
    scale_a,
    scale_b,
    offs=None,
    bias=None,
    scale_result=None,
    out_dtype=None,
    use_fast_accum=False,
):
    """Of rows ``(M, K)`` with matrices ``(G, K, N)``, each of which has the rows up to its offset. Others are left as
    they are in memory, which is NaN here."""
    _must(rows.dim() == 2 and columns.dim() == 3, "rows by a matrix for each group")
    _must_fit(rows, columns)
    _must(offs.dtype == torch.int32 and offs.shape == columns.shape[:1], "an offset of int32 for each group")
    _must((scale_a.shape, scale_b.shape) == (rows.shape[:1], columns.shape[::2]), "scales of rows and of columns")
    _must(out_dtype == torch.bfloat16, "it gives bf16")
    out = rows.new_full((len(rows), columns.shape[2]), torch.nan, dtype=out_dtype)
    begin = 0
    for group, end in enumerate(offs.cpu().tolist()):
        factor = columns[group].float() * scale_b[group]
        out[begin:end] = ((rows[begin:end].float() * scale_a[begin:end, None]) @ factor).to(out_dtype)
        begin = end
    return out


def _must_fit(rows: torch.Tensor, columns: torch.Tensor) -> None:
    _must(rows.stride(-1) == 1 and columns.stride(-2) == 1, "rows by columns, in memory")
    _must(all(size % 16 == 0 for size in columns.shape[-2:]), f"sizes {tuple(columns.shape)} are no multiples of 16")
    _must(rows.element_size() == columns.element_size() == 1, "float8")


def _must(holds: bool, sentence: str) -> None:
    if not holds:
        raise RuntimeError(f"the stand-in's product in float8: {sentence}")
