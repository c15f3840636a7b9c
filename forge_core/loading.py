"""A trained model and its tokenizer, from a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import attrs
import torch
from torch import nn

from forge_core.builder import ComponentBuilder
from forge_core.catalog import Catalog
from forge_core.checkpoint.compatibility import plugins_missing
from forge_core.checkpoint.store import Checkpoint
from forge_core.checkpoint.tensors import model_tensors, named_parameters
from forge_core.config.job import load_job
from forge_core.config.sections import Job
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.engine.build import build_on_meta, cast_parameters, materialise
from forge_core.errors import ConfigError


@attrs.frozen
class LoadedModel:
    """What a checkpoint holds, whole, on one device, without passes."""

    job: Job
    model: nn.Module
    tokenizer: Tokenizer | None


def load_model(
    checkpoint: Checkpoint,
    catalog: Callable[[Collection[str]], Catalog],
    device: torch.device,
    dtype: torch.dtype | None,
) -> LoadedModel:
    """Rebuild the model of ``checkpoint`` on ``device``, with parameters in ``dtype`` or in that of the file.

    Raises:
        ConfigError: the checkpoint needs a component that is not installed, or does not fit it.
    """
    state = checkpoint.state()
    try:
        job = load_job(checkpoint.path / "job.toml", catalog=catalog)
    except ConfigError as error:
        if missing := plugins_missing(checkpoint.manifest.versions):
            what = ", ".join(missing) + (", which is" if len(missing) == 1 else ", which are")
            raise ConfigError(f"{error}\n{checkpoint.path} was written with {what} not installed") from error
        raise
    build = ComponentBuilder(catalog(job.plugins.disable))
    model = build_on_meta(job, state["vocab_size"], build)
    materialise(model, device, job.train.seed)
    checkpoint.load(model_tensors(named_parameters([model]), [model]))
    if dtype is not None:
        cast_parameters(model, dtype)
    return LoadedModel(job, model, _tokenizer(state.get("tokenizer"), checkpoint.path, build))


def _tokenizer(table: dict[str, object] | None, folder: Path, build: ComponentBuilder) -> Tokenizer | None:
    if table is None:
        return None
    tokenizer: Tokenizer = build(build.resolve("tokenizer", table), base=folder / "tokenizer")
    return tokenizer
