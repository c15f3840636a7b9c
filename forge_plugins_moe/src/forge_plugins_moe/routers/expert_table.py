"""Which experts a token id has: by a hash function, or by a file."""

from __future__ import annotations

import functools
import heapq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.errors import ConfigError
from forge_plugins_moe.router_config import HashConfig


class ExpertTable(nn.Module):
    """Token ids to K experts each, all different.

    Raises:
        ConfigError: the file cannot be read, or does not hold what it should.
    """

    salt: torch.Tensor
    experts: torch.Tensor

    def __init__(self, config: HashConfig, n_experts: int) -> None:
        super().__init__()
        self.config, self.n_experts = config, n_experts
        self.register_buffer("salt", torch.empty(1, dtype=torch.int64))
        if config.file is not None:
            rows = len(read_expert_table(config.file, n_experts, config.top_k))
            self.register_buffer("experts", torch.empty(rows, config.top_k, dtype=torch.int64))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``(T,)`` int64 to ``(T, K)`` int64."""
        if self.config.file is None:
            return self._hashed(token_ids)
        rows = len(self.experts)
        listed = self.experts[token_ids.clamp(max=rows - 1)]
        return torch.where(token_ids[:, None] < rows, listed, self._hashed(token_ids))

    def _hashed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.config.table == "random":
            return self._ranks(token_ids).topk(self.config.top_k, dim=-1).indices
        # each block of E neighbouring ids has an order of the experts of its own
        order = self._ranks(token_ids // self.n_experts).argsort(dim=-1, stable=True)
        place = token_ids[:, None] + torch.arange(self.config.top_k, device=token_ids.device)
        return order.gather(1, place % self.n_experts)

    def _ranks(self, key: torch.Tensor) -> torch.Tensor:
        """A pseudo-random number for each key and expert, ``(T, E)``."""
        expert = torch.arange(self.n_experts, device=key.device)
        return _mix(_mix(key + self.salt)[:, None] + 0x9E3779B9 * (expert + 1))

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill the buffers; ``prefix`` is the qualified name of this module with a final dot."""
        rng.fill(f"{prefix}salt", self.salt, lambda full, generator: full.random_(0, 2**31, generator=generator))
        if self.config.file is not None:
            table = torch.from_numpy(read_expert_table(self.config.file, self.n_experts, self.config.top_k))
            rng.fill(f"{prefix}experts", self.experts, lambda full, _: full.copy_(table))


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The last step of MurmurHash3 (Appleby), 32 bits to 32, in int64."""
    value = value & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)


@functools.cache  # every layer asks
def read_expert_table(file: Path, n_experts: int, top_k: int) -> NDArray[np.int64]:
    """``(ids, K)``: what the file says, or what follows from how often it says that ids occur.

    Raises:
        ConfigError: the file cannot be read, or does not hold what it should.
    """
    try:
        content = np.load(file.expanduser(), allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"router.file: cannot read {file}: {error}") from error
    except ValueError as error:  # numpy's words are of pickles, which are not to be loaded
        raise ConfigError(f"router.file: {file} must be a .npy file of integers") from error
    if not isinstance(content, np.ndarray) or content.dtype.kind not in "iu" or content.size == 0:
        raise ConfigError(f"router.file: {file} must be a .npy file of integers")
    if content.ndim == 1:
        if content.min() < 0:
            raise ConfigError(f"router.file: {file} says that id {int(content.argmin())} occurs {content.min()} times")
        return deal_out(content, n_experts, top_k)
    if content.ndim != 2 or content.shape[1] != top_k:
        raise ConfigError(
            f"router.file: {file} has the shape {content.shape}; it must be (ids,), how often each occurs, or "
            f"(ids, {top_k}), its top_k = {top_k} experts"
        )
    return _checked(content.astype(np.int64), file, n_experts)


def deal_out(occurrences: NDArray[Any], n_experts: int, top_k: int) -> NDArray[np.int64]:
    """Ids ``(ids,)`` to experts ``(ids, K)``, the most frequent first, each to those with the fewest occurrences so far
    (Roller et al. 2021, arXiv 2106.04426, section 3.1). An id that never occurs counts as one that does once."""
    table = np.empty((len(occurrences), top_k), dtype=np.int64)
    loads = [(0, expert) for expert in range(n_experts)]
    for token_id in np.argsort(-occurrences.astype(np.int64), kind="stable"):
        least = [heapq.heappop(loads) for _ in range(top_k)]
        table[token_id] = [expert for _, expert in least]
        for load, expert in least:
            heapq.heappush(loads, (load + max(1, int(occurrences[token_id])), expert))
    return table


def _checked(table: NDArray[np.int64], file: Path, n_experts: int) -> NDArray[np.int64]:
    beyond = np.flatnonzero(((table < 0) | (table >= n_experts)).any(1))
    if len(beyond):
        token_id = int(beyond[0])
        raise ConfigError(
            f"router.file: {file} sends id {token_id} to {table[token_id].tolist()}; experts are 0 to {n_experts - 1}"
        )
    in_order = np.sort(table, axis=1)
    twice = np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(1))
    if len(twice):
        token_id = int(twice[0])
        raise ConfigError(f"router.file: {file} sends id {token_id} to an expert twice: {table[token_id].tolist()}")
    return table
