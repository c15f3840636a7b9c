"""The model whose activations a dictionary has learned: found again, for the words of its tokens and its head.

Shapes: N = directions, D = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.manifest import as_size
from forge_core.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint, open_checkpoint
from forge_core.errors import ConfigError
from forge_plugins_interp.session import digest_of
from forge_plugins_interp.store import Store
from forge_plugins_weights.loading import LoadedModel, load_model

_STREAM = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "shared_out")
"""Last parts of the names of sites whose values are in the residual stream, or are added to it."""


def base_of_store(store: Store, folders: Sequence[Path]) -> Checkpoint:
    """The checkpoint that a store was extracted from.

    Args:
        folders: where its run may be: the ones that have its directory.

    Raises:
        ConfigError: it is in none of them.
    """
    origin = store.manifest.origin
    name, step = str(origin.get("run") or ""), origin.get("step")
    if name and isinstance(step, int):
        for folder in folders:
            path = CheckpointStore(folder / name / "checkpoints").folder(step)
            if path.is_dir() and _is_of(path, store):
                return open_checkpoint(path, model_problem)
    raise ConfigError(
        f"the checkpoint that {store.folder} was extracted from, of step {step} of the run {name!r}, is not in "
        f"{' or '.join(map(str, folders))}"
    )


def base_at(path: Path, store: Store, log: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at a path, of which the store must be.

    Raises:
        ConfigError: there is none, or the store was extracted from another one.
    """
    checkpoint = find_checkpoint(path, log, model_problem)
    if not _is_of(checkpoint.path, store):
        raise ConfigError(
            f"--base {path}: {store.folder} was extracted from another checkpoint, of step "
            f"{store.manifest.origin.get('step')} of the run {store.manifest.origin.get('run')!r}"
        )
    return checkpoint


def _is_of(path: Path, store: Store) -> bool:
    known = store.manifest.origin.get("checkpoint")
    return (path / "manifest.json").is_file() and digest_of(path) == known


def load_base(checkpoint: Checkpoint, catalog: Callable[..., Any], most_gib: float) -> LoadedModel:
    """The model on the CPU, in fp32, and its tokenizer.

    Raises:
        ConfigError: it is larger than is allowed, or cannot be opened.
    """
    if checkpoint.manifest.n_bytes > most_gib * 2**30:
        raise ConfigError(
            f"{checkpoint.path} has {as_size(checkpoint.manifest.n_bytes)}, and at most {most_gib:g} GiB are opened"
        )
    return load_model(checkpoint, catalog, torch.device("cpu"), torch.float32)


@torch.no_grad()
def logit_weights(model: nn.Module, directions: torch.Tensor, site: str) -> torch.Tensor:
    """What directions of the residual stream do to logits: what the model's own norm and head make of each, less what
    they make of zeros.

    Each is scaled to the norm √D first. So a gain, a bias and the mean that LayerNorm takes off are those of the model,
    and the scale that the norm would have with the rest of the stream is left out: it is one positive factor of all
    tokens. What comes after the head, such as a cap, is left out, too.

    Args:
        directions: ``(N, D)``.
        site: whose directions they are.

    Returns:
        ``(N, V)`` fp32.

    Raises:
        ConfigError: the site is not of the residual stream, or the model has no norm and head for it.
    """
    if site.rpartition(".")[2] not in _STREAM:
        raise ConfigError(f"values of {site} are not added to the residual stream, so that a direction has no logits")
    norm, head = getattr(model, "norm", None), getattr(model, "head", None)
    weight = getattr(head, "weight", None)
    if norm is None or head is None or not isinstance(weight, torch.Tensor) or weight.shape[-1] != directions.shape[-1]:
        raise ConfigError(
            f"the model has no head that reads {directions.shape[-1]} features, so that no logits are told"
        )
    scaled = F.normalize(directions.float(), dim=-1) * directions.shape[-1] ** 0.5
    of_nothing: torch.Tensor = head(norm(torch.zeros_like(scaled[:1])[None]))
    found: torch.Tensor = head(norm(scaled[None])) - of_nothing
    return found[0]
