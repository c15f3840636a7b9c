"""Which keys of a whole sequence the queries of a part of it see: earlier ones and themselves, of their document.

Shapes: B = batch, S = sequence, P = this rank's positions.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Rows and columns of a tile of FlexAttention's mask."""


def dense_mask(place: torch.Tensor, seq_len: int, document: torch.Tensor | None, window: int = 0) -> torch.Tensor:
    """An element for every query and key.

    Args:
        place: ``(P,)`` int64, where in the sequence each query is.
        document: ``(B, S)`` int64 of the whole sequence, or ``None`` for one document.
        window: how many positions a query sees, itself among them; 0: all.

    Returns:
        ``(B or 1, 1, P, S)`` bool, true where the query sees the key.
    """
    ahead = place[:, None] - torch.arange(seq_len, device=place.device)
    mask = ((ahead >= 0) & (ahead < window) if window else ahead >= 0)[None]
    if document is not None:
        mask = mask & (document[:, place, None] == document[:, None, :])
    return mask.unsqueeze(1)


def block_mask(place: torch.Tensor, seq_len: int, document: torch.Tensor | None, window: int = 0) -> BlockMask:
    """The same as ``dense_mask`` for FlexAttention, without ever having ``P × S`` elements.

    A tile of queries sees nothing of a tile of keys that lies behind it or shares no range of document ids with it, and
    all of it if it lies before it and all of both is one document. Inside the others each element is decided by the
    kernel. Nothing here waits for the device.
    """
    first, last = _ranges(place[None])
    key_first, key_last = _ranges(torch.arange(seq_len, device=place.device)[None])
    possible = key_first[:, None, :] <= last[:, :, None]
    whole = key_last[:, None, :] <= first[:, :, None]
    if window:
        possible = possible & (first[:, :, None] - key_last[:, None, :] < window)
        whole = whole & (last[:, :, None] - key_first[:, None, :] < window)

    def reaches(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = place[query] >= key
        return seen & (place[query] - key < window) if window else seen

    if document is None:

        def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return reaches(query, key)
    else:
        of_query = document[:, place]
        low, high = (side[:, :, None] for side in _ranges(of_query))
        key_low, key_high = (side[:, None, :] for side in _ranges(document))
        possible = possible & (key_low <= high) & (low <= key_high)
        whole = whole & (low == high) & (key_low == key_high) & (low == key_low)

        def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return reaches(query, key) & (of_query[batch, query] == document[batch, key])

    if place.shape[0] % TILE:
        whole[:, -1] = False  # rows beyond the end must be masked by the kernel
    if seq_len % TILE:
        whole[:, :, -1] = False
    partial = possible & ~whole
    (kv, full_kv), (q, full_q) = (
        [_ordered(tiles) for tiles in pair] for pair in ((partial, whole), (partial.mT, whole.mT))
    )
    return BlockMask(
        seq_lengths=(place.shape[0], seq_len),
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=q[0],
        q_indices=q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=sees,
    )


def _ranges(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(B, N)`` to the smallest and the largest value of each tile, ``(B, tiles)``; the last one is filled up."""
    n_tiles = -(-values.shape[1] // TILE)
    rest = n_tiles * TILE - values.shape[1]
    tiles = torch.cat((values, values[:, -1:].expand(-1, rest)), dim=1).view(-1, n_tiles, TILE)
    return tiles.amin(-1), tiles.amax(-1)


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(B, R, C)`` bool to the count of set columns of each row, ``(B, 1, R)``, and the columns, set ones first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    columns = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    # The kernels read rows as they lie in memory, and sorting a transposed matrix gives a transposed one.
    return counts.unsqueeze(1).contiguous(), columns.unsqueeze(1).to(torch.int32).contiguous()
