"""Who sees whom: masks that are built once a forward and shared by all layers."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Rows and columns of a tile of FlexAttention's mask."""


def document_mask(document: torch.Tensor, window: int = 0) -> torch.Tensor:
    """``(B, S)`` document ids to ``(B, 1, S, S)`` bool: each position sees its document up to and including itself.

    Args:
        window: how many positions it sees at most; 0: all.
    """
    mask = document[:, :, None] == document[:, None, :]
    return (mask & causal_mask(document.shape[1], window, document.device)).unsqueeze(1)


def causal_mask(seq_len: int, window: int, device: torch.device) -> torch.Tensor:
    """``(S, S)`` bool: each position sees itself and what lies before it, ``window`` positions in all; 0: all."""
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()
    return causal if window == 0 else causal.triu(1 - window)


def document_block_mask(document: torch.Tensor, window: int = 0) -> BlockMask:
    """The same as ``document_mask``, for FlexAttention, without ever having ``S × S`` elements.

    A tile can only be seen by another if the ranges of their document ids overlap, and is seen as a whole by a later
    tile if all of both is one document; a window leaves out tiles that are too far away. The rest is decided element by
    element inside the kernel. Nothing here waits for the device, as a list of the documents' lengths would.

    Args:
        document: ``(B, S)`` int64, ids in any order.
        window: as for ``document_mask``.
    """
    seq_len = document.shape[1]
    n_tiles = -(-seq_len // BLOCK)
    rest = n_tiles * BLOCK - seq_len
    tiles = torch.cat((document, document[:, -1:].expand(-1, rest)), dim=1).unflatten(1, (n_tiles, BLOCK))  # type: ignore[no-untyped-call]  # torch's
    low, high = tiles.amin(-1), tiles.amax(-1)

    index = torch.arange(n_tiles, device=document.device)
    earlier = index[:, None] > index[None, :]
    overlap = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    uniform = low == high
    whole = earlier & uniform[:, :, None] & uniform[:, None, :] & (low[:, :, None] == low[:, None, :])
    possible = earlier | (index[:, None] == index[None, :])
    if window:
        apart = (index[:, None] - index[None, :]) * BLOCK  # of a query and a key at the same place in their tiles
        possible = possible & (apart - (BLOCK - 1) < window)
        whole = whole & (apart + (BLOCK - 1) < window)
    if rest:
        whole[:, -1] = False  # rows beyond the end must be masked by the kernel
    partial = possible & overlap & ~whole

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (query >= key) & (document[batch, query] == document[batch, key])
        return seen & (query - key < window) if window else seen

    # Not `from_kv_blocks`: its way to the transposed lists goes through vmap and takes several times as long.
    (kv, full_kv), (q, full_q) = (
        [_ordered(tiles) for tiles in pair] for pair in ((partial, whole), (partial.mT, whole.mT))
    )
    return BlockMask(
        seq_lengths=(seq_len, seq_len),
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=q[0],
        q_indices=q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def cache_mask(
    start: int, end: int, filled: torch.Tensor | None, device: torch.device, window: int = 0
) -> torch.Tensor:
    """What the positions ``start … end − 1``, just appended to a cache, see of its ``end`` columns.

    The causal triangle ends at the bottom *right* corner: the last query sees every column.

    Args:
        filled: ``(B, end)`` bool, false at padding, or ``None``.
        window: as for ``document_mask``.

    Returns:
        ``(B or 1, 1, end − start, end)`` bool. Padding sees itself, so that no row is empty and softmax stays finite.
    """
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(end, device=device)[None, :]
    mask = (key <= query)[None]
    if window:
        mask = mask & (query - key < window)
    if filled is not None:
        mask = (mask & filled[:, None, :]) | (key == query)
    return mask.unsqueeze(1)


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(B, T, T)`` bool to the count of set columns of each row, ``(B, 1, T)``, and the columns, set ones first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    columns = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    # The kernels read rows as they lie in memory, and sorting a transposed matrix gives a transposed one.
    return counts.unsqueeze(1).contiguous(), columns.unsqueeze(1).to(torch.int32).contiguous()
