"""What attention computes on the way, for whoever observes it: scores, pattern, and what each head writes.

Shapes: B = batch, H = query heads, H_kv = key-value heads, S = queries, T = keys, D = width of the residual stream.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_dense.mask import causal_mask

Mask = torch.Tensor | BlockMask | None

_SCORES = ("sample", "head", "position", "key")
_QUERIES = ("sample", "head", "position", "head_width")


def core_sites(name: str = "core") -> dict[str, Site]:
    """The sites of an ``AttentionCore`` that is called ``name``."""
    folder = "forge_plugins_dense.attention_sites"
    computed = functools.partial(Site, module=name, where="input", dims=_SCORES, computed_from=_QUERIES)
    return {
        "q_rot": Site(module=name, where="input", argument=0, dims=_QUERIES),
        "k_rot": Site(module=name, where="input", argument=1, dims=("sample", "kv_head", "key", "head_width")),
        "attn_scores_raw": computed(compute=f"{folder}:raw_scores"),
        "attn_scores_scaled": computed(compute=f"{folder}:scaled_scores"),
        "attn_scores": computed(compute=f"{folder}:scores", replace=f"{folder}:mixed_by_scores"),
        "attn_pattern": computed(compute=f"{folder}:pattern", replace=f"{folder}:mixed_by_pattern"),
        "z": Site(module=name, dims=_QUERIES),
    }


def output_sites(head_size: int) -> dict[str, Site]:
    """The sites of a mixer whose output projection is ``o``, of heads that it reads ``head_size`` features of."""
    return {
        "attn_head_out": Site(
            module="o",
            where="input",
            dims=("sample", "position", "head", "width"),
            compute="forge_plugins_dense.attention_sites:head_outputs",
            computed_from=("sample", "position", "head"),
            options={"head_size": head_size},
        )
    }


def raw_scores(core: nn.Module, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """``q · k``, ``(B, H, S, T)`` fp32, before scale, cap and mask.

    Args:
        q: ``(B, H, S, head_size)``, after norms, rotation and ``logit_scale``.
        k: ``(B, H_kv, T, head_size)``.
    """
    return _products(q.float(), k.float())


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    grouped: torch.Tensor = q.unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]  # torch's
    return (grouped @ k.unsqueeze(2).mT).flatten(1, 2)


def scaled_scores(core: nn.Module, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """``q · k / √head_size``, ``(B, H, S, T)`` fp32."""
    # the scale is on the smaller factor: a pass less over the scores
    return _products(q.float() / math.sqrt(q.shape[-1]), k.float())


def scores(
    core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, *_: Any, **__: Any
) -> torch.Tensor:
    """What the softmax reads, ``(B, H, S, T)`` fp32: scaled, capped where the model caps, −∞ where a query sees no key.

    Args:
        mask, causal: as in ``BlockInputs``.
    """
    logits = scaled_scores(core, q, k)
    if core.softcap is not None:
        logits = core.softcap * torch.tanh(logits / core.softcap)
    seen = _seen(core, mask, causal, q, k)
    return logits if seen is None else logits.masked_fill_(~seen, -math.inf)  # no other reads them


def _seen(core: nn.Module, mask: Mask, causal: bool, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Which keys each query sees, ``(B or 1, H or 1, S, T)`` bool; ``None`` is all.

    Raises:
        ConfigError: the mask is of no kind that can be read.
    """
    if isinstance(mask, BlockMask):
        return _seen_in_blocks(mask, q.shape[-2], k.shape[-2])
    if causal:
        return causal_mask(k.shape[-2], 0, q.device)[None, None]
    if mask is None or (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return mask
    kind = f"tensor of {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__qualname__
    raise ConfigError(
        f"the mask that {type(core).__qualname__} is given cannot be read: it is a {kind}, and must be a tensor of "
        "torch.bool or a BlockMask"
    )


def _seen_in_blocks(mask: BlockMask, n_queries: int, n_keys: int) -> torch.Tensor:
    """As kernels read it: ``mask_mod`` decides within the blocks that are listed as partial; full ones are seen."""
    device = str(mask.kv_indices.device)
    by_element = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], n_queries, n_keys, device=device)
    seen = by_element & _listed(mask.kv_num_blocks, mask.kv_indices, mask.BLOCK_SIZE, n_queries, n_keys)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return seen
    return seen | _listed(mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE, n_queries, n_keys)


