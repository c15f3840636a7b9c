"""The data source ``activations_of``: what a trained model computes on its data, as an autoencoder reads them.

Shapes: B = samples, S = positions, D = width of a site.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.store import find_checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import DataSource, PositionedSource, Split, StreamedSource
from forge_core.distributed.mesh import choose_device
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.config import ActivationsOfConfig
from forge_plugins_interp.autoencoders.store_source import SCALED_BY, mean_scale
from forge_plugins_interp.observation import observe
from forge_plugins_interp.one_process import OneProcess
from forge_plugins_interp.reduction import Reduction, token_mask
from forge_plugins_interp.session import digest_of, inputs_of, read_batch
from forge_plugins_interp.sites import PlacedSite, Sites
from forge_plugins_weights.loading import LoadedModel, load_model

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ActivationsOf:
    """A ``DataSource``, whose batches are those of ``ActivationRows``. Sample i has the positions of sample i of the
    data that the model reads, in their order; ``positions`` is −1 at their padding."""

    counted_in = "activation"
    tokenizer = None
    vocab_size = 1

    def __init__(
        self, config: ActivationsOfConfig, /, *, seq_len: int, split: Split, build: Builder, seed: int
    ) -> None:
        checkpoint = find_checkpoint(Path(config.run), lambda line: None, model_problem)
        device = choose_device(config.device, "data.device")
        loaded = load_model(checkpoint, discover, device, _DTYPES[config.precision])
        self._model = loaded.model.eval().requires_grad_(False)
        longest: Any = self._model.max_seq_len
        if seq_len > longest:
            raise ConfigError(f"train.seq_len = {seq_len}: the model of {config.run} takes {longest}")
        self._device, self._source = device, _inputs(config, loaded, seq_len, split, build, seed)
        sites = Sites.of([self._model], [], OneProcess(), ComponentBuilder(discover(())))  # type: ignore[arg-type]
        self._placed = [_one(sites, config, key) for key in ("site", "target_site") if getattr(config, key)]
        self._lock = threading.Lock()
        """Hooks are on modules, which all threads share."""
        self.scales = [1.0] * len(self._placed)
        self._widths: list[int] = []
        self._measure(seq_len, scale=config.scale)
        facts = [config.site, config.target_site, seq_len, config.scale, config.precision]
        origin = [digest_of(checkpoint.path), self._source.fingerprint]
        self.fingerprint = hashlib.sha256(json.dumps([*facts, *origin]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._source)

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        dims, names = ("sample", "position", "width"), ("activation", "target_activation")
        found = {
            name: Entry(dims=dims, dtype="float32", sizes=(None, None, width))
            for name, width in zip(names, self._widths, strict=False)
        }
        return {**found, "scales": Entry(dims=("sample", "which"), dtype="float32", sizes=(None, 2))}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        rows, is_token = self._run(indices)
        found = {}
        for name, values, scale in zip(("activation", "target_activation"), rows, self.scales, strict=False):
            activation = np.zeros((*is_token.shape, values.shape[1]), np.float32)
            activation[is_token] = values.numpy() / scale
            found[name] = activation
        return {
            "positions": np.where(is_token, np.arange(is_token.shape[1]), -1),
            **found,
            "scales": np.tile(np.array([*self.scales, 1.0][:2], np.float32), (len(indices), 1)),
        }

    def _measure(self, seq_len: int, *, scale: bool) -> None:
        """The width of each site, and the mean norm of the first rows over its root."""
        n = min(len(self._source), -(-SCALED_BY // seq_len) if scale else 1)
        parts = [self._run(np.arange(start, min(start + 8, n)))[0] for start in range(0, n, 8)]
        of_sites = [torch.cat(one) for one in zip(*parts, strict=True)]
        self._widths = [rows.shape[1] for rows in of_sites]
        if scale:
            self.scales = [mean_scale(rows) for rows in of_sites]

    def _run(self, indices: np.ndarray) -> tuple[list[torch.Tensor], np.ndarray]:
        """The rows of each site, ``(n, width)`` fp32, and which of the positions ``(B, S)`` they are."""
        batch = read_batch(self._source, indices)
        inputs = {name: entry.to(self._device) for name, entry in inputs_of(self._source, batch).items()}
        tokens, is_token = batch["tokens"], token_mask(batch, *batch["tokens"].shape)
        found: dict[str, torch.Tensor] = {}

        def take(placed: PlacedSite, value: torch.Tensor) -> None:
            rows = Reduction().rows(placed.site, value, is_token, 0)
            found[placed.name] = rows.flatten(1).float().cpu()
            if len(found) == len(self._placed):
                raise _AllSeen

        with self._lock, torch.no_grad():
            try:
                with observe(self._placed, take):
                    self._model(tokens.to(self._device), **inputs)
            except _AllSeen:  # what comes after the last site is not computed
                pass
            else:
                missing = next(placed.name for placed in self._placed if placed.name not in found)
                raise ConfigError(f"site {missing}: the model has not computed it")
        return [found[placed.name] for placed in self._placed], is_token.numpy()


class _AllSeen(Exception):  # noqa: N818  # no error
    """Ends a forward."""


def _inputs(
    config: ActivationsOfConfig, loaded: LoadedModel, seq_len: int, split: Split, build: Builder, seed: int
) -> DataSource:
    """The data that the model reads.

    Raises:
        ConfigError: they have no end, or are not for this model.
    """
    use = loaded.job.data if config.inputs is None else config.inputs
    source = build(use, seq_len=seq_len, split=split, seed=seed, samples_per_step=1, phases=())
    if isinstance(source, PositionedSource | StreamedSource):
        raise ConfigError(
            f"{use.name} has no end, so that samples cannot be read by their numbers; name others: inputs"
        )
    ours, theirs = loaded.tokenizer, source.tokenizer
    if ours is not None and theirs is not None and ours.fingerprint != theirs.fingerprint:
        raise ConfigError("inputs: they have another tokenizer than the model")
    model: Any = loaded.model
    if source.vocab_size > model.vocab_size:
        raise ConfigError(
            f"inputs: they have a vocabulary of {source.vocab_size}, and the model one of {model.vocab_size}"
        )
    found: DataSource = source
    return found


def _one(sites: Sites, config: ActivationsOfConfig, key: str) -> PlacedSite:
    """
    Raises:
        ConfigError: the model has no such site, or one without a row for each position.
    """
    name = getattr(config, key)
    try:
        chosen = sites.chosen([name])
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if len(chosen) > 1:
        raise ConfigError(f"{key} = {name!r}: means {len(chosen)} sites; name one of them")
    if chosen[0].site.dims[:1] != ("sample",) or "position" not in chosen[0].site.dims:
        raise ConfigError(
            f"{key} = {name!r}: has the dimensions {', '.join(chosen[0].site.dims)}, and no row a position"
        )
    return chosen[0]