def _listed(
    counts: torch.Tensor, columns: torch.Tensor, size: tuple[int, int], n_queries: int, n_keys: int
) -> torch.Tensor:
    """Whether each query and key lie in a block that is listed, ``(B, H, S, T)`` bool.

    Args:
        counts: how many blocks each row of blocks lists, ``(B, H, rows)``.
        columns: which; the first so many of ``(B, H, rows, n)``.
        size: of a block.
    """
    none = -(-n_keys // size[1])  # one column too many, for what is not listed
    is_listed = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    blocks = torch.zeros(*counts.shape, none + 1, dtype=torch.bool, device=columns.device)
    blocks.scatter_(-1, torch.where(is_listed, columns, none).long(), True)
    elements = blocks[..., :-1].repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)
    return elements[..., :n_queries, :n_keys]


def pattern(
    core: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    causal: bool,
    sinks: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """How much each query takes of each key, ``(B, H, S, T)`` fp32, before dropout.

    Rows sum to 1; with a sink, to what the sink leaves; a query that sees no key has zeros.
    """
    seen = _seen(core, mask, causal, q, k)  # from the mask, as looking for it in scores is one more pass over these
    sees_none = None if seen is None else ~seen.any(-1, keepdim=True)
    logits = scores(core, q, k, v, mask, causal)
    if sinks is None and logits.device.type == "cpu" and not (logits.requires_grad or _any(sees_none)):
        return torch.softmax(logits, -1, out=logits)  # the pages of new memory cost a CPU more than the softmax
    return _softmax(logits, sinks, sees_none)


def _any(where: torch.Tensor | None) -> bool:
    return where is not None and bool(where.any())


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None, sees_none: torch.Tensor | None) -> torch.Tensor:
    """
    Args:
        sees_none: the queries whose scores are all −∞; ``None``: there are none.
    """
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat((column, logits), dim=-1).softmax(-1)[..., 1:]
    if sees_none is None or not _any(sees_none):
        return logits.softmax(-1)
    return logits.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)


def mixed_by_pattern(
    core: nn.Module, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """What attention gives with such a pattern, ``(B, H, S, head_size of v)`` in the dtype of ``v``.

    Args:
        weights: ``(B, H, S, T)``.
        v: ``(B, H_kv, T, head_size of v)``.
    """
    grouped: torch.Tensor = weights.to(v.dtype).unflatten(1, (v.shape[1], -1))  # type: ignore[no-untyped-call]  # torch's
    return (grouped @ v.unsqueeze(2)).flatten(1, 2)


def mixed_by_scores(
    core: nn.Module,
    logits: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    causal: bool,
    sinks: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """The same with such scores, as ``scores`` gives them."""
    sees_none = logits.amax(-1, keepdim=True) == -math.inf
    return mixed_by_pattern(core, _softmax(logits, sinks, sees_none), q, k, v)


def head_outputs(o: Any, mixed: torch.Tensor, *, head_size: int) -> torch.Tensor:
    """What each head writes, ``z_h W_O^h``, ``(B, S, H, D)``: their sum and the bias are the output of attention.

    Args:
        o: the output projection.
        mixed: ``(B, S, H · head_size)``, what it reads.
    """
    weight = o.weight.to_local() if isinstance(o.weight, DTensor) else o.weight
    by_head = weight.unflatten(1, (-1, head_size)).to(mixed.dtype)
    return torch.einsum("bshd,ohd->bsho", mixed.unflatten(-1, (-1, head_size)), by_head)  # type: ignore[no-untyped-call]  # torch's
